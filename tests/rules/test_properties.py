"""What every registered rule owes its users, whatever its formula."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from craft_adapters import (
    Aggregator,
    CheckpointError,
    ClientUpdate,
    IncompatibleUpdate,
    Layout,
    NonFiniteUpdate,
    NoUsableUpdates,
    OptionError,
    get_aggregator,
)
from craft_adapters.aggregators import (
    Combination,
    Craft,
    CraftBalanced,
    FedAvg,
    FedProx,
    GramRule,
    Grams,
)
from craft_adapters.plugins import get_plugin_manager

from .federations import (
    F64,
    RULES,
    TRAINED,
    changed,
    flat,
    make,
    replies,
    reply,
    same,
    start,
)

# Clients that come, go and come back; somebody new in the fourth round.
ROUNDS: list[list[int | str]] = [
    [0, 1, 2, 3],
    [2, 3, "4"],
    [0, 5],
    [6, 1, "4", 7],
    [0, 1, 2, 3, 5, 6],
]
each_rule = pytest.mark.parametrize("label", RULES)


def test_every_bundled_rule_is_here() -> None:
    rules = get_plugin_manager().aggregators
    bundled = {n for n in rules if rules.origin(n).distribution == "craft-adapters"}
    assert {name for name, _ in RULES.values()} == bundled


@each_rule
def test_options_of_every_rule_are_in_the_signature(label: str) -> None:
    common = set(inspect.signature(GramRule).parameters)
    factory = get_plugin_manager().aggregator_factory(RULES[label][0])
    assert common <= set(inspect.signature(factory).parameters)
    _, options = RULES[label]
    kept = {k: v for k, v in options.items() if k != "history_folder"}
    with pytest.raises(OptionError, match="on_nonfinite"):
        get_aggregator(RULES[label][0], **kept, on_nonfinite="ignore")
    with pytest.raises(OptionError, match="no option 'granularty'; did you mean 'granularity'"):
        get_aggregator(RULES[label][0], **kept, granularty="layer")
    assert "**" not in str(inspect.signature(factory))


# -- order, aliasing ------------------------------------------------------------------------------


@each_rule
def test_order_of_replies_changes_not_a_bit(
    label: str, device: torch.device, tmp_path: Path
) -> None:
    one, two = make(label, device, tmp_path / "1"), make(label, device, tmp_path / "2")
    theta = start(device)
    for number, clients in enumerate(ROUNDS):
        sent = [
            reply(theta, number, client, "state" if i % 2 else "update")
            for i, client in enumerate(clients)
        ]
        first = one.aggregate(theta, sent)
        second = two.aggregate(theta, iter(sent[::-1]))
        assert same(first.state, second.state)
        assert replace(first.report, seconds=0) == replace(second.report, seconds=0)
        assert same(one.state_dict(), two.state_dict())
        theta = first.state


@each_rule
def test_nothing_given_is_changed_or_shared(
    label: str, device: torch.device, tmp_path: Path
) -> None:
    rule, twin = make(label, device, tmp_path / "1"), make(label, device, tmp_path / "2")
    theta = start(device)
    for number, clients in enumerate(ROUNDS):
        sent = replies(theta, number, clients)
        kept = {name: value.clone() for name, value in theta.items()}
        copies = [{n: v.clone() for n, v in c.values.items()} for c in sent]
        result = rule.aggregate(theta, sent)
        untouched = twin.aggregate(kept, replies(kept, number, clients))
        assert same(theta, kept)
        assert all(same(dict(c.values), copy) for c, copy in zip(sent, copies, strict=True))
        # Whoever overwrites what was given or returned, changes nothing for the rule.
        given = [*theta.values(), *(v for c in sent for v in c.values.values())]
        places = {value.untyped_storage().data_ptr() for value in given}
        following = {name: value.clone() for name, value in result.state.items()}
        for value in result.state.values():
            assert value.untyped_storage().data_ptr() not in places
            value.fill_(99)
        for value in given:
            value.fill_(-99)
        assert same(following, untouched.state)
        assert same(rule.state_dict(), twin.state_dict())
        theta = following


@each_rule
def test_state_dict_is_a_copy(label: str, device: torch.device, tmp_path: Path) -> None:
    rule = make(label, device, tmp_path)
    theta = start(device)
    rule.aggregate(theta, replies(theta, 0))

    def tensors(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            for inner in value.values():
                yield from tensors(inner)
        else:
            assert type(value) in (int, float, str, bool)

    before = rule.state_dict()
    for tensor in tensors(rule.state_dict()):
        tensor.fill_(7)
    assert same(before, rule.state_dict())
    other = make(label, device, tmp_path)
    other.load_state_dict(before)
    for tensor in tensors(before):
        tensor.fill_(7)
    assert same(rule.state_dict(), other.state_dict())


# -- restarts -------------------------------------------------------------------------------------


@each_rule
@pytest.mark.parametrize("entries", [torch.float32, torch.float64, torch.bfloat16])
def test_a_restart_gives_the_same_bits(
    label: str, entries: torch.dtype, device: torch.device, tmp_path: Path
) -> None:
    plain, stopped = make(label, device, tmp_path / "1"), make(label, device, tmp_path / "2")
    theta = other = start(device, entries)
    path = tmp_path / "state"
    for number, clients in enumerate(ROUNDS):
        if number:
            stopped = make(label, device, tmp_path / "2")
            stopped.load(path)
        first = plain.aggregate(theta, replies(theta, number, clients), round=number)
        second = stopped.aggregate(other, replies(other, number, clients), round=number)
        stopped.save(path)
        assert same(first.state, second.state)
        assert replace(first.report, seconds=0) == replace(second.report, seconds=0)
        assert same(plain.state_dict(), stopped.state_dict())
        theta, other = first.state, second.state


@each_rule
def test_states_that_are_no_state_are_refused(
    label: str, device: torch.device, tmp_path: Path
) -> None:
    rule = make(label, device, tmp_path)
    theta = start(device)
    rule.aggregate(theta, replies(theta, 0))
    before = rule.state_dict()
    spoilt: list[dict[str, Any]] = [{"surprise": 1}]
    for key, value in before.items():
        spoilt.append({key: "text"})
        if isinstance(value, int):
            spoilt += [{key: -1}, {key: 0.5}, {key: True}]
        elif value:
            inner, first = next(iter(value.items()))
            spoilt += [{key: [1]}, {key: {inner: "text"}}, {key: {inner: None}}]
            if isinstance(first, Tensor):
                spoilt.append({key: {inner: torch.full_like(first, math.nan)}})
                spoilt.append({key: {inner: torch.zeros(first.numel() + 1)}})
                spoilt.append({key: {inner: first.to(torch.int64)}})
    for bad in spoilt:
        with pytest.raises(CheckpointError):
            rule.load_state_dict({**before, **bad})
        assert same(before, rule.state_dict())


@each_rule
def test_a_state_of_another_model(label: str, device: torch.device, tmp_path: Path) -> None:
    """Refused by the first round at the latest, unless nothing was remembered of it."""
    foreign = make(label, device, tmp_path)
    theta = {"conv.weight": torch.zeros(3, device=device)}
    foreign.aggregate(theta, replies(theta, 0))
    foreign.save(tmp_path / "state")
    rule = make(label, device, tmp_path)
    rule.load(tmp_path / "state")
    before = rule.state_dict()
    mine = start(device)
    remembers = any(isinstance(value, Mapping) and value for value in before.values())
    if not remembers or label == "afl":
        return
    with pytest.raises(CheckpointError, match="another model"):
        rule.aggregate(mine, replies(mine, 1, [10, 11]))
    assert same(before, rule.state_dict())


# -- types, buffers -------------------------------------------------------------------------------


@each_rule
@pytest.mark.parametrize(
    "entries",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64],
)
def test_types_are_kept(
    label: str, entries: torch.dtype, device: torch.device, tmp_path: Path
) -> None:
    rule = make(label, device, tmp_path)
    theta = start(device, entries)
    for number, clients in enumerate(ROUNDS):
        result = rule.aggregate(theta, replies(theta, number, clients))
        for name, value in theta.items():
            got = result.state[name]
            assert (got.dtype, got.device, got.shape) == (value.dtype, value.device, value.shape)
            assert bool(got.isfinite().all())
        assert not torch.equal(result.state["head.weight"], theta["head.weight"])
        theta = result.state


@each_rule
def test_half_types_step_like_float32(label: str, device: torch.device, tmp_path: Path) -> None:
    """Arithmetic is not done in half: the same values in float32 give the same step, rounded."""
    half, wide = make(label, device, tmp_path / "1"), make(label, device, tmp_path / "2")
    theta = start(device, torch.float16)
    for number, clients in enumerate(ROUNDS[:2]):
        sent = replies(theta, number, clients, "update", 0.1)
        widened = [
            replace(c, values={n: v.float() for n, v in c.values.items() if v.is_floating_point()})
            for c in sent
        ]
        floats = {n: v.float() for n, v in theta.items() if v.is_floating_point()}
        one = half.aggregate(theta, sent)
        two = wide.aggregate(floats, widened)
        for name, value in two.state.items():
            torch.testing.assert_close(
                one.state[name].float(), value.half().float(), rtol=1e-3, atol=1e-4
            )


@each_rule
def test_buffers_are_averaged(label: str, device: torch.device, tmp_path: Path) -> None:
    """As FedAvg has them, bit for bit; counters are the largest, booleans the global model's."""
    rule, average = make(label, device, tmp_path), make("fedavg", device)
    theta = {**start(device), "mask": torch.tensor([True, False], device=device)}
    for number, clients in enumerate(ROUNDS):
        sent = [
            replace(c, values={**c.values, "mask": torch.tensor([False, False], device=device)})
            for c in replies({n: v for n, v in theta.items() if n != "mask"}, number, clients)
        ]
        wanted = average.aggregate(theta, sent).state
        result = rule.aggregate(theta, sent)
        for name in ("bn.running_mean", "bn.running_var", "bn.num_batches_tracked", "mask"):
            assert torch.equal(result.state[name], wanted[name]), name
        theta = result.state


@each_rule
def test_frozen_entries_stay_bit_for_bit(label: str, device: torch.device, tmp_path: Path) -> None:
    rule = make(label, device, tmp_path)
    theta = start(device)
    frozen = {"conv.weight", "conv.bias", "bn.weight"}
    for number, clients in enumerate(ROUNDS):
        sent = [
            replace(c, values={**c.values, **{name: theta[name] for name in frozen}})
            for c in replies(theta, number, clients)
        ]
        result = rule.aggregate(theta, sent)
        for name in TRAINED:
            assert torch.equal(result.state[name], theta[name]) is (name in frozen), name
        theta = result.state


@each_rule
def test_a_payload_may_be_a_part_of_the_model(
    label: str, device: torch.device, tmp_path: Path
) -> None:
    """And another part in another round."""
    rule = make(label, device, tmp_path)
    theta = start(device)
    parts = (["head.weight"], ["conv.bias", "head.weight", "head.bias"], ["conv.weight"])
    for number, part in enumerate(parts):
        clients = [
            replace(c, values={n: v for n, v in c.values.items() if n in part})
            for c in replies(theta, number, ROUNDS[number])
        ]
        result = rule.aggregate(theta, clients)
        for name, value in theta.items():
            assert torch.equal(result.state[name], value) is (name not in part), name
        theta = result.state


# -- special clients ------------------------------------------------------------------------------


@each_rule
@pytest.mark.parametrize("kind", ["state", "update"])
def test_one_client(label: str, kind: Any, device: torch.device, tmp_path: Path) -> None:
    """The first step goes its way, coordinate by coordinate."""
    rule = make(label, device, tmp_path)
    theta = start(device, F64)
    (client,) = replies(theta, 0, [3], kind)
    result = rule.aggregate(theta, [client])
    step = flat(theta) - flat(result.state)
    own = flat(theta) - flat(client.values) if kind == "state" else flat(client.values)
    assert (step * own >= 0).all()
    assert bool((step != 0).all())
    assert result.report.clients == (3,)
    assert result.report.conflicts_after == 0
    same_as_average = {"afl", "fedavg", "fedavgm", "fednova", "fedprox", "fedfv", "fedlf", "config"}
    if label in same_as_average:
        torch.testing.assert_close(step, own, rtol=1e-9, atol=1e-12)


@each_rule
def test_zero_updates_leave_the_model_as_it_is(
    label: str, device: torch.device, tmp_path: Path
) -> None:
    rule = make(label, device, tmp_path)
    theta = start(device)
    clients = [replace(c, values=dict(theta)) for c in replies(theta, 0)]
    result = rule.aggregate(theta, clients)
    assert same(result.state, theta)
    again = rule.aggregate(theta, replies(theta, 1))
    assert all(bool(value.isfinite().all()) for value in again.state.values())
    assert not torch.equal(again.state["head.weight"], theta["head.weight"])


@pytest.mark.parametrize("label", ["config", "config by layer", "fedmgda", "fedmgda free"])
def test_a_client_that_did_not_move_is_left_out(label: str, device: torch.device) -> None:
    theta = start(device, F64)
    others = replies(theta, 0)
    idle = replace(reply(theta, 0, 9), values=dict(theta))
    wanted = make(label, device).aggregate(theta, others).state
    result = make(label, device).aggregate(theta, [*others, idle])
    for name in TRAINED:
        torch.testing.assert_close(result.state[name], wanted[name], rtol=0, atol=1e-12)
    assert all(group.inactive == (9,) for group in result.report.groups)


@each_rule
def test_a_client_with_nan_is_left_out_whole(
    label: str, device: torch.device, tmp_path: Path
) -> None:
    disturbed, plain = make(label, device, tmp_path / "1"), make(label, device, tmp_path / "2")
    theta = start(device)
    for number, clients in enumerate(ROUNDS):
        good = replies(theta, number, clients)
        name = ("head.bias", "bn.running_var")[number % 2]
        away = next(client for client in (1, 2, 9) if client not in clients)  # known or not
        bad = reply(theta, number, away)
        value = bad.values[name].clone()
        value[1] = math.nan if number % 3 else math.inf
        bad = replace(bad, values={**bad.values, name: value})
        result = disturbed.aggregate(theta, [*good, bad])
        (dropped,) = result.report.dropped
        assert (dropped.client_id, dropped.entry) == (away, name)
        assert away not in result.report.clients
        wanted = plain.aggregate(theta, good)
        # Not bit for bit: a float32 product with NaN in it is computed again in float64.
        for entry in theta:
            torch.testing.assert_close(
                result.state[entry], wanted.state[entry], rtol=1e-5, atol=1e-6
            )
        assert disturbed.state_dict().keys() == plain.state_dict().keys()
        theta = wanted.state


@each_rule
def test_a_call_that_raises_leaves_the_rule_as_it_was(
    label: str, device: torch.device, tmp_path: Path
) -> None:
    disturbed = make(label, device, tmp_path / "1", on_nonfinite="raise")
    plain = make(label, device, tmp_path / "2")
    theta = start(device)
    for number, clients in enumerate(ROUNDS):
        good = replies(theta, number, clients)
        first, *rest = good
        nan = torch.full((5,), math.nan, device=device)
        for error, sent in (
            (IncompatibleUpdate, [*rest, changed(first, head__bias=torch.zeros(6))]),
            (IncompatibleUpdate, [*rest, changed(first, extra=nan)]),
            (NonFiniteUpdate, [*rest, changed(first, head__bias=nan)]),
            (NoUsableUpdates, []),
            (ValueError, [first, first]),
        ):
            before = disturbed.state_dict()
            with pytest.raises(error):
                disturbed.aggregate(theta, sent)
            assert same(before, disturbed.state_dict())
        result = disturbed.aggregate(theta, good)
        assert same(result.state, plain.aggregate(theta, good).state)
        assert same(disturbed.state_dict(), plain.state_dict())
        theta = result.state


# -- the report -----------------------------------------------------------------------------------


@each_rule
def test_the_report_is_about_the_step_that_was_made(
    label: str, device: torch.device, tmp_path: Path
) -> None:
    rule = make(label, device, tmp_path)
    assert isinstance(rule, GramRule)
    theta = start(device, F64)
    against = 0
    for number, clients in enumerate(ROUNDS):
        sent = replies(theta, number, clients, "update")
        # One that points against another, and so against the mean.
        first, own = sent[0].values, sent[-1].values
        opposed = {name: 0.1 * own[name] - 0.5 * first[name] for name in TRAINED}
        sent[-1] = replace(sent[-1], values={**own, **opposed})
        result = rule.aggregate(theta, sent)
        groups = Layout.infer(theta, rule.granularity).groups
        for group, report in zip(groups, result.report.groups, strict=True):
            assert report.name == group.name
            step = flat(theta, group.entries) - flat(result.state, group.entries)
            rows = {c.client_id: flat(c.values, group.entries) for c in sent}
            cosine = {i: float(torch.cosine_similarity(row, step, 0)) for i, row in rows.items()}
            assert set(report.conflicts_after) == {i for i, c in cosine.items() if c < -1e-9}
            pairs = [
                float(torch.cosine_similarity(rows[a], rows[b], 0)) for a in rows for b in rows
            ]
            assert report.conflicts_before == sum(c < -1e-9 for c in pairs) // 2
            assert set(report.clients) == set(rows)
            against += len(report.conflicts_after)
        theta = result.state
    if RULES[label][0] in ("fedavg", "fedprox", "fedavgm", "afl", "fednova", "qfedavg"):
        assert against > 0
    if label in ("config", "config by layer", "craft", "fedmgda free", "fedlf", "fedlf code"):
        assert against == 0


# -- what a rule requires -------------------------------------------------------------------------

NEEDY = [
    label
    for label, (name, _) in RULES.items()
    if name in {"afl", "fedfv", "fedlf", "fednova", "qfedavg"}
]


def requires(rule: Aggregator) -> set[str]:
    return set(rule.requires)


@each_rule
def test_requirements_are_declared(label: str, device: torch.device, tmp_path: Path) -> None:
    """A rule that declares nothing does not look at losses and steps."""
    rule = make(label, device, tmp_path)
    needs = requires(rule)
    assert needs <= {"loss", "local_steps"}
    assert bool(needs) is (label in NEEDY)
    theta = start(device)
    bare = [
        replace(c, **{name: None for name in {"loss", "local_steps"} - needs})
        for c in replies(theta, 0)
    ]
    other = make(label, device, tmp_path / "other")
    assert same(rule.aggregate(theta, bare).state, other.aggregate(theta, replies(theta, 0)).state)


@pytest.mark.parametrize("label", NEEDY)
def test_a_client_without_what_is_required(
    label: str, device: torch.device, tmp_path: Path
) -> None:
    rule = make(label, device, tmp_path)
    theta = start(device)
    rule.aggregate(theta, replies(theta, 0))
    before = rule.state_dict()
    (need,) = requires(rule)
    # ClientUpdate refuses a loss that is no number itself.
    for missing in (None, "3", True) if need == "local_steps" else (None,):
        clients = replies(theta, 1)
        clients[2:] = [replace(c, **{need: missing}) for c in clients[2:]]
        with pytest.raises(IncompatibleUpdate, match=rf"client 2: {need} .*{rule.name}"):
            rule.aggregate(theta, clients)
    assert same(before, rule.state_dict())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("label", NEEDY)
def test_a_client_whose_number_is_not_finite_is_left_out(
    label: str, bad: float, device: torch.device, tmp_path: Path
) -> None:
    rule, plain = make(label, device, tmp_path / "1"), make(label, device, tmp_path / "2")
    (need,) = requires(rule)
    theta = start(device)
    good = replies(theta, 0)
    spoilt = replace(reply(theta, 0, 9), **{need: bad})
    result = rule.aggregate(theta, [*good, spoilt])
    assert same(result.state, plain.aggregate(theta, good).state)
    (dropped,) = result.report.dropped
    assert dropped.client_id == 9
    assert dropped.reason == f"{need} is {bad}"
    with pytest.raises(NoUsableUpdates, match=need):
        rule.aggregate(theta, [spoilt])
    strict = make(label, device, tmp_path / "3", on_nonfinite="raise")
    with pytest.raises(NonFiniteUpdate, match=f"client 9: {need}"):
        strict.aggregate(theta, [*good, spoilt])


# -- a few groups at a time -----------------------------------------------------------------------


@each_rule
def test_blocks_that_hold_few_groups_change_nothing(
    label: str, device: torch.device, tmp_path: Path
) -> None:
    """A group that does not move, an idle client, and one whose last entry is not finite."""
    options: dict[str, Any] = {} if "code" in label else {"granularity": "tensor"}
    once = make(label, device, tmp_path / "1", **options)
    often = make(label, device, tmp_path / "2", block_bytes=600, **options)
    theta = start(device)
    for number, clients in enumerate(ROUNDS[:3]):
        good = [changed(c, bn__weight=theta["bn.weight"]) for c in replies(theta, number, clients)]
        good[0] = changed(good[0], conv__bias=theta["conv.bias"])
        bad = changed(
            reply(theta, number, 9), head__bias=torch.full_like(theta["head.bias"], math.nan)
        )
        one, two = once.aggregate(theta, [*good, bad]), often.aggregate(theta, [*good, bad])
        for name in theta:
            torch.testing.assert_close(two.state[name], one.state[name], rtol=1e-4, atol=1e-5)
        assert [drop.client_id for drop in two.report.dropped] == [9]
        assert two.report.dropped == one.report.dropped
        for group, other in zip(two.report.groups, one.report.groups, strict=True):
            for name, value in dataclasses.asdict(other).items():
                expected = pytest.approx(value, 1e-3, 1e-5) if isinstance(value, float) else value
                assert getattr(group, name) == expected, name
        theta = one.state


@pytest.mark.parametrize("sizes", [(900, 0), (3, 900, 0), (900, 0, 0), (0, 900, 0, 5, 0), (0, 0)])
@each_rule
def test_layers_without_numbers(
    label: str, sizes: tuple[int, ...], device: torch.device, tmp_path: Path
) -> None:
    """Before, between and after small ones and ones that are wider than a block."""
    rule = make(label, device, tmp_path, block_bytes=4000, granularity="tensor")
    theta = {f"layer{i}.weight": torch.ones(size, device=device) for i, size in enumerate(sizes)}
    result = rule.aggregate(theta, replies(theta, 0))
    assert [group.width for group in result.report.groups] == list(sizes)
    assert {name: value.shape for name, value in result.state.items()} == {
        name: value.shape for name, value in theta.items()
    }
    for size, value in zip(sizes, result.state.values(), strict=True):
        assert not size or not torch.equal(value, torch.ones_like(value))


@pytest.mark.parametrize("block_bytes", [600, None])
@pytest.mark.parametrize(
    ("label", "number"), [("qfedavg", {"loss": -1.0}), ("fednova", {"local_steps": -1})]
)
def test_a_number_that_is_no_use_is_refused_before_values_are_looked_at(
    label: str,
    number: dict[str, Any],
    block_bytes: int | None,
    device: torch.device,
    tmp_path: Path,
) -> None:
    rule = make(label, device, tmp_path, block_bytes=block_bytes, granularity="tensor")
    theta = start(device)
    bad = changed(reply(theta, 0, 9), head__bias=torch.full_like(theta["head.bias"], math.nan))
    with pytest.raises(IncompatibleUpdate, match=f"client 9: {next(iter(number))}"):
        rule.aggregate(theta, [*replies(theta, 0), replace(bad, **number)])


class Halved(FedAvg):
    """Half a step, in layers that are told apart by how many groups come at a time."""

    calls: ClassVar[list[int]] = []

    def combine(self, grams: Grams) -> Combination:
        self.calls.append(len(grams.groups))
        whole = super().combine(grams)
        return replace(whole, rates=0.5 * whole.rates)


def test_a_rule_that_derives_from_a_separable_one_says_it_again(device: torch.device) -> None:
    class Again(Halved):
        separable = True

        def combine(self, grams: Grams) -> Combination:
            return super().combine(grams)

    class Never(Craft):
        separable = False

    assert FedAvg.separable
    assert FedProx.separable  # it has its combine from FedAvg
    assert CraftBalanced().separable
    assert not Halved.separable
    assert not Never().separable
    assert not Craft(targets=lambda clients: [1.0] * len(clients)).separable
    theta = start(device)
    for rule, calls in ((Halved, [3]), (Again, [1, 1, 1])):
        Halved.calls.clear()
        made = rule(device=device, block_bytes=600, granularity=lambda name: name.split(".")[0])
        made.aggregate(theta, replies(theta, 0))
        assert Halved.calls == calls


@pytest.mark.parametrize("given", ["turn", "consensus of one layer"])
def test_a_separable_rule_that_cannot_be_is_refused(given: str, device: torch.device) -> None:
    class Odd(FedAvg):
        separable = True

        def combine(self, grams: Grams) -> Combination:
            answer = super().combine(grams)
            if given == "turn":
                return replace(answer, turn=lambda entry, place, step: None)
            agreed = grams.shares[:1] if grams.groups[0].name == "conv" else None
            return replace(answer, consensus=agreed)

    theta = start(device)
    with pytest.raises(TypeError, match="separable"):
        Odd(device=device, block_bytes=600).aggregate(theta, replies(theta, 0))


# -- values that are not in memory ----------------------------------------------------------------


class Counted(Mapping[str, Tensor]):
    """A lazy mapping that counts how often an entry is read."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.held, self.reads = dict(values), dict.fromkeys(values, 0)

    def __getitem__(self, name: str) -> Tensor:
        self.reads[name] += 1
        return self.held[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


@each_rule
def test_lazy_values(label: str, device: torch.device, tmp_path: Path) -> None:
    """Read twice; once more by rules that keep the clients' updates. The same step, to rounding."""
    lazy, eager = make(label, device, tmp_path / "1"), make(label, device, tmp_path / "2")
    keeps = "fedfv" in label or "fedlf" in label
    theta = start(device)
    for number, clients in enumerate(ROUNDS[:3]):
        good = replies(theta, number, clients)
        counted = [replace(c, values=Counted(c.values)) for c in good]
        one, two = lazy.aggregate(theta, counted), eager.aggregate(theta, good)
        for client in counted:
            assert isinstance(client.values, Counted)
            assert max(client.values.reads.values()) <= (3 if keeps else 2)
        for name in theta:
            torch.testing.assert_close(one.state[name], two.state[name], rtol=1e-4, atol=1e-5)
        lazy.load_state_dict(eager.state_dict()) if "files" not in label else None
        theta = two.state


@each_rule
def test_client_update_is_all_a_rule_needs(
    label: str, device: torch.device, tmp_path: Path
) -> None:
    """A model of one number, one client, a count of one."""
    theta = {"w": torch.tensor(2.0, device=device)}
    client = ClientUpdate("only", 1, {"w": torch.tensor(1.0, device=device)}, "state", 1.0, 1)
    state = make(label, device, tmp_path).aggregate(theta, [client]).state
    assert state["w"] < 2.0
