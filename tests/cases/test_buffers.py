"""Batch counters, running statistics, masks and extra state never meet the projection."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from craft_adapters import Aggregator
from craft_adapters.aggregators import FedAvg

from .oracle import after, near, put, replies, rule, with_previous

NBT = "bn.num_batches_tracked"


def _rules(device: torch.device) -> list[Aggregator]:
    return [rule(device), FedAvg(device=device)]


@pytest.mark.parametrize("counts", [[30, 10], [1, 10**6]])
@pytest.mark.parametrize("which", [0, 1])
def test_int64_batch_counter_meets_a_float_average(
    counts: list[int], which: int, device: torch.device, dtype: torch.dtype
) -> None:
    """The server dies on a cast or hands back a float counter.

    https://github.com/NVIDIA/NVFlare/issues/156
    https://github.com/secretflow/secretflow/issues/1009
    https://github.com/heroding77/fedavg_encrypt/issues/2
    https://github.com/TsingZ0/PFLlib/pull/269

    Of the reductions that the case allows, DESIGN.md takes the maximum.
    """

    def state(weight: list[float], batches: int) -> dict[str, Any]:
        return {"bn.weight": weight, NBT: torch.tensor(batches)}

    aggregator = _rules(device)[which]
    result = aggregator.aggregate(
        put(state([1.0, 1.0], 0), device, dtype),
        replies([state([1.2, 0.8], 10), state([0.9, 1.1], 21)], counts, device, dtype),
    ).state
    counter = result[NBT]
    assert counter.dtype == torch.int64 and counter.shape == () and int(counter) == 21
    assert NBT not in aggregator.state_dict().get("reference", {})


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8, torch.int64])
def test_other_integer_entries_keep_type_and_exact_value(
    kind: torch.dtype, device: torch.device, dtype: torch.dtype
) -> None:
    """The same for a counter of another name and width, beyond what a float32 holds exactly.

    https://github.com/NVIDIA/NVFlare/issues/156
    """
    big = torch.iinfo(kind).max
    clients: list[dict[str, Any]] = [
        {"w": [1.0, 0.0], "steps": torch.tensor([big, 3], dtype=kind)},
        {"w": [0.0, 1.0], "steps": torch.tensor([big - 1, 5], dtype=kind)},
    ]
    start = put({"w": [0.0, 0.0], "steps": torch.tensor([0, 0], dtype=kind)}, device, dtype)
    result = rule(device).aggregate(start, replies(clients, [1, 1], device, dtype)).state
    assert result["steps"].dtype == kind and result["steps"].tolist() == [big, 5]


def test_a_counter_loads_into_the_module_again(device: torch.device, dtype: torch.dtype) -> None:
    """An averaged state must load strictly: shape () and int64 for the counter.

    https://github.com/TsingZ0/PFLlib/pull/269
    """
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).to(device, dtype)
    start = model.state_dict()
    clients = []
    for index in range(2):
        local = {}
        for name, value in start.items():
            if value.is_floating_point():
                noise = torch.rand(value.shape, generator=generator).to(value)
                local[name] = value + noise
            else:
                local[name] = torch.full_like(value, 7 + index)
        clients.append(local)
    result = rule(device).aggregate(start, replies(clients, [1, 1], device, dtype)).state
    model.load_state_dict(result, strict=True)
    assert int(model.state_dict()["1.num_batches_tracked"]) == 8


# One round of two clients whose variance shrinks, after a step that shrank it too.
VARIANCE: dict[str, Any] = {
    "bn.weight": [1.0, 1.0],
    "bn.bias": [0.0, 0.0],
    "bn.running_mean": [0.0, 0.0],
    "bn.running_var": [1.0, 0.5],
    NBT: torch.tensor(5),
}
SHRINKING: list[dict[str, Any]] = [
    {
        **VARIANCE,
        "bn.weight": [1.1, 0.9],
        "bn.running_mean": [0.2, 0.1],
        "bn.running_var": [0.20, 0.01],
    },
    {
        **VARIANCE,
        "bn.weight": [0.9, 1.2],
        "bn.running_mean": [0.4, 0.3],
        "bn.running_var": [0.10, 0.02],
    },
]
PREVIOUS: dict[str, Any] = {
    "bn.weight": [0.05, -0.02],
    "bn.bias": [0.0, 0.0],
    "bn.running_mean": [0.3, 0.2],
    "bn.running_var": [-0.9, -0.49],
}


@pytest.mark.parametrize("keys", [["bn.weight", "bn.bias"], list(PREVIOUS)])
def test_running_variance_is_not_extrapolated(
    keys: list[str], device: torch.device, dtype: torch.dtype
) -> None:
    """A rule with memory makes running_var negative, and evaluation NaN.

    https://github.com/VectorInstitute/FL4Health/pull/39
    https://github.com/flwrlabs/flower/issues/1060
    https://github.com/NVIDIA/NVFlare/issues/1718
    https://github.com/tum-pbs/CRAFT/blob/98d465bea3866a7f76c3f277bd4339a3f7a65261/fed/craft.py

    The previous update is given with and without the buffers that the published code keeps in it.
    """
    previous = put({key: PREVIOUS[key] for key in keys}, device, dtype)
    aggregator = with_previous(device, previous)
    start = put(VARIANCE, device, dtype)
    result = aggregator.aggregate(start, replies(SHRINKING, [50, 50], device, dtype)).state
    assert near(result["bn.running_mean"], [0.3, 0.2])
    assert near(result["bn.running_var"], [0.15, 0.015])
    # weight and bias are one group, of 4 coordinates
    wanted = after([1, 1, 0, 0], [[1.1, 0.9, 0, 0], [0.9, 1.2, 0, 0]], [1, 1], [0.05, -0.02, 0, 0])
    # (the clients' differences of 0.1 are good to 1e-6 only, as float32)
    assert near(torch.cat([result["bn.weight"], result["bn.bias"]]), wanted, atol=2e-5)
    norm = nn.BatchNorm1d(2).to(device, dtype).eval()
    norm.load_state_dict({name.removeprefix("bn."): value for name, value in result.items()})
    assert bool(norm(torch.ones(1, 2, dtype=dtype, device=device)).isfinite().all())


def test_the_stored_previous_update_holds_no_buffers(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Nor after a previous update with buffers was loaded, as the published code has them.

    https://github.com/tum-pbs/CRAFT/blob/98d465bea3866a7f76c3f277bd4339a3f7a65261/fed/craft.py
    """
    aggregator = with_previous(device, put(PREVIOUS, device, dtype))
    aggregator.aggregate(put(VARIANCE, device, dtype), replies(SHRINKING, [50, 50], device, dtype))
    assert sorted(aggregator.state_dict()["reference"]) == ["bn.bias", "bn.weight"]


@pytest.mark.parametrize("options", [{}, {"reference": "ema"}, {"scale": "steady"}])
def test_buffers_stay_weighted_means_over_many_rounds(
    options: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> None:
    """No cross-round state reaches a buffer, under any option.

    https://github.com/flwrlabs/flower/issues/1060
    """
    aggregator = rule(device, **options)
    state = put(VARIANCE, device, dtype)
    for _ in range(4):
        state = aggregator.aggregate(state, replies(SHRINKING, [30, 10], device, dtype)).state
        assert near(state["bn.running_mean"], [0.25, 0.15])
        assert near(state["bn.running_var"], [0.175, 0.0125])
    assert sorted(aggregator.state_dict()["reference"]) == ["bn.bias", "bn.weight"]


@pytest.mark.parametrize("other", [[True, False, True], [True, True, False]])
def test_a_boolean_mask_is_not_subtracted(
    other: list[bool], device: torch.device, dtype: torch.dtype
) -> None:
    """Torch refuses to subtract bool tensors.

    https://github.com/lucidrains/DALLE2-pytorch/issues/161

    Where clients disagree DESIGN.md keeps the global's, without a warning.
    """
    mask = torch.tensor([True, False, True])
    clients: list[dict[str, Any]] = [
        {"w": [1.5, 2.0, 3.0], "mask": mask},
        {"w": [1.0, 2.0, 4.0], "mask": torch.tensor(other)},
    ]
    start = put({"w": [1.0, 2.0, 3.0], "mask": mask}, device, dtype)
    for aggregator in _rules(device):
        result = aggregator.aggregate(start, replies(clients, [1, 1], device, dtype)).state
        assert result["mask"].dtype == torch.bool and result["mask"].tolist() == [True, False, True]
        assert result["mask"].data_ptr() != start["mask"].data_ptr()


class Tagged(nn.Linear):
    """A module whose state dict holds an entry that is no tensor."""

    def __init__(self, tag: Any) -> None:
        super().__init__(2, 1)
        self.tag = tag

    def get_extra_state(self) -> Any:
        return self.tag

    def set_extra_state(self, state: Any) -> None:
        self.tag = state


@pytest.mark.parametrize("server", [{"tag": "server"}, None, "a string"])
def test_extra_state_passes_through(server: Any, device: torch.device, dtype: torch.dtype) -> None:
    """get_extra_state puts a dict (or anything) in the state, on which arithmetic falls over.

    https://github.com/pytorch/pytorch/issues/122946
    https://github.com/NVIDIA/TransformerEngine/issues/1860
    """

    def make(tag: Any, value: float) -> dict[str, Any]:
        module = Tagged(tag).to(device, dtype)
        with torch.no_grad():
            module.weight.fill_(value)
            module.bias.fill_(value)
        return dict(module.state_dict())

    start = make(server, 0.0)
    clients = [make({"tag": "a"}, 1.0), make({"tag": "b"}, 1.0)]
    result = rule(device).aggregate(start, replies(clients, [4, 4], device, dtype)).state
    assert list(result) == list(start)
    assert result["_extra_state"] == server
    if isinstance(server, dict):
        assert result["_extra_state"] is not start["_extra_state"]
    wanted = after([0, 0, 0], [[1, 1, 1], [1, 1, 1]], [4, 4])
    assert near(torch.cat([result["weight"].reshape(-1), result["bias"]]), wanted)
    model = Tagged("old")
    model.load_state_dict(result, strict=True)
    assert model.tag == server
