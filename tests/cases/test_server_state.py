"""Sharing of memory, mixed devices, and what the server carries from round to round."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from craft_adapters import Aggregator, CheckpointError, ClientUpdate
from craft_adapters.aggregators import Craft, FedAvg
from craft_adapters.aggregators.craft import AgreementWarning

from .oracle import Vector, after, near, numbers, put, replies, rule, same_bits, step, with_previous


def _places(state: Mapping[str, Any]) -> set[int]:
    return {
        value.untyped_storage().data_ptr() for value in state.values() if isinstance(value, Tensor)
    }


@pytest.mark.parametrize("which", ["craft", "fedavg"])
@pytest.mark.parametrize("kind", ["state", "update"])
def test_the_first_clients_dict_is_not_the_accumulator(
    which: str, kind: Any, device: torch.device, dtype: torch.dtype
) -> None:
    """The accumulator starts as the first client's dict, whose weights are overwritten.

    https://github.com/OpenMined/PySyft/issues/3613
    https://github.com/FedML-AI/FedML/blob/2e5bdf8dcb88dd29b62715e8d906fb9ce5de5f08/python/fedml/ml/aggregator/agg_operator.py
    """
    sign = 1.0 if kind == "state" else -1.0
    counter = torch.tensor(3)
    states = [
        put({"w": w, "bn.running_mean": [1.0], "n": counter}, device, dtype)
        for w in ([0.0, 0.0], [sign, 0.0], [0.0, 3.0 * sign])
    ]
    start, *clients = states
    before = [{name: value.clone() for name, value in state.items()} for state in states]
    objects = [[id(value) for value in state.values()] for state in states]

    def make() -> Aggregator:
        return rule(device) if which == "craft" else FedAvg(device=device)

    updates = [ClientUpdate(i, 1, client, kind) for i, client in enumerate(clients)]
    aggregator = make()
    result = aggregator.aggregate(start, updates)
    assert near(result.state["w"], [0.5, 0.5] if which == "craft" else [0.5, 1.5])
    for state, copied, ids in zip(states, before, objects, strict=True):
        assert same_bits(state, copied)
        assert [id(value) for value in state.values()] == ids
    again = make().aggregate(start, updates)
    assert same_bits(again.state, result.state)
    # The same rule once more, with what it remembers now: the inputs are still as they were.
    aggregator.aggregate(start, updates)
    for state, copied in zip(states, before, strict=True):
        assert same_bits(state, copied)


def test_the_broadcast_state_is_no_live_reference(device: torch.device, dtype: torch.dtype) -> None:
    """Clients trained one after another start from each other's weights.

    https://github.com/alibaba/FederatedScope/issues/664
    https://github.com/litian96/FedProx/issues/36
    https://github.com/AshwinRJ/Federated-Learning-PyTorch/issues/41
    """
    aggregator = rule(device)
    start = put({"w": [1.0]}, device, dtype)
    models = []
    for delta in (1.0, 2.0, -1.0):
        model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros_like(start["w"]))})
        model.load_state_dict(start)
        with torch.no_grad():
            model["w"].add_(delta)
        models.append(model)
    clients = [model.state_dict() for model in models]
    assert [float(client["w"]) for client in clients] == [2.0, 3.0, 0.0]
    updates = ClientUpdate.join(clients, [1, 1, 1])
    result = aggregator.aggregate(start, updates).state
    assert near(result["w"], [1.1111111])
    average = FedAvg(device=device).aggregate(start, updates).state
    assert near(average["w"], [1.6666667])
    assert near(start["w"], [1.0])

    remembered = aggregator.state_dict()["reference"]
    given = _places(start).union(*(_places(client) for client in clients))
    assert _places(result).isdisjoint(given | _places(remembered))
    assert _places(remembered).isdisjoint(given)
    # Whatever is done to the result, or to a saved state, does not reach the rule.
    result["w"].fill_(1e9)
    remembered["w"].fill_(1e9)
    assert near(aggregator.state_dict()["reference"]["w"], [-1 / 9])


def test_entries_that_are_not_computed_are_copies_too(
    device: torch.device, dtype: torch.dtype
) -> None:
    """The same for entries that only pass through: masks, empty, frozen and unsent ones.

    https://github.com/litian96/FedProx/issues/36
    """
    start = put(
        {
            "w": [1.0],
            "frozen": [2.0],
            "unsent": [3.0],
            "mask": torch.tensor([True]),
            "steps": torch.tensor([4]),
            "bn.running_mean": [5.0],
        },
        device,
        dtype,
    )
    sent = {name: value for name, value in start.items() if name != "unsent"}
    updates = [ClientUpdate(i, 1, {**sent, "w": sent["w"] + i + 1}) for i in range(2)]
    result = rule(device).aggregate(start, updates).state
    assert len(_places(result)) == len(start)
    assert _places(result).isdisjoint(_places(start))


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_clients_on_several_devices(where: str, device: torch.device, dtype: torch.dtype) -> None:
    """Some clients send CUDA tensors, others CPU tensors, and the server is on the CPU.

    https://github.com/FedML-AI/FedML/issues/779
    https://github.com/securefederatedai/openfederatedlearning/issues/298
    https://github.com/KarhouTam/FL-bench/issues/172

    Meaningful with CRAFT_TEST_DEVICE=cuda.
    """
    cpu = torch.device("cpu")
    compute = cpu if where == "cpu" else device
    start = put({"w": [0.0, 0.0], "n": torch.tensor(0)}, cpu, dtype)
    values: dict[str, Any] = {"w": [0.6, 0.8], "n": torch.tensor(3)}
    far, mixed = put(values, device, dtype), put(values, cpu, dtype)
    mixed["n"] = mixed["n"].to(device)
    for previous, wanted in [
        ([0.1, 0.1], [0.18686291501015295, 0.4848528137423862]),
        ([0.0, 0.0], [0.3, 0.4]),
    ]:
        aggregator = with_previous(compute, put({"w": previous}, device, dtype))
        result = aggregator.aggregate(start, [ClientUpdate(0, 1, far), ClientUpdate(1, 1, mixed)])
        assert near(result.state["w"], wanted, atol=1e-5)
        assert near(result.state["w"], after([0, 0], [[0.6, 0.8]] * 2, [1, 1], previous), 1e-5)
        assert int(result.state["n"]) == 3
        assert {value.device.type for value in result.state.values()} == {"cpu"}
        local = put(values, cpu, dtype)
        on_cpu = with_previous(cpu, put({"w": previous}, cpu, dtype)).aggregate(
            start, [ClientUpdate(0, 1, local), ClientUpdate(1, 1, local)]
        )
        assert near(result.state["w"], numbers(on_cpu.state["w"]), atol=1e-5)
    assert far["w"].device.type == device.type and mixed["w"].device.type == "cpu"
    assert near(far["w"], [0.6, 0.8]) and near(mixed["w"], [0.6, 0.8])


def test_a_global_model_on_several_devices(device: torch.device, dtype: torch.dtype) -> None:
    """The same the other way round: each entry comes back where the global model has it.

    https://github.com/KarhouTam/FL-bench/issues/172
    """
    cpu = torch.device("cpu")
    start = {
        "fc.weight": torch.zeros(2, dtype=dtype, device=device),
        "fc.bias": torch.zeros(1, dtype=dtype),
    }
    clients: list[dict[str, Any]] = [{"fc.weight": [0.6, 0.0], "fc.bias": [0.8]}] * 2
    result = rule(device).aggregate(start, replies(clients, [1, 1], cpu, dtype)).state
    assert near(result["fc.weight"], [0.3, 0.0]) and near(result["fc.bias"], [0.4])
    assert result["fc.weight"].device.type == device.type
    assert result["fc.bias"].device.type == "cpu"


def test_a_state_written_on_one_device_loads_on_another(
    device: torch.device, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A checkpoint written on CUDA loads on a server that has a CPU only.

    https://github.com/securefederatedai/openfederatedlearning/issues/298
    """
    cpu = torch.device("cpu")
    clients: list[dict[str, Any]] = [{"w": [0.6, 0.8]}, {"w": [0.8, -0.6]}]
    there = rule(device)
    start = put({"w": [0.0, 0.0]}, device, dtype)
    state = there.aggregate(start, replies(clients, [1, 2], device, dtype)).state
    there.save(tmp_path / "state")
    here = rule(cpu)
    here.load(tmp_path / "state")
    assert here.state_dict()["reference"]["w"].device.type == "cpu"
    wanted = there.aggregate(state, replies(clients[:1], [1], device, dtype)).state
    got = here.aggregate(
        {name: value.cpu() for name, value in state.items()},
        replies(clients[:1], [1], cpu, dtype),
    ).state
    assert near(got["w"], numbers(wanted["w"]), atol=1e-5)


def _deltas() -> list[list[dict[str, Tensor]]]:
    """Four rounds of three clients, relative to the current global model."""
    generator = torch.Generator().manual_seed(11)
    return [
        [
            {"w": torch.randn(6, generator=generator), "b": torch.randn(2, generator=generator)}
            for _ in range(3)
        ]
        for _ in range(4)
    ]


def play(aggregator: Aggregator, state: dict[str, Any], rounds: range) -> tuple[Any, list[int]]:
    """Some of the four rounds; the model after them, and the numbers that the reports gave."""
    played = []
    for number in rounds:
        clients = [
            {name: state[name] + delta.to(state[name]) for name, delta in client.items()}
            for client in _deltas()[number]
        ]
        result = aggregator.aggregate(state, ClientUpdate.join(clients, [4, 5, 6]))
        state = result.state
        played.append(result.report.round)
    return state, played


def _by_oracle(forget_after: int | None = None) -> dict[str, Vector]:
    final = {}
    for name, width in (("w", 6), ("b", 2)):
        theta, previous = np.zeros(width), np.zeros(width)
        for number, clients in enumerate(_deltas()):
            if number == forget_after:
                previous = np.zeros(width)
            previous = step([-numbers(client[name]) for client in clients], [4, 5, 6], previous)
            theta = theta - previous
        final[name] = theta
    return final


# What a fresh process runs: resume, play the rest, write the model.
RESUME = """
import sys
import torch
from safetensors.torch import load_file, save_file
from tests.cases.oracle import rule
from tests.cases.test_server_state import play

folder, device = sys.argv[1], torch.device(sys.argv[2])
aggregator = rule(device)
aggregator.load(folder + "/rule")
state = {name: value.to(device) for name, value in load_file(folder + "/model").items()}
final, played = play(aggregator, {"w": state["w"], "b": state["b"]}, range(2, 4))
assert played == [2, 3], played
save_file({name: value.cpu() for name, value in final.items()}, folder + "/final")
"""


def test_a_restart_in_a_fresh_process_takes_the_same_path(
    device: torch.device, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Only the model is saved: the resumed run has no previous update, and goes elsewhere.

    https://github.com/flwrlabs/flower/issues/599
    https://github.com/NVIDIA/NVFlare/issues/242
    https://github.com/VectorInstitute/FL4Health/pull/298
    https://github.com/tum-pbs/CRAFT/blob/98d465bea3866a7f76c3f277bd4339a3f7a65261/fed/craft.py
    """
    start = put({"w": [0.0] * 6, "b": [0.0] * 2}, device, dtype)
    whole, _ = play(rule(device), start, range(4))
    wanted = _by_oracle()
    listed = [
        -1.6240693518644123,
        -0.5643366616079847,
        -1.7729912543687993,
        0.18771030493651675,
        0.14183006070446427,
        -0.33527226829401435,
    ]
    assert near(whole["w"], listed, 1e-5) and near(whole["w"], wanted["w"], 1e-5)
    assert near(whole["b"], [0.6138055939504113, -0.2891405676308666], 1e-5)
    assert near(whole["b"], wanted["b"], 1e-5)

    aggregator = rule(device)
    half, _ = play(aggregator, start, range(2))
    aggregator.save(tmp_path / "rule")
    save_file({name: value.cpu() for name, value in half.items()}, tmp_path / "model")
    subprocess.run(
        [sys.executable, "-c", RESUME, str(tmp_path), str(device)],
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        timeout=120,
    )
    resumed = load_file(tmp_path / "final")
    assert same_bits({name: resumed[name] for name in whole}, whole)

    # What the loss of the state would have given: the test can tell the two apart.
    lost, _ = play(rule(device), half, range(2, 4))
    assert near(lost["w"], _by_oracle(forget_after=2)["w"], 1e-5)
    assert not near(lost["w"], listed, 0.1)


def test_a_checkpoint_without_the_rules_state_is_refused(
    device: torch.device, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Never silently started cold: no file, the model's file, another rule's file.

    https://github.com/NVIDIA/NVFlare/issues/242
    """
    aggregator = rule(device)
    start = put({"w": [0.0] * 6, "b": [0.0] * 2}, device, dtype)
    play(aggregator, start, range(1))
    before = aggregator.state_dict()
    save_file({name: value.cpu() for name, value in start.items()}, tmp_path / "model")
    FedAvg().save(tmp_path / "fedavg")
    for name, reason in [("none", "not a readable"), ("model", "not a state"), ("fedavg", "craft")]:
        with pytest.raises(CheckpointError, match=reason) as caught:
            aggregator.load(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
    assert aggregator.state_dict()["round"] == before["round"] == 1
    assert same_bits(aggregator.state_dict()["reference"], before["reference"])


@pytest.mark.parametrize("stop", [0, 1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"reference": "ema"}, {"scale": "steady"}], ids=str)
def test_no_round_is_repeated_or_skipped_after_a_restart(
    stop: int, options: dict[str, Any], device: torch.device, dtype: torch.dtype, tmp_path: Path
) -> None:
    """After resume a round is repeated or skipped.

    https://github.com/FedML-AI/FedML/pull/659
    https://github.com/unit8co/darts/issues/2463
    https://github.com/karpathy/nanoGPT/issues/467
    https://github.com/NVIDIA/NVFlare/pull/4948

    Here: the round counter and the rule's state. That metric rows come once each, that clients are
    drawn from the same random stream and that a finished run does nothing is left for the training
    engine, which does not exist yet. The rule itself draws no random numbers (asserted).
    """
    start = put({"w": [0.0] * 6, "b": [0.0] * 2}, device, dtype)
    drawn = torch.random.get_rng_state()
    whole, numbers_whole = play(rule(device, **options), start, range(4))
    assert torch.equal(torch.random.get_rng_state(), drawn)
    first = rule(device, **options)
    half, before = play(first, start, range(stop))
    first.save(tmp_path / "rule")
    second = rule(device, **options)
    second.load(tmp_path / "rule")
    resumed, later = play(second, half, range(stop, 4))
    assert before + later == numbers_whole == [0, 1, 2, 3]
    assert same_bits(resumed, whole)
    assert second.state_dict()["round"] == 4


def test_a_round_that_failed_does_not_count(device: torch.device, dtype: torch.dtype) -> None:
    """The counter goes on from rounds that succeeded, and from the number a host gives.

    https://github.com/FedML-AI/FedML/pull/659
    """
    aggregator = rule(device)
    start = put({"w": [0.0]}, device, dtype)
    good = replies([{"w": [1.0]}], [1], device, dtype)
    assert aggregator.aggregate(start, good).report.round == 0
    with pytest.raises(ValueError, match="zero"):
        aggregator.aggregate(start, replies([{"w": [1.0]}], [0], device, dtype))
    assert aggregator.aggregate(start, good).report.round == 1
    assert aggregator.aggregate(start, good, round=7).report.round == 7
    assert aggregator.aggregate(start, good).report.round == 8


ROUNDS: list[dict[str, tuple[list[float], int]]] = [
    {"a": ([0.6, 0.8], 10), "b": ([0.6, 0.8], 10)},
    {"b": ([0.8, 0.6], 10), "c": ([0.8, 0.6], 10)},
    {"a": ([1.0, 0.0], 10)},
    {"d": ([0.0, 1.0], 10), "c": ([0.0, 1.0], 10), "a": ([0.0, 1.0], 10)},
]


@pytest.mark.parametrize("names", ["abcd", "dcba"])
def test_the_clients_change_from_round_to_round(
    names: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Per-client state meets an id it has never seen, or forgets one that was away.

    https://github.com/NVIDIA/NVFlare/pull/5014
    https://github.com/TsingZ0/PFLlib/issues/214
    https://github.com/Xtra-Computing/NIID-Bench/issues/12

    In round 3 one client is alone. The case takes its raw update there, DESIGN.md the formula: what
    of the previous step is orthogonal to it stays. So the case's numbers hold for two rounds.
    """
    listed = [[0.3, 0.4], [0.532, 0.924]]
    aggregator = rule(device)
    state = put({"w": [0.0, 0.0]}, device, dtype)
    theta, previous = np.zeros(2), np.zeros(2)
    for number, clients in enumerate(ROUNDS):
        updates = [
            ClientUpdate(
                dict(zip("abcd", names, strict=True))[client],
                count,
                {"w": state["w"] + torch.tensor(delta, dtype=dtype, device=device)},
            )
            for client, (delta, count) in clients.items()
        ]
        state = aggregator.aggregate(state, updates).state
        rows = [[-x for x in delta] for delta, _ in clients.values()]
        previous = step(rows, [count for _, count in clients.values()], previous)
        theta = theta - previous
        assert near(state["w"], theta)
        if number < 2:
            assert near(state["w"], listed[number])
    # Keyed by parameter only.
    assert sorted(aggregator.state_dict()["reference"]) == ["w"]


def test_the_difference_is_taken_from_the_state_of_this_call(
    device: torch.device, dtype: torch.dtype
) -> None:
    """A cached global model is subtracted, but the clients trained from another one.

    https://github.com/flwrlabs/flower/pull/7757
    https://github.com/londonaicentre/FLIP/pull/983
    """
    sent = put({"w": [1.0, 1.0]}, device, dtype)
    updates = replies([{"w": [1.6, 1.8]}, {"w": [1.6, 1.8]}], [1, 1], device, dtype)
    assert near(rule(device).aggregate(sent, updates).state["w"], [1.3, 1.4])

    # A rule that has just made another model: what it remembers is a direction only. Its last step
    # was parallel to this one and is projected out.
    used = rule(device)
    cached = used.aggregate(
        put({"w": [0.0, 0.0]}, device, dtype),
        replies([{"w": [0.6, 0.8]}], [1], device, dtype),
    ).state
    assert near(cached["w"], [0.6, 0.8])
    assert near(used.aggregate(sent, updates).state["w"], [1.3, 1.4])


@pytest.mark.parametrize("which", ["craft", "fedavg"])
def test_the_global_model_was_changed_between_rounds(
    which: str, device: torch.device, dtype: torch.dtype
) -> None:
    """The same with noise added in place to the state that the rule itself returned.

    https://github.com/londonaicentre/FLIP/pull/983
    """
    aggregator: Craft | FedAvg = rule(device) if which == "craft" else FedAvg(device=device)
    start = put({"w": [0.0, 0.0], "bn.running_mean": [0.0]}, device, dtype)
    first: list[dict[str, Any]] = [{"w": [1.0, 0.0], "bn.running_mean": [1.0]}]
    state = aggregator.aggregate(start, replies(first, [1], device, dtype)).state
    state["w"].add_(10.0)
    state["bn.running_mean"].add_(10.0)
    second: list[dict[str, Any]] = [{"w": [11.0, 12.0], "bn.running_mean": [13.0]}]
    result = aggregator.aggregate(state, replies(second, [1], device, dtype)).state
    assert near(result["bn.running_mean"], [13.0])
    if which == "craft":
        assert near(result["w"], after([11, 10], [[11, 12]], [1], [-1, 0]))
    else:
        assert near(result["w"], [11.0, 12.0])


def test_a_warning_that_is_an_error_leaves_the_rule_as_it_was(
    device: torch.device, dtype: torch.dtype
) -> None:
    """A round that fails at its very end must leave no partial effect either.

    https://github.com/NVIDIA/NVFlare/issues/5293

    With ``-W error`` the AgreementWarning of the third round makes aggregate raise.
    """
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(1000, generator=generator)
    deltas = [base + 0.1 * torch.randn(1000, generator=generator) for _ in range(9)]
    aggregator = rule(device)
    state = {"w": torch.zeros(1000, dtype=dtype, device=device)}
    before = aggregator.state_dict()
    raised = 0
    for _ in range(4):
        updates = [
            ClientUpdate(i, 1, {"w": state["w"] + delta.to(state["w"])})
            for i, delta in enumerate(deltas)
        ]
        try:
            state = aggregator.aggregate(state, updates).state
        except AgreementWarning:
            raised += 1
            kept = aggregator.state_dict()
            assert (kept["round"], kept["agreeing"]) == (before["round"], before["agreeing"])
            assert same_bits(kept["reference"], before["reference"])
        before = aggregator.state_dict()
    assert raised > 0
