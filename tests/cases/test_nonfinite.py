"""NaN, infinity, and sums in half precision that overflow or stall."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from craft_adapters import Aggregator, DroppedClient, NonFiniteUpdate, NoUsableUpdates
from craft_adapters.aggregators import FedAvg

from .oracle import after, near, put, replies, rule, same_bits

NAN, INF = math.nan, math.inf
START: dict[str, Any] = {"a.weight": [[0.0, 0.0], [0.0, 0.0]], "b.bias": [0.0, 0.0]}
SOUND: dict[str, Any] = {"a.weight": [[0.6, 0.0], [0.0, 0.8]], "b.bias": [0.3, 0.4]}
ONES = [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("entry", ["a.weight", "b.bias"])
def test_one_nan_does_not_spread(
    bad: float, entry: str, device: torch.device, dtype: torch.dtype
) -> None:
    """One client's single NaN spreads over the whole global model.

    https://github.com/NVIDIA/NVFlare/pull/5240
    https://github.com/google-parfait/tensorflow-federated/pull/1685
    """
    broken: dict[str, Any] = {"a.weight": ONES, "b.bias": [bad, 0.1]}
    if entry == "a.weight":
        broken = {"a.weight": [[1.0, 1.0], [1.0, bad]], "b.bias": [1.0, 0.1]}
    updates = replies([SOUND, broken, SOUND], [10, 1000, 10], device, dtype)
    start = put(START, device, dtype)
    result = rule(device).aggregate(start, updates)
    assert result.report.dropped == (DroppedClient(1, "NaN or infinity", entry),)
    assert result.report.clients == (0, 2)
    assert near(result.state["a.weight"], [0.3, 0.0, 0.0, 0.4])
    assert near(result.state["b.bias"], [0.3, 0.4])
    without = rule(device).aggregate(start, [updates[0], updates[2]])
    assert same_bits(result.state, without.state)

    strict = rule(device, on_nonfinite="raise")
    before = copy.deepcopy(strict.state_dict())
    with pytest.raises(NonFiniteUpdate, match=rf"client 1\b.*{entry!r}"):
        strict.aggregate(start, updates)
    assert strict.state_dict() == before


def test_nan_in_a_buffer_only(device: torch.device, dtype: torch.dtype) -> None:
    """The same where only a running statistic is broken, which is never projected.

    https://github.com/NVIDIA/NVFlare/pull/5240
    """
    start = put({**START, "bn.running_var": [1.0]}, device, dtype)
    clients = [{**SOUND, "bn.running_var": [value]} for value in (2.0, NAN, 4.0)]
    result = rule(device).aggregate(start, replies(clients, [10, 1000, 10], device, dtype))
    assert result.report.dropped == (DroppedClient(1, "NaN or infinity", "bn.running_var"),)
    assert near(result.state["bn.running_var"], [3.0])
    assert near(result.state["b.bias"], [0.3, 0.4])


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_reply_rejected_half_way_leaves_nothing(
    order: list[int], device: torch.device, dtype: torch.dtype
) -> None:
    """The entries added before the bad one stay in the saved model: a = 51.

    https://github.com/NVIDIA/NVFlare/issues/5293

    The case wants the raw update of the client that is left, [2] and [4]. By DESIGN.md one active
    client goes through the formula too: a unit step, [1] and [1]. FedAvg gives the case's numbers.
    """
    clients: list[dict[str, Any]] = [
        {"a": [2.0], "b": [4.0]},
        {"a": [100.0], "b": [INF]},
    ]
    clients = [clients[i] for i in order]
    start = put({"a": [0.0], "b": [0.0]}, device, dtype)
    updates = replies(clients, [1, 1], device, dtype)
    good = updates[order.index(0)]
    wanted: dict[str, list[Any]] = {
        "craft": [after([0], [[2]], [1]), after([0], [[4]], [1])],
        "fedavg": [[2], [4]],
    }
    pairs: list[tuple[Aggregator, Aggregator]] = [
        (rule(device), rule(device)),
        (FedAvg(device=device), FedAvg(device=device)),
    ]
    for one, other in pairs:
        result, alone = one.aggregate(start, updates), other.aggregate(start, [good])
        assert same_bits(result.state, alone.state)
        assert near(result.state["a"], wanted[one.name][0])
        assert near(result.state["b"], wanted[one.name][1])
        got, kept = one.state_dict(), other.state_dict()
        assert same_bits(got.get("reference", {}), kept.get("reference", {}))


def test_nobody_is_finite(device: torch.device, dtype: torch.dtype) -> None:
    """All clients rejected: no partial effect, and nothing remembered.

    https://github.com/NVIDIA/NVFlare/issues/5293
    """
    aggregator = rule(device)
    start = put({"a": [0.0], "b": [0.0]}, device, dtype)
    updates = replies([{"a": [1.0], "b": [NAN]}, {"a": [INF], "b": [1.0]}], [1, 1], device, dtype)
    with pytest.raises(NoUsableUpdates, match=r"0 \(b\), 1 \(a\)"):
        aggregator.aggregate(start, updates)
    assert near(start["a"], [0.0]) and aggregator.state_dict()["reference"] == {}


def _half(value: float) -> dict[str, Any]:
    return {
        "w": torch.full((2,), value, dtype=torch.float16),
        "bn.running_mean": torch.full((2,), value, dtype=torch.float16),
    }


def test_float16_sum_overflows(device: torch.device) -> None:
    """A sum of half-precision tensors is infinite although the mean is representable.

    https://github.com/numpy/numpy/issues/8217
    https://github.com/pytorch/translate/pull/187
    """
    start = put(_half(60000.0), device, torch.float16)
    updates = replies([_half(60000.0)] * 4, [1] * 4, device, torch.float16)
    both: list[Aggregator] = [rule(device), FedAvg(device=device)]
    for aggregator in both:
        result = aggregator.aggregate(start, updates).state
        for entry in ("w", "bn.running_mean"):
            assert result[entry].dtype == torch.float16
            assert result[entry].tolist() == [60000.0, 60000.0]


def test_float16_difference_overflows(device: torch.device) -> None:
    """The same for the difference: 120000 is no float16, both ends are.

    https://github.com/numpy/numpy/issues/8217

    ``client_norm`` moves by the clients' own length, which four equal clients end in.
    """
    start = put(_half(-60000.0), device, torch.float16)
    updates = replies([_half(60000.0)] * 4, [1] * 4, device, torch.float16)
    both: list[Aggregator] = [rule(device, scale="client_norm"), FedAvg(device=device)]
    for aggregator in both:
        result = aggregator.aggregate(start, updates)
        assert result.report.dropped == ()
        for entry in ("w", "bn.running_mean"):
            assert result.state[entry].tolist() == [60000.0, 60000.0]


def _ones(count: int, kind: torch.dtype) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    ones = torch.ones(3, dtype=kind)
    return (
        {"w": torch.zeros(3, dtype=kind), "bn.running_mean": torch.zeros(3, dtype=kind)},
        [{"w": ones, "bn.running_mean": ones} for _ in range(count)],
    )


def test_bfloat16_sum_stalls(device: torch.device) -> None:
    """A running bfloat16 sum stalls at 256, so the mean over many clients is far too small.

    https://github.com/jax-ml/ml_dtypes/issues/63
    https://github.com/FederatedAI/FATE/pull/5639
    """
    count, kind = 1000, torch.bfloat16
    global_state, clients = _ones(count, kind)
    result = rule(device).aggregate(
        put(global_state, device, kind), replies(clients, [1] * count, device, kind)
    )
    assert result.state["bn.running_mean"].tolist() == [1.0, 1.0, 1.0]
    wanted = 0.0005773502691896247
    assert near(result.state["w"], [wanted] * 3, atol=0.01 * wanted)
    assert {value.dtype for value in result.state.values()} == {kind}


@pytest.mark.parametrize(("kind", "count"), [(torch.bfloat16, 300), (torch.float16, 2100)])
def test_half_precision_average_stalls(kind: torch.dtype, count: int, device: torch.device) -> None:
    """The same for a plain average, and for float16, whose running sum stalls at 2048.

    https://github.com/jax-ml/ml_dtypes/issues/63
    """
    global_state, clients = _ones(count, kind)
    result = FedAvg(device=device).aggregate(
        put(global_state, device, kind), replies(clients, [1] * count, device, kind)
    )
    for value in result.state.values():
        assert value.dtype == kind and value.tolist() == [1.0, 1.0, 1.0]
