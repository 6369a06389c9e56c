"""What survives a restart, what a failure leaves behind, and how often values are read."""

from __future__ import annotations

import gc
import json
import math
import os
import struct
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from craft_adapters import (
    AggregationReport,
    Aggregator,
    CheckpointError,
    ClientUpdate,
    IncompatibleUpdate,
    NonFiniteUpdate,
    NoUsableUpdates,
)
from craft_adapters.aggregators import Craft, FedAdam, FedAvg

SHAPES: dict[str, tuple[int, ...]] = {
    "conv.weight": (4, 3, 2, 2),
    "conv.bias": (4,),
    "bn.running_mean": (4,),
    "head.weight": (5, 4),
    "head.bias": (5,),
}
GROUPS = {"conv": ["conv.weight", "conv.bias"], "head": ["head.weight", "head.bias"]}

OPTIONS: dict[str, dict[str, Any]] = {
    "published": {},
    "zero": {"reference": "zero"},
    "ema": {"reference": "ema", "beta": 0.7},
    "balanced": {"targets": "sqrt", "client_length": 1.0, "scale": "steady"},
    "client_norm": {"scale": "client_norm", "targets": "uniform"},
    "steady ema": {"scale": "steady", "reference": "ema", "granularity": "tensor"},
    "model": {"granularity": "model", "scale": "steady"},
    "mean": {"client_length": 1.0, "scale": "mean"},
}


def start(device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in SHAPES.items()}


def replies(theta: Mapping[str, Tensor], round: int, count: int = 5) -> list[ClientUpdate]:
    """Models that differ from theta, in lengths that differ from round to round."""
    generator = torch.Generator().manual_seed(round)

    def local(value: Tensor) -> Tensor:
        noise = torch.randn(value.shape, generator=generator) * 0.1 * (1 + round)
        return value - noise.to(value)

    return [
        ClientUpdate(i, 5 + i, {name: local(value) for name, value in theta.items()})
        for i in range(count)
    ]


def same(one: Any, two: Any) -> bool:
    """Equal bit for bit, down through dicts."""
    if isinstance(one, Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, Mapping):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    return bool(type(one) is type(two) and one == two)


# -- a restart -----------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_going_on_after_a_restart_gives_the_same_bits(
    name: str, entries: torch.dtype, device: torch.device, tmp_path: Path
) -> None:
    def rule() -> Craft:
        return Craft(device=device, **OPTIONS[name])

    path = tmp_path / "craft.safetensors"
    plain, stopped = rule(), rule()
    theta = other = start(device, entries)
    for number in range(5):
        first = plain.aggregate(theta, replies(theta, number))
        if number:
            stopped = rule()
            stopped.load(path)
        second = stopped.aggregate(other, replies(other, number))
        stopped.save(path)
        assert same(first.state, second.state)
        assert second.report.round == number
        assert same(plain.state_dict(), stopped.state_dict())
        again = rule()
        again.load(path)
        assert same(plain.state_dict(), again.state_dict())
        theta, other = first.state, second.state
    assert all(tensor.device.type == device.type for tensor in stopped.memory().values())


def test_state_dict_holds_tensors_and_plain_numbers_only(device: torch.device) -> None:
    rule = Craft(device=device, scale="steady")
    theta = start(device)
    rule.aggregate(theta, replies(theta, 0))

    def plain(value: Any) -> bool:
        if isinstance(value, Mapping):
            return all(isinstance(k, str) and plain(v) for k, v in value.items())
        return type(value) in (Tensor, int, float, str, bool)

    state = rule.state_dict()
    assert plain(state)
    assert set(state["reference"]) == {name for names in GROUPS.values() for name in names}
    assert set(state["lengths"]) == set(GROUPS)


def test_load_copies(device: torch.device) -> None:
    theta = start(device)
    rule, other = Craft(device=device), Craft(device=device)
    rule.aggregate(theta, replies(theta, 0))
    state = rule.state_dict()
    other.load_state_dict(state)
    for tensor in state["reference"].values():
        tensor.fill_(math.nan)
    assert same(rule.state_dict(), other.state_dict())
    assert all(bool(t.isfinite().all()) for t in other.state_dict()["reference"].values())


def test_a_saved_state_of_before_the_first_round(device: torch.device, tmp_path: Path) -> None:
    rule = Craft(device=device)
    rule.save(tmp_path / "state")
    other = Craft(device=device)
    other.load(tmp_path / "state")
    assert same(rule.state_dict(), other.state_dict())


def test_the_file_is_plain_safetensors(device: torch.device, tmp_path: Path) -> None:
    rule = Craft(device=device, scale="steady")
    theta = start(device)
    rule.aggregate(theta, replies(theta, 0))
    path = tmp_path / "state.safetensors"
    rule.save(str(path))
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert header["rule"] == "craft"
    json.loads(header["state"])
    wanted = sorted(t.numel() for t in rule.state_dict()["reference"].values())
    assert sorted(tensor.numel() for tensor in tensors) == wanted


def test_rules_without_memory_save_too(device: torch.device, tmp_path: Path) -> None:
    theta = start(device)
    rule = FedAvg(device=device)
    rule.aggregate(theta, replies(theta, 0))
    rule.save(tmp_path / "state")
    other = FedAvg(device=device)
    other.load(tmp_path / "state")
    assert same(rule.state_dict(), other.state_dict())


# -- atomicity -----------------------------------------------------------------------------------


class Crash(BaseException):
    """Not an Exception: like a signal, nothing should catch it for good."""


@pytest.mark.parametrize("error", [Crash, OSError])
@pytest.mark.parametrize("where", ["replace", "fsync"])
def test_a_crash_while_saving_leaves_the_old_file(
    where: str,
    error: type[BaseException],
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theta = start(device)
    rule = Craft(device=device)
    rule.aggregate(theta, replies(theta, 0))
    path = tmp_path / "state.safetensors"
    rule.save(path)
    old, state = path.read_bytes(), rule.state_dict()
    rule.aggregate(theta, replies(theta, 1))
    later = rule.state_dict()
    handles = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    def crash(*arguments: Any, **options: Any) -> Any:
        raise error("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(os, where, crash)
        with pytest.raises(error, match="power cut"):
            rule.save(path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == [path.name]
    if handles:
        assert len(os.listdir("/proc/self/fd")) == handles
    assert same(rule.state_dict(), later)
    fresh = Craft(device=device)
    fresh.load(path)
    assert same(fresh.state_dict(), state)
    rule.save(path)
    fresh.load(path)
    assert same(fresh.state_dict(), later)
    assert os.listdir(tmp_path) == [path.name]


def test_a_crash_in_the_middle_of_writing(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theta = start(device)
    rule = Craft(device=device)
    rule.aggregate(theta, replies(theta, 0))
    path = tmp_path / "state.safetensors"
    rule.save(path)
    old = path.read_bytes()
    real = os.fdopen

    def fdopen(*arguments: Any, **options: Any) -> Any:
        file = real(*arguments, **options)

        class Half:
            def __enter__(self) -> Half:
                return self

            def __exit__(self, *exception: object) -> None:
                file.close()

            def write(self, data: bytes) -> int:
                file.write(data[: len(data) // 2])
                raise OSError("disk full")

        return Half()

    rule.aggregate(theta, replies(theta, 1))
    monkeypatch.setattr(os, "fdopen", fdopen)
    with pytest.raises(OSError, match="disk full"):
        rule.save(path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == [path.name]


def test_saving_into_a_folder_that_is_not_there(device: torch.device, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        Craft(device=device).save(tmp_path / "nowhere" / "state")


# -- files that must be refused ------------------------------------------------------------------


def trained(device: torch.device, **options: Any) -> Craft:
    theta = start(device)
    rule = Craft(device=device, **options)
    rule.aggregate(theta, replies(theta, 0))
    return rule


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the numbers of a safetensors file."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: Mapping[str, Any], numbers: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + numbers


def with_state(data: bytes, change: Callable[[Any], Any]) -> bytes:
    """The file with another table of contents."""
    header, numbers = split(data)
    tree = change(json.loads(header["__metadata__"]["state"]))
    header["__metadata__"]["state"] = json.dumps(tree)
    return joined(header, numbers)


def with_metadata(data: bytes, **changes: str) -> bytes:
    header, numbers = split(data)
    header["__metadata__"] = {**header["__metadata__"], **changes}
    return joined(header, numbers)


def without_metadata(data: bytes) -> bytes:
    header, numbers = split(data)
    del header["__metadata__"]
    return joined(header, numbers)


def flipped(data: bytes, where: float) -> bytes:
    """The lowest bit of one byte, at a fraction of the numbers."""
    header, numbers = split(data)
    at = int(where * len(numbers)) // 4 * 4
    return joined(header, numbers[:at] + bytes([numbers[at] ^ 1]) + numbers[at + 1 :])


def with_nan(data: bytes) -> bytes:
    header, numbers = split(data)
    return joined(header, struct.pack("<f", math.nan) + numbers[4:])


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut at once": lambda data: data[:4],
    "cut in the header": lambda data: data[:100],
    "cut in the numbers": lambda data: data[:-8],
    "longer": lambda data: data + b"\0" * 8,
    "zeros": lambda data: b"\0" * len(data),
    "another length of the header": lambda data: b"\xff" * 8 + data[8:],
    "a bit flipped in the header": lambda data: data[:9] + bytes([data[9] ^ 0x80]) + data[10:],
    "a bit flipped in the numbers": lambda data: flipped(data, 0.5),
    "a digit of the contents changed": lambda data: with_state(
        data, lambda tree: {"dict": {**tree["dict"], "round": {"value": 3}}}
    ),
    "a pickle": lambda data: b"\x80\x04\x95" + data,
    "text": lambda data: b"not a model at all\n" * 20,
    "no metadata": without_metadata,
    "another format": lambda data: with_metadata(data, format="craft-adapters state 999"),
    "another rule": lambda data: with_metadata(data, rule="fedavg"),
    "contents not json": lambda data: with_metadata(data, state="{"),
    "contents a list": lambda data: with_state(data, lambda tree: [tree]),
    "contents a number": lambda data: with_state(data, lambda tree: {"value": 3}),
    "contents empty": lambda data: with_state(data, lambda tree: {}),
    "a tensor that is not there": lambda data: with_state(
        data, lambda tree: {"dict": {**tree["dict"], "reference": {"tensor": "77"}}}
    ),
    "a key too many": lambda data: with_state(
        data, lambda tree: {"dict": {**tree["dict"], "surprise": {"value": 1}}}
    ),
    "round is text": lambda data: with_state(
        data, lambda tree: {"dict": {**tree["dict"], "round": {"value": "3"}}}
    ),
    "lengths are not numbers": lambda data: with_state(
        data,
        lambda tree: {"dict": {**tree["dict"], "lengths": {"dict": {"conv": {"value": None}}}}},
    ),
    "negative length": lambda data: with_state(
        data,
        lambda tree: {"dict": {**tree["dict"], "lengths": {"dict": {"conv": {"value": -1.0}}}}},
    ),
    "NaN in the reference": with_nan,
    "deeply nested": lambda data: with_metadata(
        data, state='{"dict":{"a":' * 5000 + "1" + "}}" * 5000
    ),
}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused(
    damage: str, used: bool, device: torch.device, tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"
    trained(device, scale="steady").save(path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    rule = trained(device, scale="steady") if used else Craft(device=device, scale="steady")
    before = rule.state_dict()
    with pytest.raises(CheckpointError, match=r"state\.safetensors"):
        rule.load(path)
    assert same(before, rule.state_dict())


@pytest.mark.parametrize(
    "bad",
    [
        {"reference": {"conv.weight": torch.zeros(48, dtype=torch.int64)}},
        {"reference": {"conv.weight": [0.0] * 48}},
        {"reference": {"conv.weight": torch.full((48,), math.inf)}},
        {"reference": {"conv.weight": torch.zeros(47)}},
        {"reference": {"stranger": torch.zeros(48)}},
        {"reference": [torch.zeros(48)]},
        {"lengths": {"conv": -1.0}},
        {"lengths": {"conv": math.nan}},
        {"lengths": {"conv": "1"}},
        {"lengths": 1.0},
        {"round": "3"},
        {"round": 3.5},
        {"round": -1},
        {"round": True},
        {"agreeing": None},
        {"agreeing": -1},
        {"agreeing": False},
        {"lengths": {"conv": True}},
        {"surprise": 1},
    ],
)
def test_states_that_are_no_state(bad: dict[str, Any], device: torch.device) -> None:
    rule = trained(device, scale="steady")
    before = rule.state_dict()
    with pytest.raises(CheckpointError):
        rule.load_state_dict(bad)
    with pytest.raises(CheckpointError):
        rule.load_state_dict({**before, **bad})
    assert same(before, rule.state_dict())


def test_a_reference_alone_is_enough(device: torch.device) -> None:
    rule, twin = trained(device), Craft(device=device)
    theta = start(device)
    shaped = {n: v.view(SHAPES[n]) for n, v in rule.state_dict()["reference"].items()}
    twin.load_state_dict({"reference": shaped})
    assert same(rule.state_dict()["reference"], twin.state_dict()["reference"])
    good = replies(theta, 1)
    assert same(rule.aggregate(theta, good).state, twin.aggregate(theta, good).state)


def test_every_cut_is_refused(device: torch.device, tmp_path: Path) -> None:
    path = tmp_path / "state"
    trained(device).save(path)
    data = path.read_bytes()
    rule = Craft(device=device)
    before = rule.state_dict()
    for length in {*range(0, len(data), 13), len(data) - 1}:
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            rule.load(path)
    assert same(before, rule.state_dict())


def test_what_is_not_a_file(device: torch.device, tmp_path: Path) -> None:
    rule = trained(device)
    before = rule.state_dict()
    with pytest.raises(CheckpointError, match="nothing-here"):
        rule.load(tmp_path / "nothing-here")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="folder"):
        rule.load(tmp_path / "folder")
    save_file({"model.weight": torch.zeros(3)}, tmp_path / "model")
    with pytest.raises(CheckpointError, match="model"):
        rule.load(tmp_path / "model")
    torch.save({"reference": torch.zeros(3)}, tmp_path / "pickle.pt")
    with pytest.raises(CheckpointError, match=r"pickle\.pt"):
        rule.load(tmp_path / "pickle.pt")
    assert same(before, rule.state_dict())


@pytest.mark.parametrize(("mine", "other"), [(Craft, FedAvg), (FedAvg, Craft)])
def test_a_file_of_another_rule(
    mine: type[Aggregator], other: type[Aggregator], tmp_path: Path
) -> None:
    other().save(tmp_path / "state")
    rule = mine()
    before = rule.state_dict()
    with pytest.raises(CheckpointError, match=other.name):
        rule.load(tmp_path / "state")
    assert same(before, rule.state_dict())


@pytest.mark.parametrize(
    "other",
    [{"conv.weight": (4, 3, 2, 2), "tail.weight": (3,)}, {"conv.weight": (4, 3, 3, 3)}],
)
@pytest.mark.parametrize("seen", [True, False])
def test_a_file_of_another_model(
    other: dict[str, tuple[int, ...]], seen: bool, device: torch.device, tmp_path: Path
) -> None:
    theta = {name: torch.zeros(shape, device=device) for name, shape in other.items()}
    foreign = Craft(device=device)
    foreign.aggregate(theta, replies(theta, 0))
    foreign.save(tmp_path / "state")
    rule = trained(device) if seen else Craft(device=device)
    if seen:
        before = rule.state_dict()
        with pytest.raises(CheckpointError, match="another model"):
            rule.load(tmp_path / "state")
    else:
        rule.load(tmp_path / "state")
        before = rule.state_dict()
        mine = start(device)
        with pytest.raises(CheckpointError, match="another model"):
            rule.aggregate(mine, replies(mine, 0))
    assert same(before, rule.state_dict())


# -- calls that raise ----------------------------------------------------------------------------


def changed(update: ClientUpdate, **values: Any) -> ClientUpdate:
    merged = {**update.values, **values}
    kept = {name: value for name, value in merged.items() if value is not None}
    return ClientUpdate(update.client_id, update.num_examples, kept, update.kind)


class Breaks(Mapping[str, Tensor]):
    """A lazy mapping whose storage fails at a read of its own choice."""

    def __init__(self, values: Mapping[str, Tensor], at: int) -> None:
        self.values_, self.left = values, at

    def __getitem__(self, name: str) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise OSError("the disk is gone")
        return self.values_[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


def bad_calls(theta: dict[str, Tensor]) -> dict[str, tuple[type[Exception], Any, Any]]:
    """Name -> the error, the global state, the updates."""
    good = replies(theta, 7)
    nan = torch.full((5,), math.nan)
    last = good[-1]
    poisoned = {**theta, "head.bias": nan}
    return {
        "missing": (IncompatibleUpdate, theta, [*good[:-1], changed(last, **{"head.bias": None})]),
        "extra": (IncompatibleUpdate, theta, [*good[:-1], changed(last, extra=nan)]),
        "shape": (
            IncompatibleUpdate,
            theta,
            [*good[:-1], changed(last, **{"head.bias": torch.zeros(6)})],
        ),
        "shape of a buffer": (
            IncompatibleUpdate,
            theta,
            [*good[:-1], changed(last, **{"bn.running_mean": torch.zeros(6)})],
        ),
        "not a tensor": (
            IncompatibleUpdate,
            theta,
            [*good[:-1], changed(last, **{"head.bias": "zero"})],
        ),
        "sparse": (
            IncompatibleUpdate,
            theta,
            [*good[:-1], changed(last, **{"head.weight": torch.zeros(5, 4).to_sparse()})],
        ),
        "nan": (NonFiniteUpdate, theta, [*good[:-1], changed(last, **{"head.bias": nan})]),
        "nan in a buffer": (
            NonFiniteUpdate,
            theta,
            [*good[:-1], changed(last, **{"bn.running_mean": torch.full((4,), math.inf)})],
        ),
        "nan in the global": (NonFiniteUpdate, poisoned, good),
        "nobody": (NoUsableUpdates, theta, []),
        "no examples": (NoUsableUpdates, theta, [ClientUpdate(0, 0, dict(theta))]),
        "twice": (ValueError, theta, [good[0], good[0]]),
        **{
            f"disk at read {at}": (
                OSError,
                theta,
                [*good[:-1], ClientUpdate(99, 5, Breaks(last.values, at))],
            )
            for at in (0, 3)
        },
    }


CALLS = list(bad_calls(start(torch.device("cpu"))))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_raises_leaves_the_rule_as_it_was(name: str, device: torch.device) -> None:
    def rule() -> Craft:
        return Craft(device=device, scale="steady", reference="ema", on_nonfinite="raise")

    disturbed, plain = rule(), rule()
    theta = start(device)
    for number in range(3):
        error, state, updates = bad_calls(theta)[name]
        before = disturbed.state_dict()
        with pytest.raises(error):
            disturbed.aggregate(state, updates)
        assert same(before, disturbed.state_dict())
        good = replies(theta, number)
        first, second = plain.aggregate(theta, good), disturbed.aggregate(theta, good)
        assert same(first.state, second.state)
        assert first.report.round == second.report.round == number
        theta = first.state
    assert same(plain.state_dict(), disturbed.state_dict())


@pytest.mark.parametrize(("make", "reads"), [(Craft, (1, 2)), (FedAdam, (2, 4))])
def test_a_disk_that_fails_in_the_middle_leaves_the_rule_as_it_was(
    make: type[Craft] | type[FedAdam], reads: tuple[int, ...], device: torch.device
) -> None:
    # Each layer fills a block of its own: Craft has applied one when it comes to the next, and
    # FedAdam reads all of them twice.
    rule = make(device=device, block_bytes=4_000_000)
    theta = {f"layer{i}.weight": torch.zeros(300, 200, device=device) for i in range(3)}
    rule.aggregate(theta, replies(theta, 0))
    before = rule.state_dict()
    clients = replies(theta, 1)
    for at in reads:
        broken = ClientUpdate(99, 5, Breaks(clients[-1].values, at))
        with pytest.raises(OSError, match="disk"):
            rule.aggregate(theta, [*clients[:-1], broken])
        assert same(before, rule.state_dict())


def test_every_client_dropped_leaves_the_rule_as_it_was(device: torch.device) -> None:
    rule = trained(device, scale="steady")
    before = rule.state_dict()
    theta = start(device)
    bad = [changed(u, **{"head.bias": torch.full((5,), math.nan)}) for u in replies(theta, 1)]
    with pytest.raises(NoUsableUpdates, match=r"head\.bias"):
        rule.aggregate(theta, bad)
    assert same(before, rule.state_dict())


def test_an_observer_sees_only_rounds_that_succeeded(device: torch.device) -> None:
    rule = Craft(device=device)
    seen: list[int] = []
    rule.observers.append(lambda report: seen.append(report.round))
    theta = start(device)
    rule.aggregate(theta, replies(theta, 0))
    with pytest.raises(NoUsableUpdates):
        rule.aggregate(theta, [])
    rule.aggregate(theta, replies(theta, 1))
    assert seen == [0, 1]


def test_a_round_that_an_observer_refuses_has_not_happened(device: torch.device) -> None:
    rule = trained(device, scale="steady", reference="ema")
    before = rule.state_dict()
    refused: list[int] = []

    def refuse(report: AggregationReport) -> None:
        refused.append(report.round)
        raise RuntimeError("the disk is full")

    rule.observers.append(refuse)
    theta = start(device)
    with pytest.raises(RuntimeError, match="disk is full"):
        rule.aggregate(theta, replies(theta, 1))
    assert same(before, rule.state_dict())
    rule.observers.remove(refuse)
    assert rule.aggregate(theta, replies(theta, 1)).report.round == refused[0]


def test_a_default_device_of_another_kind_changes_nothing(device: torch.device) -> None:
    theta = start(device)
    wanted = Craft(device=device).aggregate(theta, replies(theta, 0)).state
    updates = replies(theta, 0)
    torch.set_default_device("meta")
    try:
        got = Craft(device=device).aggregate(theta, updates).state
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)
    assert same(got, wanted)


# -- lazy values ---------------------------------------------------------------------------------


def near(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return list(one) == list(two) and all(
        torch.allclose(one[name], two[name], rtol=1e-4, atol=1e-6) for name in one
    )


class Counted(Mapping[str, Tensor]):
    """A lazy mapping: a new tensor at each read, counted, and followed by a weak reference."""

    def __init__(
        self,
        client: int,
        shapes: Mapping[str, tuple[int, ...]],
        alive: list[weakref.ref[Tensor]],
        reads: list[tuple[int, str, int]],
        spoilt: str | None = None,
    ) -> None:
        self.client, self.shapes, self.spoilt = client, shapes, spoilt
        self._alive, self._reads = alive, reads

    def __getitem__(self, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(
            1000 * self.client + list(self.shapes).index(name)
        )
        value = torch.randn(self.shapes[name], generator=generator)
        if name == self.spoilt:
            value.view(-1)[0] = math.nan
        self._alive.append(weakref.ref(value))
        living = sum(ref() is not None for ref in self._alive)
        self._reads.append((self.client, name, living))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


@pytest.mark.parametrize(("rule", "passes"), [(Craft, 1), (FedAvg, 1), (FedAdam, 2)])
@pytest.mark.parametrize("kind", ["state", "update"])
def test_lazy_values_are_read_as_seldom_as_can_be_and_group_by_group(
    kind: Any, rule: type[Craft] | type[FedAvg] | type[FedAdam], passes: int, device: torch.device
) -> None:
    # Each layer fills a block of its own.
    layers = {f"layer{i}.{leaf}": (60, 400) for i in range(8) for leaf in ("weight", "bias")}
    shapes = {**layers, "bn.running_mean": (6,), "bn.num_batches_tracked": (1,)}
    count = 4
    theta = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    aggregator = rule(device=device, block_bytes=3_000_000)
    for number in range(2):
        before = aggregator.state_dict()
        alive: list[weakref.ref[Tensor]] = []
        reads: list[tuple[int, str, int]] = []
        clients = [
            ClientUpdate(i, 5, Counted(10 * number + i, shapes, alive, reads), kind)
            for i in range(count)
        ]
        gc.collect()
        lazy = aggregator.aggregate(theta, clients)
        times = {(client, name): 0 for client, name, _ in reads}
        for client, name, _ in reads:
            times[client, name] += 1
        counter = "bn.num_batches_tracked"  # looked at before anything is computed
        assert {n for (_, name), n in times.items() if name != counter} == set(range(1, passes + 1))
        assert len(times) == count * len(shapes)
        # Never more than the group before and the one that is read: 2 entries, 4 clients each.
        assert max(living for _, _, living in reads) <= 2 * 2 * count
        # Group by group, once a pass; a second begins with what is still there of the first.
        order = [name.rpartition(".")[0] for _, name, _ in reads if name in layers]
        visits = [group for i, group in enumerate(order) if i == 0 or order[i - 1] != group]
        back = reversed(range(7)) if passes == 2 else ()
        assert visits == [f"layer{i}" for i in [*range(8), *back]]
        assert not any(ref() is not None for ref in alive)
        # From memory, where float32 is tried first, the same numbers give the same step.
        eager = [ClientUpdate(c.client_id, 5, dict(c.values), kind) for c in clients]
        twin = rule(device=device)
        twin.load_state_dict(before)
        assert near(twin.aggregate(theta, eager).state, lazy.state)


@pytest.mark.parametrize("block_bytes", [700, 4000, 20_000, None])
def test_entries_that_share_a_block_are_read_twice_at_most(
    block_bytes: int | None, device: torch.device
) -> None:
    """Of a group that is wider than a block, to and fro."""
    shapes = {"a.weight": (600,), "a.bias": (600,), "b.weight": (30,), "c.weight": (900,)}
    theta = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    reads: list[tuple[int, str, int]] = []
    clients = [ClientUpdate(i, 5, Counted(i, shapes, [], reads)) for i in range(3)]
    Craft(device=device, block_bytes=block_bytes).aggregate(theta, clients)
    times = Counter((client, name) for client, name, _ in reads)
    assert max(times.values()) <= (1 if block_bytes is None else 2)


def test_a_lazy_client_with_nan_is_left_out(device: torch.device) -> None:
    """Naming the entry costs that client one more read; the round begins again with the others."""
    shapes = {f"layer{i}.weight": (6, 5) for i in range(4)}
    theta = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    reads: list[tuple[int, str, int]] = []
    clients = [
        ClientUpdate(i, 5, Counted(i, shapes, [], reads, "layer2.weight" if i == 1 else None))
        for i in range(3)
    ]
    result = Craft(device=device).aggregate(theta, clients)
    (dropped,) = result.report.dropped
    assert (dropped.client_id, dropped.entry) == (1, "layer2.weight")
    assert result.report.clients == (0, 2)
    times = Counter((client, name) for client, name, _ in reads)
    assert [times[1, name] for name in shapes] == [2, 2, 2, 1]
    assert {times[client, name] for client in (0, 2) for name in shapes} == {2}


class OnDisk(Mapping[str, Tensor]):
    """A client's safetensors file, an entry at a time."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")

    def __getitem__(self, name: str) -> Tensor:
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())


def test_clients_on_disk(device: torch.device, tmp_path: Path) -> None:
    theta = start(device)
    lazy, eager = Craft(device=device), Craft(device=device)
    for number in range(2):
        updates = replies(theta, number)
        files = []
        for update in updates:
            path = tmp_path / f"{number}-{update.client_id}.safetensors"
            save_file({name: value.cpu() for name, value in update.values.items()}, path)
            files.append(ClientUpdate(update.client_id, update.num_examples, OnDisk(path)))
        result = lazy.aggregate(theta, files)
        assert near(result.state, eager.aggregate(theta, updates).state)
        theta = result.state
