"""The checks: each a function on a :class:`Scene` that raises AssertionError, or :class:`Skip`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from typing import Any

import torch
from torch import Tensor

from .._contract import ClientUpdate
from ..plugins import get_plugin_manager
from ._probe import ProbeError, tensor
from ._scene import Driven, KitModel, Played, Scene, differences, floats, is_float, same

__all__ = ["CHECKS", "Check", "Skip"]

FOUR = (0, 1, 2, 3)
Function = Callable[[Scene], None]


class Skip(Exception):
    """This check does not apply; says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the kit.

    Attributes:
        name: Its name.
        group: What it belongs to.
        function: Does it.
        needs: What the host must be able to give for it; else it is skipped.
        summary: What holds when it passes.
    """

    name: str
    group: str
    function: Function
    needs: frozenset[str]
    summary: str


_found: list[Check] = []


def _check(group: str, *needs: str) -> Callable[[Function], Function]:
    def add(function: Function) -> Function:
        summary = " ".join((function.__doc__ or "").split())
        name = function.__name__.removeprefix("_").replace("_", "-")
        _found.append(Check(name, group, function, frozenset(needs), summary))
        return function

    return add


# --- What reaches the rule ---------------------------------------------------------------------


@_check("updates", "updates")
def _update_sign(scene: Scene) -> None:
    """An update is global model minus client's model, or the client's model as it is."""
    for sent, seen, mine, theirs in _compared(scene.server().round()):
        assert _dot(mine, theirs) > 0, (
            f"client {sent.client_id}: the update has the wrong sign (kind={seen.kind!r}); "
            'kind "state" is the model after training, kind "update" is global minus client'
        )


@_check("updates", "updates")
def _update_scale(scene: Scene) -> None:
    """An update has the length that the client moved: not scaled, weighted or averaged."""
    for sent, _seen, mine, theirs in _compared(scene.server().round()):
        ratio = (_dot(theirs, theirs) / _dot(mine, mine)) ** 0.5
        assert abs(ratio - 1) < 1e-2, (
            f"client {sent.client_id}: the update is {ratio:.4g} times as long as what the client "
            f"did (it has {sent.num_examples:g} examples); give it unscaled, weights go apart"
        )


@_check("updates", "updates")
def _update_entries(scene: Scene) -> None:
    """Every parameter of an update is the client's own, under its name."""
    for sent, _seen, mine, theirs in _compared(scene.server().round()):
        missing = sorted(mine.keys() - theirs.keys())
        assert not missing, f"client {sent.client_id}: entries do not reach the rule: {missing}"
        for name, off in _off(mine, theirs).items():
            assert off < 1e-2, (
                f"client {sent.client_id}: entry {name!r} does not arrive as it was sent (off by "
                f"up to {off:.3g})"
            )


@_check("updates", "updates")
def _weights(scene: Scene) -> None:
    """Each client's number of examples goes with its own update."""
    for sent, seen in scene.server().round().pairs():
        assert seen.num_examples == sent.num_examples, (
            f"client {sent.client_id} has {sent.num_examples:g} examples, the rule was told "
            f"{seen.num_examples:g}"
        )


@_check("updates", "updates")
def _every_client_once(scene: Scene) -> None:
    """Every client of the round reaches the rule, once."""
    _arrived(scene.server().round())


@_check("updates", "updates", "client_ids")
def _client_ids(scene: Scene) -> None:
    """A client has the same id in every round, and no other client has it."""
    server = scene.server()
    known: dict[Any, Any] = {}
    for clients in (FOUR, (6, 3, 5, 2), (1, 0, 6, 4)):
        for sent, seen in server.round(*clients).pairs():
            before = known.setdefault(sent.client_id, seen.client_id)
            assert before == seen.client_id, (
                f"client {sent.client_id} was called {before!r} first and {seen.client_id!r} later"
            )
    twice = {name for name in known.values() if list(known.values()).count(name) > 1}
    assert not twice, f"two clients have the same id: {sorted(map(repr, twice))}"


@_check("updates", "updates")
def _order(scene: Scene) -> None:
    """The order in which replies arrive changes nothing: to the bit where ids are stable."""
    forth, back = scene.server().round(*FOUR), scene.server().round(*reversed(FOUR))

    def told(played: Played) -> dict[Any, float]:
        return {sent.client_id: seen.num_examples for sent, seen in played.pairs()}

    assert told(forth) == told(back), (
        f"clients' weights depend on the order of arrival: {told(forth)} and {told(back)}"
    )
    exact = "client_ids" in scene.adapter.gives
    for name, value in forth.state.items():
        equal = same(value, back.state[name]) if exact else _close(value, back.state[name])
        assert equal, f"entry {name!r} of the new model depends on the order of arrival"


@_check("updates", "loss")
def _loss(scene: Scene) -> None:
    """A rule that requires losses gets each client's own."""
    _reported(scene, "loss")


@_check("updates", "local_steps")
def _local_steps(scene: Scene) -> None:
    """A rule that requires step counts gets each client's own."""
    _reported(scene, "local_steps")


@_check("updates", "updates")
def _unmet_requirements(scene: Scene) -> None:
    """A rule that requires what the host cannot give is refused, not fed made-up numbers."""
    lacking = {"loss", "local_steps"} - scene.adapter.gives
    if not lacking:
        raise Skip("the host gives all that a rule can require")
    for name in sorted(lacking):
        scene.record.requires = frozenset({name})
        failure: Exception | None = None
        try:
            scene.server().round()
        except Exception as error:
            failure = error
        assert failure is not None, (
            f"the descriptor does not give {name!r}, and a rule that requires it ran"
        )
        assert name in _chain(failure), (
            f"a rule that requires {name!r} was refused without saying so: {failure}"
        )


@_check("updates", "updates")
def _inputs_unchanged(scene: Scene) -> None:
    """What clients sent is not changed."""
    server = scene.server()
    replies = server.replies()
    played = server.play(replies)
    for before, after in zip(played.sent, replies, strict=True):
        for name, value in before.values.items():
            assert name in after.values and same(value, after.values[name]), (
                f"client {before.client_id}: entry {name!r} of its reply was changed"
            )
        more = sorted(after.values.keys() - before.values.keys())
        assert not more, f"client {before.client_id}: entries were added to its reply: {more}"


# --- The global model: what the rule starts from, and what comes back --------------------------


@_check("model", "updates")
def _global_model(scene: Scene) -> None:
    """The rule is given the model that the clients of this round started from."""
    server = scene.server()
    wrong_from_the_start = False  # that has checks of its own
    for number in range(3):
        played = server.round()
        given = played.call.global_state
        for name, value in played.start.items():
            assert name in given, f"round {number}: the rule's global model lacks {name!r}"
            assert _close(value, given[name]), (
                f"round {number}: entry {name!r} of the rule's global model is not what the "
                "clients started from"
            )
        for sent, _seen, mine, theirs in _compared(played):
            off = max(_off(mine, theirs).values()) > 1e-2
            if number == 0:
                wrong_from_the_start |= off
            assert wrong_from_the_start or not off, (
                f"round {number}, client {sent.client_id}: the difference was not taken from the "
                "model that the client started from"
            )


@_check("model", "updates")
def _result(scene: Scene) -> None:
    """The host's new model has the parameters that the rule returned, under the same names."""
    played = scene.server().round()
    expected, found = _answer(played), played.state
    assert list(found) == list(expected), (
        f"the new model's entries are {list(found)}, the rule returned {list(expected)}"
    )
    for name in floats(expected):
        assert _close(expected[name], found[name]), (
            f"entry {name!r} of the new model is not what the rule returned"
        )
        assert not _close(played.start[name], found[name]), f"entry {name!r} did not move"


@_check("model", "updates")
def _buffers(scene: Scene) -> None:
    """Buffers reach the rule as they are, and come back as the rule returned them."""
    played = scene.server().round()
    names = [name for name in played.start if name not in floats(played.start)]
    answer = _answer(played)
    for sent, seen in played.pairs():
        for name in names:
            # Of booleans the global model's own are kept, so they need not be sent.
            if name not in seen.values and played.start[name].dtype == torch.bool:
                continue
            assert name in seen.values, f"client {sent.client_id}: {name!r} does not reach the rule"
            value = seen.values[name]
            if seen.kind == "update" and isinstance(value, Tensor) and value.dtype != torch.bool:
                value = played.start[name].double() - value.double()
            assert _close(sent.values[name], value), (
                f"client {sent.client_id}: buffer {name!r} is {value}, it sent {sent.values[name]}"
            )
    for name in names:
        assert name in played.state, f"the new model lacks buffer {name!r}"
        assert _close(answer[name], played.state[name]), (
            f"buffer {name!r} of the new model is {played.state[name]}, the rule returned "
            f"{answer[name]}"
        )


@_check("model", "updates")
def _dtypes(scene: Scene) -> None:
    """Entries keep dtype and shape: float16, float32, float64, integers, booleans, 0-d ones."""
    _typed(scene.server().round())


@_check("model", "updates")
def _bfloat16(scene: Scene) -> None:
    """Entries in bfloat16 keep dtype and shape."""
    _typed(scene.server(model=KitModel(torch.bfloat16)).round(), torch.bfloat16)


@_check("model", "updates")
def _own_copy(scene: Scene) -> None:
    """The global model shares no memory with what clients sent."""
    server = scene.server()
    replies = server.replies()
    first = server.play(replies)
    for reply in replies:
        for value in reply.values.values():
            if isinstance(value, Tensor):
                value.fill_(1)
    given = server.round().call.global_state
    for name, value in first.state.items():
        assert name in given and _close(value, given[name]), (
            f"entry {name!r} of the global model changed when a client's reply was overwritten"
        )


# --- Rounds ------------------------------------------------------------------------------------


@_check("rounds", "updates")
def _once_a_round(scene: Scene) -> None:
    """The rule runs exactly once a round."""
    server = scene.server()
    for number in range(3):
        calls = len(server.round().calls)
        assert calls == 1, f"round {number}: the rule ran {calls} times"


@_check("rounds", "updates")
def _round_numbers(scene: Scene) -> None:
    """The rule is told rounds that count up by one, or none."""
    server = scene.server()
    numbers = [server.round().call.round for _ in range(3)]
    if all(number is None for number in numbers):
        return
    first = numbers[0]
    assert first is not None and numbers == [first, first + 1, first + 2], (
        f"three rounds in a row were called {numbers}"
    )


@_check("rounds", "updates")
def _partial_participation(scene: Scene) -> None:
    """Other clients in each round: the rule sees those of this round and nobody else."""
    server = scene.server()
    for clients in (FOUR, (1, 4, 5, 6), (0, 2, 4, 6)):
        _arrived(server.round(*clients))


@_check("rounds", "updates")
def _changing_number(scene: Scene) -> None:
    """Another number of clients in each round, down to one."""
    server = scene.server()
    for clients in (FOUR, (1, 5), (0, 2, 3, 4, 6), (3,)):
        _arrived(server.round(*clients))


@_check("rounds", "updates")
def _empty_round(scene: Scene) -> None:
    """A round of clients without examples keeps the model, and the next one is as usual."""
    server = scene.server()
    idle = [dataclasses.replace(reply, num_examples=0) for reply in server.replies()]
    _kept(server.play(idle))
    _answer(server.round())


@_check("rounds", "updates")
def _no_replies(scene: Scene) -> None:
    """A round in which nobody replies keeps the model, and the next one is as usual."""
    server = scene.server()
    _kept(server.play([]))
    _answer(server.round())


@_check("rounds", "updates")
def _nan_client(scene: Scene) -> None:
    """A client that sends NaN is left out, and the others' round goes on."""
    server = scene.server()
    replies = server.replies()
    name = floats(server.state)[0]
    values = {**replies[1].values, name: torch.full_like(replies[1].values[name], torch.nan)}
    replies[1] = dataclasses.replace(replies[1], values=values)
    played = server.play(replies)
    _answer(played)
    bad = [n for n, v in played.state.items() if is_float(v) and not bool(v.isfinite().all())]
    assert not bad, f"the new model has NaN in {bad}"
    assert not _close(played.start[name], played.state[name]), "the model did not move"


# --- State -------------------------------------------------------------------------------------


@_check("state", "updates")
def _state_kept(scene: Scene) -> None:
    """The rule's state goes on from round to round."""
    server = scene.server()
    counts = [server.round().call.count for _ in range(3)]
    assert counts == [0, 1, 2], (
        f"in three rounds the rule had seen {counts} rounds before; one rule serves a whole run"
    )


@_check("state", "updates", "server_state")
def _restart(scene: Scene) -> None:
    """A server that is restarted goes on to the bit where it was."""
    folder = scene.folder()
    first = scene.server(folder=folder)
    first.round()
    second = scene.server(model=_holding(first), folder=folder)
    second.rounds = 1
    count = second.round().call.count
    assert count == 1, f"after a round and a restart the rule had seen {count} rounds"

    straight = scene.server("craft")
    for _round in range(3):
        straight.round()
    folder = scene.folder()
    before = scene.server("craft", folder=folder)
    before.round()
    after = scene.server("craft", model=_holding(before), folder=folder)
    for after.rounds in (1, 2):
        played = after.round()
    for name, value in straight.state.items():
        assert same(value, played.state[name]), (
            f"entry {name!r} differs from a run without the restart (rule craft, three rounds)"
        )


@_check("state", "updates")
def _one_rule_per_server(scene: Scene) -> None:
    """Two servers in one process have a rule each."""
    one, other = scene.server(), scene.server()
    calls = [server.round().call for server in (one, other, one)]
    assert calls[1].rule not in (calls[0].rule, calls[2].rule), "two servers share one rule object"
    assert calls[1].count == 0, (
        f"a new server's rule has seen {calls[1].count} rounds of another server"
    )


# --- Errors ------------------------------------------------------------------------------------


@_check("errors", "updates")
def _rule_error(scene: Scene) -> None:
    """An error of the rule reaches the host's way of failing, with its message."""
    server = scene.server()
    scene.record.error = ProbeError("the kit asked the probe to fail")
    _refused(server, server.replies(), "the kit asked the probe to fail")


@_check("errors", "updates")
def _round_after_error(scene: Scene) -> None:
    """After a round that failed, the next has its own clients only, and the same model."""
    server = scene.server()
    first = server.round()
    scene.record.error = ProbeError("the kit asked the probe to fail")
    with contextlib.suppress(Exception):
        server.round()
    played = server.round()
    before, after = len(first.call.updates), len(played.call.updates)
    assert before == after, f"{after} updates reached the rule, {before} before the error"
    for name, value in first.state.items():
        assert _close(value, played.call.global_state[name]), (
            f"entry {name!r} of the global model was changed by a round that failed"
        )


@_check("errors", "updates")
def _missing_entry(scene: Scene) -> None:
    """A client without one of the entries is an error that names the entry."""
    _refused_with(scene, "head.bias", None)


@_check("errors", "updates")
def _extra_entry(scene: Scene) -> None:
    """A client with an entry that the model lacks is an error that names the entry."""
    _refused_with(scene, "stranger.weight", torch.ones(3))


@_check("errors", "updates")
def _misshapen_entry(scene: Scene) -> None:
    """A client with an entry of another shape is an error that names the entry."""
    _refused_with(scene, "head.bias", torch.ones(5))


def _refused_with(scene: Scene, entry: str, value: Tensor | None) -> None:
    """One client sends this for an entry; nothing, if None."""
    server = scene.server()
    replies = server.replies()
    values = {**replies[1].values, entry: value}
    sent = {name: each for name, each in values.items() if each is not None}
    replies[1] = dataclasses.replace(replies[1], values=sent)
    _refused(server, replies, entry)


# --- Import ------------------------------------------------------------------------------------


@_check("import")
def _load(scene: Scene) -> None:
    """``load()`` gives the adapter."""
    assert scene.adapter.load() is not None, "load() returns None"


@_check("import")
def _lazy_import(scene: Scene) -> None:
    """Registering and listing the adapter imports nothing of the host."""
    adapter = scene.adapter
    modules = list(scene.harness.host_modules) or [
        module
        for module, owners in packages_distributions().items()
        if adapter.distribution is not None and adapter.distribution in owners
    ]
    assert modules, "not known what the host's modules are: set host_modules on the harness"
    if get_plugin_manager().adapters.get(adapter.name) is adapter:
        use = f"from craft_adapters.plugins import get_adapter; get_adapter({adapter.name!r}).found"
    else:
        use = f"import importlib; importlib.import_module({adapter.load.__module__!r})"
    code = f"import json, sys\n{use}\nprint()\nprint(json.dumps([*sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"a fresh process fails: {done.stderr.strip()[-500:]}"
    early = sorted(set(modules) & set(json.loads(done.stdout.splitlines()[-1])))
    assert not early, f"imported before load(): {early}"


CHECKS: Mapping[str, Check] = {check.name: check for check in _found}
"""Name -> check, in the order in which they run."""


# --- Shared ------------------------------------------------------------------------------------


Parts = Mapping[str, Tensor]


def _compared(played: Played) -> list[tuple[ClientUpdate, ClientUpdate, Parts, Parts]]:
    """(sent, seen, sent difference, seen difference) of each client that reached the rule."""
    return [
        (sent, seen, differences(sent, played.start), differences(seen, played.start))
        for sent, seen in played.pairs()
    ]


def _dot(one: Parts, other: Parts) -> float:
    names = [name for name in one if name in other and one[name].shape == other[name].shape]
    return float(sum((one[name] * other[name]).sum() for name in names))


def _off(mine: Parts, theirs: Parts) -> dict[str, float]:
    """Entry -> largest deviation of what was seen, but for one common factor (sign and scale)."""
    factor = _dot(mine, theirs) / _dot(theirs, theirs)
    return {
        name: float((factor * part - mine[name]).abs().max())
        if part.shape == mine[name].shape
        else float("inf")
        for name, part in theirs.items()
        if name in mine
    }


def _arrived(played: Played) -> None:
    """Those who sent reached the rule, each once, and nobody else did."""
    seen = [id(update) for _, update in played.pairs()]
    assert len(seen) == len(played.sent), (
        f"{len(seen)} of the round's {len(played.sent)} clients reached the rule"
    )
    assert len(set(seen)) == len(seen) == len(played.call.updates), (
        f"{len(played.sent)} clients sent, {len(played.call.updates)} updates reached the rule"
    )


def _answer(played: Played) -> Mapping[str, Any]:
    """What the rule returned last in the round."""
    assert played.calls, "the rule was not called"
    result = played.calls[-1].result
    assert result is not None, "the rule gave no result"
    return result


def _kept(played: Played) -> None:
    for name, value in played.start.items():
        assert _close(value, played.state[name]), f"entry {name!r} of the global model changed"


def _reported(scene: Scene, name: str) -> None:
    scene.record.requires = frozenset({name})
    for sent, seen in scene.server().round().pairs():
        expected, found = getattr(sent, name), getattr(seen, name)
        assert found is not None and abs(found - expected) < 1e-6, (
            f"client {sent.client_id}: {name} is {expected}, the rule was told {found}"
        )


def _typed(played: Played, only: torch.dtype | None = None) -> None:
    start = {
        name: value
        for name, value in played.start.items()
        if isinstance(value, Tensor) and only in (None, value.dtype)
    }
    given: list[tuple[str, Mapping[str, Any]]] = [
        ("the rule's global model", played.call.global_state),
        ("the new model", played.state),
    ]
    given += [
        (f"client {update.client_id!r}'s reply", update.values)
        for update in played.call.updates
        if update.kind == "state"
    ]
    for where, values in given:
        for name, value in values.items():
            if isinstance(value, Tensor) and name in start:
                expected = start[name]
                assert value.dtype == expected.dtype, (
                    f"{where}: entry {name!r} is {value.dtype}, was {expected.dtype}"
                )
                assert value.shape == expected.shape, (
                    f"{where}: entry {name!r} has shape {tuple(value.shape)}, had "
                    f"{tuple(expected.shape)}"
                )


def _holding(server: Driven) -> KitModel:
    model = KitModel()
    model.load_state_dict(server.state)
    return model


def _refused(server: Driven, replies: Sequence[ClientUpdate], words: str) -> None:
    failure: Exception | None = None
    try:
        server.play(replies)
    except Exception as error:
        failure = error
    assert failure is not None, f"the round went on; the host should fail and say {words!r}"
    assert words in _chain(failure), (
        f"the host failed without saying {words!r}: {type(failure).__name__}: {failure}"
    )


def _chain(error: BaseException | None) -> str:
    """Messages of an error and of those that it came from."""
    words = []
    while error is not None:
        words.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(words)


def _close(one: Any, other: Any) -> bool:
    """Equal in value, whatever the dtype; to rounding for floats."""
    one, other = tensor(one), tensor(other)
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and bool(one == other)
    if one.numel() != other.numel():
        return False
    one, other = one.double().cpu().flatten(), other.double().cpu().flatten()
    return torch.allclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True)
