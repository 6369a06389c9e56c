"""The projection: idle, parallel, opposite, surplus and lone clients; width; order."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import craft_adapters
from craft_adapters import ClientUpdate

from .oracle import after, near, numbers, put, replies, rule, same_bits, step, with_previous


@pytest.mark.parametrize("moved", [0.0, 1e-8])
def test_one_client_did_not_move_a_layer(
    moved: float, device: torch.device, dtype: torch.dtype
) -> None:
    """Its norm is zero (or far below the threshold) and dividing by it makes the layer NaN.

    https://github.com/flwrlabs/flower/pull/7631
    https://github.com/WeiChengTseng/Pytorch-PCGrad/issues/7
    https://github.com/FederatedAI/Practicing-Federated-Learning/issues/13
    https://github.com/microsoft/dion/pull/24
    https://github.com/tum-pbs/CRAFT/blob/98d465bea3866a7f76c3f277bd4339a3f7a65261/fed/craft.py
    """
    clients: list[dict[str, Any]] = [
        {"a": [2.0, 0.0, 0.0], "b": [0.3, 0.4]},
        {"a": [0.0, 0.0, moved], "b": [0.4, -0.3]},
        {"a": [0.0, 5.0, 0.0], "b": [0.3, 0.4]},
    ]
    start = put({"a": [0.0, 0.0, 0.0], "b": [0.0, 0.0]}, device, dtype)
    result = rule(device).aggregate(start, replies(clients, [1, 1, 1], device, dtype))
    assert near(result.state["a"], [0.5, 0.5, 0.0])
    assert near(result.state["b"], [0.4666667, 0.0666667])
    assert [group.inactive for group in result.report.groups] == [(1,), ()]


@pytest.mark.parametrize("remembered", [False, True])
def test_no_client_moved_a_layer(
    remembered: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """lstsq on the all-zero system returns NaN and infinity on CUDA, silently.

    https://github.com/SimplexLab/TorchJD/issues/142
    https://github.com/pytorch/pytorch/issues/117122
    https://github.com/pytorch/pytorch/pull/176746
    """
    start = put({"w": [[0.25, -1.5, 3.0]], "b": [0.1]}, device, dtype)
    aggregator = rule(device)
    if remembered:  # a past step does not move a layer that nobody moved
        aggregator = with_previous(device, put({"w": [1.0, 0.0, 1.0], "b": [2.0]}, device, dtype))
    updates = [
        ClientUpdate(i, n, {k: v.clone() for k, v in start.items()}) for i, n in [(0, 7), (1, 9)]
    ]
    result = aggregator.aggregate(start, updates)
    assert same_bits(result.state, start)
    reference = aggregator.state_dict()["reference"]
    assert sorted(reference) == ["b", "w"]
    assert all(bool((value == 0).all()) for value in reference.values())

    clients: list[dict[str, Any]] = [
        {"w": [[1.25, -1.5, 3.0]], "b": [0.3]},
        {"w": [[0.25, -0.5, 3.0]], "b": [0.2]},
    ]
    following = aggregator.aggregate(start, replies(clients, [7, 9], device, dtype)).state
    assert near(following["w"], after([0.25, -1.5, 3.0], [c["w"][0] for c in clients], [7, 9]))
    assert near(following["b"], after([0.1], [c["b"] for c in clients], [7, 9]))


def test_all_clients_below_the_threshold(device: torch.device) -> None:
    """Updates of length 1e-9 are averaged, not blown up to length 1, nor remembered.

    https://github.com/SimplexLab/TorchJD/issues/142
    """
    start = put({"w": [0.0, 0.0]}, device, torch.float64)
    aggregator = with_previous(device, put({"w": [1.0, 1.0]}, device, torch.float64))
    clients: list[dict[str, Any]] = [{"w": [1e-9, 0.0]}, {"w": [0.0, 3e-9]}]
    result = aggregator.aggregate(start, replies(clients, [3, 1], device, torch.float64))
    assert near(result.state["w"], [7.5e-10, 7.5e-10], atol=1e-18)
    assert "average" in result.report.groups[0].note
    assert aggregator.state_dict()["reference"]["w"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("clients", "wanted"),
    [
        ([[0.6, 0.8], [0.6, 0.8], [1.2, 1.6]], [0.2, 0.2666667]),
        ([[0.6, 0.8]] * 7, [0.6 / 7, 0.8 / 7]),
        ([[0.3, 0.4], [-0.6, -0.8], [3.0, 4.0]], [0.6 / 9, 0.8 / 9]),
    ],
    ids=["parallel", "seven", "one opposite"],
)
def test_parallel_clients_make_the_system_rank_one(
    clients: list[list[float]], wanted: list[float], device: torch.device, dtype: torch.dtype
) -> None:
    """A full-rank solver answers differently on GPU than on CPU, without any warning.

    https://github.com/SimplexLab/TorchJD/pull/223
    https://github.com/pytorch/pytorch/issues/180157
    https://github.com/pytorch/pytorch/issues/136443
    https://github.com/tum-pbs/CRAFT/blob/98d465bea3866a7f76c3f277bd4339a3f7a65261/fed/craft.py

    Identical clients do not give FedAvg: each gets its share as the inner product.
    """
    states: list[dict[str, Any]] = [{"w": client} for client in clients]
    counts = [1] * len(clients)
    start = put({"w": [0.0, 0.0]}, device, dtype)
    result = rule(device).aggregate(start, replies(states, counts, device, dtype))
    assert near(result.state["w"], wanted)
    assert near(result.state["w"], after([0, 0], clients, counts))
    assert result.report.groups[0].rank == 1


def _spokes(count: int, origin: list[float], length: float, dtype: torch.dtype) -> list[Any]:
    angles = [math.pi / 2 + 2 * math.pi * i / count for i in range(count)]
    return [
        torch.tensor(origin, dtype=dtype)
        + length * torch.tensor([math.cos(a), math.sin(a)], dtype=dtype)
        for a in angles
    ]


@pytest.mark.parametrize(
    ("count", "kind", "origin"),
    [
        (3, torch.float64, [0.5, -0.5]),
        (5, torch.float64, [0.5, -0.5]),
        (100, torch.float64, [0.5, -0.5]),
        (3, torch.float32, [0.0, 0.0]),
        (7, torch.float32, [0.0, 0.0]),
    ],
)
def test_symmetric_clients_in_a_small_bias_cancel(
    count: int, kind: torch.dtype, origin: list[float], device: torch.device
) -> None:
    """More clients than entries: no direction satisfies all; the least-squares answer is zero.

    https://github.com/SimplexLab/TorchJD/pull/223
    https://github.com/SimplexLab/TorchJD/issues/131
    """
    states: list[dict[str, Any]] = [{"bias": v} for v in _spokes(count, origin, 0.1, kind)]
    start = put({"bias": origin}, device, kind)
    aggregator = rule(device)
    result = aggregator.aggregate(start, replies(states, [1] * count, device, kind))
    assert near(result.state["bias"], origin)
    assert aggregator.state_dict()["reference"]["bias"].tolist() == [0.0, 0.0]
    group = result.report.groups[0]
    assert group.rank == 2 and group.step_norm == 0.0
    assert group.residual == pytest.approx(1 / count, abs=1e-6)


LISTED_BIAS = [
    0.002472367614225375,
    0.008807780808104838,
    0.0047499443623082935,
    0.005269296921444285,
    0.009214937020655081,
    0.002509849464010389,
    0.006733558019690047,
    0.0027797994394811705,
    0.0036531329782955617,
    -0.0020590983017766394,
]


@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_a_bias_of_10_entries_and_100_clients(kind: torch.dtype, device: torch.device) -> None:
    """Over-determined and inconsistent: a 100 x 100 Gram matrix of rank 10.

    https://github.com/SimplexLab/TorchJD/pull/223
    """
    rows = np.random.default_rng(7).normal(size=(100, 10)) + 0.3
    start = {"bias": torch.zeros(10, dtype=kind, device=device)}
    states = [{"bias": torch.from_numpy(row.copy()).to(kind)} for row in rows]
    result = rule(device).aggregate(start, replies(states, [1] * 100, device, kind))
    assert near(result.state["bias"], LISTED_BIAS)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    residual = units.T @ (units @ numbers(result.state["bias"]) - 0.01)
    assert np.abs(residual).max() < (1e-8 if kind == torch.float64 else 1e-6)
    group = result.report.groups[0]
    assert group.rank == 10
    assert group.conflicts_after == tuple(np.flatnonzero(units @ LISTED_BIAS < 0).tolist())
    assert "not guaranteed" in group.note


@pytest.mark.parametrize("layers", [1, 2])
def test_surplus_clients_may_be_moved_against_and_the_report_says_so(
    layers: int, device: torch.device
) -> None:
    """Advertised as conflict-free, yet it points against one though (0.1, 1) would suit all.

    https://github.com/SimplexLab/TorchJD/issues/131
    https://github.com/SimplexLab/TorchJD/pull/223
    https://github.com/tum-pbs/CRAFT/blob/98d465bea3866a7f76c3f277bd4339a3f7a65261/fed/craft.py

    The second layer has independent updates: nobody is moved against there.
    """
    rows = [[-4.0, 1.0], [-4.0, 1.0], [1.0, 0.0], [1.0, 3.0]]
    start = put({"bias": [0.0, 0.0], "wide": [0.0] * 4}, device, torch.float64)
    clients: list[dict[str, Any]] = [
        {"bias": row, "wide": np.eye(4)[i].tolist()} for i, row in enumerate(rows)
    ]
    if layers == 1:
        del start["wide"]
        clients = [{"bias": client["bias"]} for client in clients]
    result = rule(device).aggregate(start, replies(clients, [1] * 4, device, torch.float64))
    assert near(result.state["bias"], [-0.03247701547641866, 0.3467788141411504])
    units = np.asarray(rows) / np.linalg.norm(rows, axis=1, keepdims=True)
    aligned = units @ numbers(result.state["bias"])
    assert np.allclose(aligned, [0.11561355, 0.11561355, -0.03247702, 0.31871314], atol=1e-6)
    first = result.report.groups[0]
    assert first.conflicts_after == (2,) and first.rank == 2 and "not guaranteed" in first.note
    assert first.residual == pytest.approx(0.25 + 0.03247701547641866, abs=1e-6)
    assert result.report.conflicts_after == 1
    assert [group.conflicts_after for group in result.report.groups[1:]] == [()] * (layers - 1)


def _sources() -> Iterator[Path]:
    for folder in craft_adapters.__path__:
        yield from Path(folder).rglob("*.py")


def test_no_source_says_conflict_free_without_its_condition() -> None:
    """The claim holds for independent updates only.

    https://github.com/SimplexLab/TorchJD/issues/131
    """
    for source in _sources():
        for claim in re.finditer(r"conflict[- ]free", source.read_text(encoding="utf-8"), re.I):
            around = claim.string[max(0, claim.start() - 200) : claim.end() + 200]
            assert "independent" in around, f"{source}: {around}"


# Two clients at a cosine of 0.995, and a third: singular values 1.57, 0.74 and 0.055.
_TURN = math.acos(0.995)
NEARLY_PARALLEL = np.array(
    [[1.0, 0.0, 0.0], [math.cos(_TURN), math.sin(_TURN), 0.0], [0.6, -0.48, 0.64]]
)
NEARLY_PARALLEL /= np.linalg.norm(NEARLY_PARALLEL, axis=1, keepdims=True)


@pytest.mark.parametrize("width", [3, 1_000_000, 3_000_000])
def test_the_cutoff_does_not_grow_with_the_width(width: int, device: torch.device) -> None:
    """pinv's default cut-off throws real differences away: max(m, n) * eps, 12 % at a million.

    https://github.com/pytorch/pytorch/pull/82887
    https://github.com/pytorch/pytorch/issues/54151
    https://github.com/pytorch/pytorch/pull/63102
    https://github.com/tum-pbs/CRAFT/blob/98d465bea3866a7f76c3f277bd4339a3f7a65261/fed/craft.py
    """
    updates = []
    for index, row in enumerate(NEARLY_PARALLEL):
        value = torch.zeros(width, device=device)
        value[:3] = torch.tensor(row, dtype=torch.float32)
        updates.append(ClientUpdate(index, 1, {"w": value}))
    start = {"w": torch.zeros(width, device=device)}
    result = rule(device).aggregate(start, updates)
    moved = result.state["w"]
    # The inputs' own rounding, 3e-8, is magnified by 1 / 0.055.
    assert near(moved[:3], [0.33333333333, 0.01668753914, 0.22084898769], atol=5e-6)
    assert not bool(moved[3:].any())
    assert np.allclose(NEARLY_PARALLEL @ numbers(moved[:3]), 1 / 3, atol=1e-5)
    assert result.report.groups[0].rank == 3


def test_a_wide_layer_needs_no_square_matrix(device: torch.device) -> None:
    """cuSOLVER rejects the size, or a full SVD asks for an n x n matrix of 160 GB.

    https://github.com/tum-pbs/ConFIG/issues/20
    https://github.com/pytorch/pytorch/issues/102963
    https://github.com/jiaweizzhao/GaLore/issues/7
    https://github.com/cupy/cupy/issues/7065

    Its memory is measured in test_memory.py.
    """
    generator = torch.Generator().manual_seed(0)
    width = 200_000
    clients = [torch.randn(width, generator=generator) for _ in range(3)]
    start = {"w": torch.zeros(width, device=device)}
    updates = [ClientUpdate(i, 1, {"w": v.to(device)}) for i, v in enumerate(clients)]
    result = rule(device).aggregate(start, updates)
    moved = numbers(result.state["w"])
    rows = np.stack([numbers(client) for client in clients])
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert np.allclose(units @ moved, 1 / 3, rtol=0, atol=1e-5)
    assert np.linalg.norm(moved) == pytest.approx(0.5784015096793335, abs=1e-6)
    listed = [-0.000294143103, -0.000840654193, 0.000877634783, 0.000466868909, 0.002730031380]
    assert np.allclose(moved[:5], listed, rtol=0, atol=1e-6)
    assert np.allclose(moved, -step(-rows, [1, 1, 1]), rtol=0, atol=1e-6)


ORDERS = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]]


@pytest.mark.parametrize("ids", [[0, 1, 2, 3], ["a", "b", "c", "d"], [10, 9, "x", "2"]])
@pytest.mark.parametrize("kind", ["state", "update"])
def test_the_order_of_replies_changes_no_bit(
    ids: list[int | str], kind: Any, device: torch.device, dtype: torch.dtype
) -> None:
    """Singular vectors have arbitrary signs and replies an arbitrary order: runs differ.

    https://github.com/pytorch/pytorch/issues/97410
    https://github.com/pytorch/pytorch/issues/86363
    https://github.com/tensorly/tensorly/issues/74
    https://github.com/flwrlabs/flower/issues/3328
    """
    generator = torch.Generator().manual_seed(3)
    start = put(
        {"w": torch.zeros(5, 4, dtype=dtype), "b": torch.zeros(3, dtype=dtype)}, device, dtype
    )
    sign = 1.0 if kind == "state" else -1.0
    clients = [
        {
            "w": sign * torch.randn(5, 4, generator=generator).to(device, dtype),
            "b": sign * torch.randn(3, generator=generator).to(device, dtype),
        }
        for _ in range(4)
    ]
    updates = [
        ClientUpdate(ids[i], count, clients[i], kind) for i, count in enumerate([5, 1, 3, 2])
    ]
    first = rule(device).aggregate(start, updates)
    assert near(
        first.state["w"].flatten()[:3],
        [-0.08978391910869202, 0.20149508033896046, -0.021245711362955146],
    )
    for order in [*ORDERS, ORDERS[0]]:
        aggregator = rule(device)
        again = aggregator.aggregate(start, [updates[i] for i in order])
        assert same_bits(again.state, first.state)
        assert again.report.clients == first.report.clients
        second = aggregator.aggregate(again.state, [updates[i] for i in order[::-1]])
        assert bool(second.state["w"].isfinite().all())


@pytest.mark.parametrize("previous", [None, {"w": [0.0, 1.0, 0.0, 1.0], "b": [-2.0]}])
def test_only_one_client_replies(
    previous: dict[str, Any] | None, device: torch.device, dtype: torch.dtype
) -> None:
    """Pairwise code meets an empty set, and minimum-two defaults wait for ever.

    https://github.com/NVIDIA/NVFlare/pull/5014
    https://github.com/londonaicentre/FLIP/pull/992
    https://github.com/flwrlabs/flower/issues/487

    The case wants the client's own state, as the published code does. DESIGN.md treats one active
    client by the same formula: a step of length 1 along its update, plus what of the previous
    direction is orthogonal to it. What waits for clients is the hosts' part, not tested here.
    """
    client: dict[str, Any] = {"w": [[1.5, 2.0], [3.0, 3.0]], "b": [0.25]}
    start = put({"w": [[1.0, 2.0], [3.0, 4.0]], "b": [0.5]}, device, dtype)
    aggregator = rule(device)
    if previous is not None:
        aggregator = with_previous(device, put(previous, device, dtype))
    result = aggregator.aggregate(start, replies([client], [8], device, dtype))
    past = previous or {"w": None, "b": None}
    assert near(result.state["w"], after([[1, 2], [3, 4]], [client["w"]], [8], past["w"]))
    assert near(result.state["b"], after([0.5], [[0.25]], [8], past["b"]))
    if previous is None:
        length = 1.25**0.5
        assert near(result.state["w"], [1 + 0.5 / length, 2, 3, 4 - 1 / length])
        assert near(result.state["b"], [-0.5])
    assert result.report.conflicts_before == result.report.conflicts_after == 0


FLAT: list[dict[str, Any]] = [
    {"w": [0.6, 0.8, 0.0], "b": [1.5]},
    {"w": [0.8, 0.6, 0.0], "b": [1.5]},
]


@pytest.mark.parametrize(
    "previous",
    [
        None,
        {},
        {"w": [0.0, 0.0, 0.0], "b": [0.0]},
        {"w": [0.0, 0.0, 1e-30], "b": [0.0]},
        {"w": [0.0, 0.0, 1e-15], "b": [1e-40]},
        {"b": [0.0]},
    ],
    ids=["none", "empty", "zero", "tiny", "small", "partial"],
)
def test_previous_update_missing_or_zero(
    previous: dict[str, Any] | None, device: torch.device, dtype: torch.dtype
) -> None:
    """In the first round, or after one in which nothing moved, projecting on it divides by zero.

    https://github.com/flwrlabs/flower/issues/2369
    https://github.com/WeiChengTseng/Pytorch-PCGrad/issues/7
    https://github.com/flwrlabs/flower/pull/7631
    https://github.com/tum-pbs/CRAFT/blob/98d465bea3866a7f76c3f277bd4339a3f7a65261/fed/craft.py

    A length of 1e-30 is no direction: it must not come back as a step of length 1.
    """
    aggregator = rule(device)
    if previous is not None:
        aggregator = with_previous(device, put(previous, device, dtype))
    start = put({"w": [0.0, 0.0, 0.0], "b": [1.0]}, device, dtype)
    result = aggregator.aggregate(start, replies(FLAT, [2, 2], device, dtype))
    assert near(result.state["w"], [0.35714286, 0.35714286, 0.0])
    assert near(result.state["b"], [1.5])


@pytest.mark.parametrize("length", [0.0, 1e-30, 1e-15])
def test_no_cosine_to_a_previous_update_that_is_none(
    length: float, device: torch.device, dtype: torch.dtype
) -> None:
    """What was treated as no direction is reported as none.

    https://github.com/flwrlabs/flower/issues/2369
    """
    aggregator = with_previous(device, put({"w": [length, 0.0, length]}, device, dtype))
    start = put({"w": [0.0, 0.0, 0.0], "b": [1.0]}, device, dtype)
    result = aggregator.aggregate(start, replies(FLAT, [2, 2], device, dtype))
    assert [group.cosine_to_reference for group in result.report.groups] == [None, None]


def test_a_small_previous_update_is_a_direction(device: torch.device, dtype: torch.dtype) -> None:
    """The other side of the threshold: steps have about unit length, 1e-6 is a direction.

    https://github.com/flwrlabs/flower/issues/2369
    """
    aggregator = with_previous(device, put({"w": [0.0, 0.0, 1e-6]}, device, dtype))
    start = put({"w": [0.0, 0.0, 0.0], "b": [1.0]}, device, dtype)
    result = aggregator.aggregate(start, replies(FLAT, [2, 2], device, dtype))
    assert near(result.state["w"], [0.35714286, 0.35714286, -1.0])


def test_a_step_that_cancels_is_no_reference(device: torch.device) -> None:
    """Rounding noise of length 1e-8 passes the ``> 0`` test and becomes the next reference.

    https://github.com/tum-pbs/CRAFT/blob/98d465bea3866a7f76c3f277bd4339a3f7a65261/fed/craft.py
    https://github.com/SimplexLab/TorchJD/issues/131
    https://github.com/SimplexLab/TorchJD/pull/223
    https://github.com/WeiChengTseng/Pytorch-PCGrad/issues/7
    """
    kind = torch.float32
    aggregator = rule(device)
    start = put({"w": [5.0, 5.0, 5.0, 5.0]}, device, kind)
    opposite: list[dict[str, Any]] = [{"w": [6.0, 7.0, 3.0, 5.5]}, {"w": [4.0, 3.0, 7.0, 4.5]}]
    first = aggregator.aggregate(start, replies(opposite, [10, 10], device, kind))
    assert near(first.state["w"], [5.0, 5.0, 5.0, 5.0])
    assert aggregator.state_dict()["reference"]["w"].tolist() == [0.0] * 4
    assert first.report.groups[0].step_norm == 0.0
    clients = []
    for index in range(2):
        value = first.state["w"].clone()
        value[index] += 0.1
        clients.append(ClientUpdate(index, 10, {"w": value}))
    second = aggregator.aggregate(first.state, clients)
    assert near(second.state["w"], [5.5, 5.5, 5.0, 5.0])


@pytest.mark.parametrize("width", [30, 10_000])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_opposite_pairs_of_unlike_length_cancel(
    kind: torch.dtype, width: int, device: torch.device
) -> None:
    """The same for two pairs, whose opposites are three times as long and so rounded anew.

    https://github.com/tum-pbs/CRAFT/blob/98d465bea3866a7f76c3f277bd4339a3f7a65261/fed/craft.py

    In bfloat16 the factor is 4, which rounds nothing: three times would make other directions.
    """
    generator = torch.Generator().manual_seed(5)
    factor = 4.0 if kind == torch.bfloat16 else 3.0
    values = []
    for _ in range(2):
        one = (0.01 * torch.randn(width, generator=generator)).to(kind)
        values += [one, -factor * one]
    aggregator = rule(device)
    start = {"w": torch.zeros(width, dtype=kind, device=device)}
    updates = [ClientUpdate(i, 1, {"w": value.to(device)}) for i, value in enumerate(values)]
    result = aggregator.aggregate(start, updates)
    assert not bool(result.state["w"].any())
    assert not bool(aggregator.state_dict()["reference"]["w"].any())
    assert result.report.groups[0].conflicts_before == 4


@pytest.mark.parametrize(
    "clients",
    [
        [[1.0, 2.0], [-1.0, -2.0]],
        [[0.2, 0.0], [-0.1, 0.0], [0.4, 0.0]],
        [[0.0, 1.0], [0.866, -0.5], [-0.866, -0.5]],
    ],
    ids=["opposite", "one against two", "star"],
)
def test_conflicting_clients_are_not_said_to_agree(
    clients: list[list[float]], device: torch.device, dtype: torch.dtype
) -> None:
    """Least squares that cancel must not be mistaken for agreement, nor a cosine exceed 1.

    https://github.com/SimplexLab/TorchJD/issues/131
    https://github.com/WeiChengTseng/Pytorch-PCGrad/issues/7

    Warnings are errors here: three such rounds must not raise an AgreementWarning.
    """
    aggregator = rule(device)
    state = put({"w": [0.0, 0.0]}, device, dtype)
    for _ in range(4):
        updates = [
            ClientUpdate(i, 1, put({"w": [-x for x in client]}, device, dtype), "update")
            for i, client in enumerate(clients)
        ]
        result = aggregator.aggregate(state, updates)
        state = result.state
        consensus = result.report.groups[0].consensus
        assert consensus is None or consensus <= 1.0 + 1e-6
