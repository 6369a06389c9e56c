"""Sample counts that are zero, of odd types, or in another order than the models."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from craft_adapters import ClientUpdate, Layout, NoUsableUpdates
from craft_adapters._layout import Group

from .oracle import after, near, put, replies, rule, same_bits

WITH_BUFFER = Layout(groups=(Group("w", ("w",)),), averaged=("buf",))


@pytest.mark.parametrize("empty", [[0], [0, 2], [2]])
def test_a_client_with_zero_samples_has_no_say(
    empty: list[int], device: torch.device, dtype: torch.dtype
) -> None:
    """A weight of 0 asks the step to be orthogonal to that client: not neutral.

    https://github.com/flwrlabs/flower/issues/7645
    https://github.com/microsoft/msrflute/blob/6430cbf708d659e51b8c749ae5b6e118794a282c/core/strategies/fedavg.py
    https://github.com/tum-pbs/CRAFT/blob/98d465bea3866a7f76c3f277bd4339a3f7a65261/fed/craft.py

    ``buf`` is a buffer in the case; its name does not say so, hence the layout by hand.
    """
    start = put({"w": [0.0, 0.0, 0.0], "buf": [10.0]}, device, dtype)
    useful = put({"w": [0.6, 0.0, 0.8], "buf": [20.0]}, device, dtype)
    idle = put({"w": [9.0, 9.0, 9.0], "buf": [99.0]}, device, dtype)
    alone = rule(device, layout=WITH_BUFFER).aggregate(start, [ClientUpdate(1, 25, useful)])
    updates = [ClientUpdate(1, 25, useful), *(ClientUpdate(i, 0, idle) for i in empty)]
    result = rule(device, layout=WITH_BUFFER).aggregate(start, updates)
    assert near(result.state["w"], [0.6, 0.0, 0.8])
    assert near(result.state["buf"], [20.0])
    assert same_bits(result.state, alone.state)
    assert result.report.clients == (1,)
    assert [(drop.client_id, drop.reason) for drop in result.report.dropped] == [
        (i, "zero examples") for i in empty
    ]


def test_the_empty_client_between_two_others(device: torch.device, dtype: torch.dtype) -> None:
    """The same where it would have made the system inconsistent: it repeats another client.

    https://github.com/flwrlabs/flower/issues/7645
    """
    start = put({"w": [0.0, 0.0]}, device, dtype)
    clients: list[dict[str, Any]] = [{"w": [1.0, 0.0]}, {"w": [1.0, 0.0]}, {"w": [0.0, 3.0]}]
    result = rule(device).aggregate(start, replies(clients, [1, 0, 3], device, dtype))
    assert near(result.state["w"], [0.25, 0.75])


@pytest.mark.parametrize(
    "counts",
    [
        [np.int64(0), np.int64(0)],
        [0, 0],
        [0.0, torch.tensor(0)],
    ],
    ids=["numpy", "int", "mixed"],
)
def test_all_clients_report_zero_samples(
    counts: list[Any], device: torch.device, dtype: torch.dtype
) -> None:
    """NaN weights without an error, or a ZeroDivisionError.

    https://github.com/flwrlabs/flower/issues/7645
    https://github.com/flwrlabs/flower/pull/7646
    https://github.com/flwrlabs/flower/issues/7693
    https://github.com/flwrlabs/flower/issues/7708
    https://github.com/NVIDIA/NVFlare/pull/4948
    https://github.com/tum-pbs/CRAFT/blob/98d465bea3866a7f76c3f277bd4339a3f7a65261/fed/craft.py

    The published code falls back to uniform weights; DESIGN.md raises NoUsableUpdates.
    """
    aggregator, untouched = rule(device), rule(device)
    start = put({"w": [1.0, 2.0]}, device, dtype)
    first = replies([{"w": [2.0, 2.0]}, {"w": [1.0, 3.0]}], [1, 1], device, dtype)
    state = aggregator.aggregate(start, first).state
    untouched.aggregate(start, first)
    before = copy.deepcopy(aggregator.state_dict())
    copied = {name: value.clone() for name, value in state.items()}

    empty = replies([{"w": [1.0, 2.0]}, {"w": [3.0, 4.0]}], counts, device, dtype)
    with pytest.raises(ValueError, match=r"(?s)(?=.*sample)(?=.*zero)") as caught:
        aggregator.aggregate(state, empty)
    assert isinstance(caught.value, NoUsableUpdates)
    assert same_bits(state, copied)
    after_failure = aggregator.state_dict()
    assert after_failure["round"] == before["round"]
    assert same_bits(after_failure["reference"], before["reference"])

    second = replies([{"w": [5.0, 2.0]}, {"w": [1.0, 4.0]}], [2, 1], device, dtype)
    got, wanted = aggregator.aggregate(state, second), untouched.aggregate(state, second)
    assert same_bits(got.state, wanted.state) and got.report.round == wanted.report.round == 1


def test_nobody_reports_at_all(device: torch.device, dtype: torch.dtype) -> None:
    """The same for a round without any reply.

    https://github.com/NVIDIA/NVFlare/pull/4948
    """
    with pytest.raises(NoUsableUpdates, match="no client"):
        rule(device).aggregate(put({"w": [1.0]}, device, dtype), [])


# Orthogonal updates: the new model reads out the weights.
READ_OUT: list[dict[str, Any]] = [{"w": [1.0, 0.0]}, {"w": [0.0, 3.0]}]


@pytest.mark.parametrize(
    "counts",
    [
        [1, 3],
        [np.int64(1), np.int32(3)],
        [torch.tensor(1), torch.tensor(3)],
        [1.0, 3.0],
        [np.float32(1), torch.tensor(3.0, dtype=torch.float64)],
        [np.array(1), np.uint8(3)],
        [2**60, 3 * 2**60],
        [1e-300, 3e-300],
        [5e307, 1.5e308],
    ],
    ids=str,
)
def test_counts_of_any_number_type(
    counts: list[Any], device: torch.device, dtype: torch.dtype
) -> None:
    """Counts arrive as numpy or torch scalars.

    https://github.com/NVIDIA/NVFlare/pull/5081
    https://github.com/TheAlgorithms/Python/pull/13615
    https://github.com/ooples/AiDotNet/pull/911
    https://github.com/londonaicentre/FLIP/pull/833
    """
    start = put({"w": [0.0, 0.0]}, device, dtype)
    result = rule(device).aggregate(start, replies(READ_OUT, counts, device, dtype))
    assert near(result.state["w"], [0.25, 0.75])


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        ("3", "'3'"),
        (True, "True"),
        (None, "None"),
        (-3, "-3"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (torch.tensor([3, 3]), r"tensor\(\[3, 3\]\)"),
        (np.bool_(True), "True"),
        (torch.tensor(True), "True"),
        (np.array([3]), r"array\(\[3\]\)"),
        (torch.tensor(float("nan")), "nan"),
        (np.int64(-1), "-1"),
        (3 + 0j, r"3\+0j"),
    ],
    ids=repr,
)
def test_counts_that_are_none(
    count: Any, shown: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Strings, booleans, negatives, NaN and infinity slip through checks such as ``n <= 0``.

    https://github.com/NVIDIA/NVFlare/pull/5081
    https://github.com/TheAlgorithms/Python/pull/13615
    """
    with pytest.raises((TypeError, ValueError), match=rf"client 1\b.*{shown}"):
        replies(READ_OUT, [1, count], device, dtype)


@pytest.mark.parametrize("counts", [[1], [1, 3, 5], []])
def test_more_or_fewer_counts_than_models(
    counts: list[int], device: torch.device, dtype: torch.dtype
) -> None:
    """Zipping drops the surplus silently.

    https://github.com/NVIDIA/NVFlare/pull/5081
    """
    with pytest.raises(ValueError, match=f"2 clients have values and {len(counts)} have num_exam"):
        replies(READ_OUT, counts, device, dtype)


def test_counts_are_joined_by_client_id(device: torch.device, dtype: torch.dtype) -> None:
    """Models in reply order, counts in registration order: somebody else's weight.

    https://github.com/fedbiomed/fedbiomed/issues/433
    """
    by_id = {
        "site-c": put({"w": [0.0, 0.0, 3.0]}, device, dtype),
        "site-a": put({"w": [1.0, 0.0, 0.0]}, device, dtype),
        "site-b": put({"w": [0.0, 2.0, 0.0]}, device, dtype),
    }
    counts = {"site-a": 70, "site-b": 20, "site-c": 10}
    start = put({"w": [0.0, 0.0, 0.0]}, device, dtype)
    result = rule(device).aggregate(start, ClientUpdate.join(by_id, counts))
    assert near(result.state["w"], [0.7, 0.2, 0.1])
    assert near(result.state["w"], after([0, 0, 0], [[1, 0, 0], [0, 2, 0], [0, 0, 3]], [7, 2, 1]))
    assert result.report.clients == ("site-a", "site-b", "site-c")


@pytest.mark.parametrize("lonely", ["site-b", "site-x"])
def test_an_id_in_one_mapping_only(lonely: str, device: torch.device, dtype: torch.dtype) -> None:
    """A model without a count, or a count without a model.

    https://github.com/fedbiomed/fedbiomed/issues/433
    """
    by_id = {name: put({"w": [1.0]}, device, dtype) for name in ("site-a", "site-b")}
    counts = {"site-a": 1, "site-b": 1, "site-x": 1}
    if lonely == "site-b":
        del counts["site-b"], counts["site-x"]
    with pytest.raises(ValueError, match=lonely):
        ClientUpdate.join(by_id, counts)


def test_one_id_twice(device: torch.device, dtype: torch.dtype) -> None:
    """A reply that is delivered twice counts twice.

    https://github.com/fedbiomed/fedbiomed/issues/433
    """
    values = put({"w": [1.0]}, device, dtype)
    with pytest.raises(ValueError, match="'site-a' reported twice"):
        rule(device).aggregate(
            put({"w": [0.0]}, device, dtype),
            [ClientUpdate("site-a", 1, values), ClientUpdate("site-a", 1, values)],
        )
