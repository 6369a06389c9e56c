"""FedAvg: the weighted mean, with the treatment of buffers that every rule has here."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from craft_adapters import ClientUpdate, IncompatibleUpdate, NoUsableUpdates
from craft_adapters.aggregators import FedAvg

Kind = Literal["state", "update"]
F64 = torch.float64
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)


def noise(seed: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else F64
    return torch.randn(shape, generator=generator, dtype=wide).to(device, dtype)


def mean(values: list[Tensor], counts: list[float]) -> Tensor:
    """The weighted mean in float64 (complex128)."""
    wide = torch.complex128 if values[0].dtype.is_complex else F64
    total = sum(n * v.to(wide) for n, v in zip(counts, values, strict=True)) / sum(counts)
    assert isinstance(total, Tensor)
    return total


@settings(
    max_examples=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 1000),
    entries=st.sampled_from(FLOATS + COMPLEX),
    kind=st.sampled_from(("state", "update")),
    shape=st.sampled_from(((3, 4), (7,), (), (1, 2, 1, 3), (0, 3))),
    counts=st.lists(
        st.one_of(st.integers(1, 10**12), st.floats(0.01, 100)), min_size=1, max_size=6
    ),
    exponent=st.integers(-4, 4),
)
def test_weighted_mean(
    seed: int,
    entries: torch.dtype,
    kind: Kind,
    shape: tuple[int, ...],
    counts: list[float],
    exponent: int,
    device: torch.device,
) -> None:
    scale = 10.0**exponent
    theta = {
        "a.weight": noise(seed, shape, entries, device) * scale,
        "b.running_mean": noise(seed + 1, (3,), entries, device) * scale,
    }
    values = [
        {
            k: noise(seed + 7 * i + len(k), v.shape, entries, device) * scale
            for k, v in theta.items()
        }
        for i in range(len(counts))
    ]
    clients = [
        ClientUpdate(i, n, v, kind) for i, (n, v) in enumerate(zip(counts, values, strict=True))
    ]
    result = FedAvg(device=device).aggregate(theta, clients)
    assert list(result.state) == list(theta)
    for name, start in theta.items():
        wanted = mean([v[name] for v in values], counts)
        if kind == "update":
            wanted = start.to(wanted.dtype) - wanted
        got = result.state[name]
        assert (got.dtype, got.device, got.shape) == (start.dtype, start.device, start.shape)
        real = entries.to_real()
        # Differences of float32 are taken in float32 at worst, then rounded once.
        eps = torch.finfo(F64 if real == F64 else torch.float32).eps
        size = start.abs().to(F64) + sum(v[name].abs().to(F64) for v in values)
        slack = torch.finfo(real).eps * wanted.abs() + 2 * eps * size
        assert ((got.to(wanted.dtype) - wanted).abs() <= slack + torch.finfo(real).tiny).all()


@pytest.mark.parametrize("kind", ["state", "update"])
@pytest.mark.parametrize("entries", FLOATS)
def test_half_types_are_not_summed_in_half(
    entries: torch.dtype, kind: Kind, device: torch.device
) -> None:
    """2048 + 1 is 2048 in float16, and 100 clients of 1000 overflow it."""
    theta = {"w": torch.zeros(3, dtype=entries, device=device)}
    clients = [
        ClientUpdate(i, 600, {"w": torch.full((3,), 1000.0, dtype=entries, device=device)}, kind)
        for i in range(100)
    ]
    wanted = torch.full_like(theta["w"], 1000.0 if kind == "state" else -1000.0)
    assert torch.equal(FedAvg(device=device).aggregate(theta, clients).state["w"], wanted)


@pytest.mark.parametrize("entries", FLOATS)
@pytest.mark.parametrize("count", [1, 3, 7])
def test_what_nobody_changed_stays_bit_for_bit(
    count: int, entries: torch.dtype, device: torch.device
) -> None:
    """Frozen parameters, and values that a weighted sum would round."""
    theta = {
        "frozen.weight": noise(0, (50,), entries, device) * 0.1,
        "free.weight": noise(1, (5,), entries, device),
        "bn.running_var": noise(2, (50,), entries, device).abs(),
        "bn.num_batches_tracked": torch.tensor(41, device=device),
    }
    clients = [
        ClientUpdate(i, 3 + i, {**theta, "free.weight": noise(9 + i, (5,), entries, device)})
        for i in range(count)
    ]
    result = FedAvg(device=device).aggregate(theta, clients)
    for name, value in theta.items():
        assert torch.equal(result.state[name], value) is (name != "free.weight"), name
    frozen, free = result.report.groups
    assert frozen.clients == ()
    assert frozen.step_norm == 0
    assert len(free.clients) == count


@pytest.mark.parametrize("kind", ["state", "update"])
def test_buffers(kind: Kind, device: torch.device) -> None:
    theta: dict[str, Any] = {
        "bn.running_mean": torch.tensor([1.0, 2.0], device=device),
        "bn.running_var": torch.tensor([1.0, 0.5], device=device),
        "bn.num_batches_tracked": torch.tensor(10, device=device),
        "table": torch.tensor([2**40, 3], device=device),
        "mask": torch.tensor([True, False], device=device),
        "w": torch.zeros(2, device=device),
    }
    states: list[dict[str, Any]] = [
        {
            "bn.running_mean": torch.tensor([2.0, 0.0], device=device),
            "bn.running_var": torch.tensor([0.25, 1.0], device=device),
            "bn.num_batches_tracked": torch.tensor(10 + 4 * i, device=device),
            "table": torch.tensor([2**40 + 1 - i, 3], device=device),
            "mask": torch.tensor([False, True], device=device),
            "w": torch.ones(2, device=device) * i,
        }
        for i in (0, 1, 2)
    ]
    sent = states
    if kind == "update":
        sent = [
            {k: theta[k] - v if k != "mask" else v for k, v in state.items()} for state in states
        ]
    clients = [ClientUpdate(i, n, v, kind) for i, (n, v) in enumerate(zip((1, 1, 2), sent))]  # noqa: B905
    state = FedAvg(device=device).aggregate(theta, clients).state
    torch.testing.assert_close(state["bn.running_mean"].cpu(), torch.tensor([2.0, 0.0]))
    torch.testing.assert_close(state["bn.running_var"].cpu(), torch.tensor([0.25, 1.0]))
    assert state["bn.num_batches_tracked"].dtype == torch.int64
    assert int(state["bn.num_batches_tracked"]) == 18
    assert state["table"].tolist() == [2**40 + 1, 3]  # not through a float
    assert state["mask"].tolist() == [True, False]  # the global's
    torch.testing.assert_close(state["w"].cpu(), torch.full((2,), 1.25))


def test_variance_stays_positive(device: torch.device) -> None:
    theta = {"bn.running_var": torch.full((100,), 1e-30, device=device)}
    clients = [
        ClientUpdate(i, 1 + i, {"bn.running_var": torch.full((100,), v, device=device)})
        for i, v in enumerate((1e-30, 3e-31, 1e20))
    ]
    state = FedAvg(device=device).aggregate(theta, clients[:2]).state
    assert (state["bn.running_var"] > 0).all()
    state = FedAvg(device=device).aggregate(theta, clients).state
    assert (state["bn.running_var"] > 0).all()


def test_partial_payload(device: torch.device, dtype: torch.dtype) -> None:
    theta = {f"{n}.weight": noise(i, (4,), dtype, device) for i, n in enumerate("abc")}
    clients = [
        ClientUpdate(i, 1, {"b.weight": noise(10 + i, (4,), dtype, device)}) for i in range(3)
    ]
    result = FedAvg(device=device).aggregate(theta, clients)
    assert list(result.state) == list(theta)
    for name in ("a.weight", "c.weight"):
        assert torch.equal(result.state[name], theta[name])
        assert result.state[name].data_ptr() != theta[name].data_ptr()
    wanted = mean([client.values["b.weight"] for client in clients], [1, 1, 1])
    torch.testing.assert_close(result.state["b.weight"], wanted.to(dtype))
    assert [group.name for group in result.report.groups] == ["b"]
    clients.append(ClientUpdate(3, 1, {"a.weight": theta["a.weight"]}))
    with pytest.raises(IncompatibleUpdate, match=r"client 0: entry 'a\.weight' is missing"):
        FedAvg(device=device).aggregate(theta, clients)


def test_report(device: torch.device) -> None:
    theta = {"a.weight": torch.zeros(2, dtype=F64, device=device)}
    rows = [[1.0, 0.0], [-1.0, 0.5], [0.0, 0.0], [2.0, 0.1]]
    clients = [
        ClientUpdate(i, n, {"a.weight": torch.tensor(row, dtype=F64, device=device)}, "update")
        for i, (n, row) in enumerate(zip((5, 1, 2, 0), rows, strict=True))
    ]
    rule = FedAvg(device=device)
    report = rule.aggregate(theta, clients).report
    assert (report.rule, report.round, report.clients) == ("fedavg", 0, (0, 1, 2))
    (dropped,) = report.dropped
    assert (dropped.client_id, dropped.reason) == (3, "zero examples")
    (group,) = report.groups
    assert (group.clients, group.inactive, group.width) == ((0, 1), (2,), 2)
    assert (group.conflicts_before, group.conflicts_after) == (1, (1,))
    assert group.residual is group.cosine_to_reference is group.consensus is None
    assert group.step_norm == pytest.approx(((4 / 8) ** 2 + (0.5 / 8) ** 2) ** 0.5)
    assert json.loads(json.dumps(report.to_dict()))["conflicts_before"] == 1
    assert rule.aggregate(theta, clients).report.round == 1
    assert rule.aggregate(theta, clients, round=17).report.round == 17
    assert rule.aggregate(theta, clients).report.round == 18


def test_nobody_to_average(device: torch.device) -> None:
    theta = {"w": torch.zeros(2, device=device)}
    with pytest.raises(NoUsableUpdates):
        FedAvg(device=device).aggregate(theta, [])
    with pytest.raises(NoUsableUpdates):
        FedAvg(device=device).aggregate(theta, [ClientUpdate(0, 0, theta)])


def test_no_state(device: torch.device) -> None:
    rule = FedAvg(device=device)
    rule.aggregate({"w": torch.zeros(2)}, [ClientUpdate(0, 1, {"w": torch.ones(2)})])
    assert not any(isinstance(value, Tensor) for value in rule.state_dict().values())
