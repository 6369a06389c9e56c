"""Flower's own ``Strategy.start`` around the rule, with a grid whose nodes answer at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from craft_adapters import ClientUpdate, get_aggregator
from craft_adapters.errors import (
    IncompatibleUpdate,
    NoUsableUpdates,
    OptionError,
    UnsupportedSetup,
)

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")

from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from craft_adapters.flower import CraftStrategy, wrap

NODES = (11, 12, 13)
START = {
    "body.weight": torch.tensor([[1.0, -1.0], [0.5, 2.0]]),
    "norm.running_mean": torch.zeros(2),
    "norm.num_batches_tracked": torch.tensor(3),
}


@pytest.fixture(autouse=True)
def _in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages can be made inside a run only; these are private names of Flower."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def trained(node: int, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "body.weight": state["body.weight"] + 0.1 * node * torch.tensor([[1.0, 2.0], [-1.0, 0.5]]),
        "norm.running_mean": state["norm.running_mean"] + node,
        "norm.num_batches_tracked": state["norm.num_batches_tracked"] + node,
    }


class Nodes:
    """A grid."""

    def __init__(self, failing: tuple[int, ...] = (), **metrics: float) -> None:
        self.failing = failing
        self.metrics = {"num-examples": 10, "accuracy": 0.5, **metrics}
        self.received: list[dict[str, torch.Tensor]] = []

    def get_node_ids(self) -> Iterable[int]:
        return NODES

    def send_and_receive(self, messages: Iterable[Message], **_: Any) -> list[Message]:
        return [self.answer(message) for message in messages]

    def answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if node in self.failing:
            return Message(Error(code=0, reason="out of battery"), reply_to=message)
        state = message.content["arrays"].to_torch_state_dict()
        self.received.append(state)
        answer = RecordDict({"metrics": MetricRecord(dict(self.metrics))})
        if message.metadata.message_type == "train":
            answer["arrays"] = ArrayRecord(torch_state_dict=trained(node, state))
        return Message(answer, reply_to=message)


def alone(rule: str, rounds: int, nodes: tuple[int, ...] = NODES, **options: Any) -> Any:
    """What the rule itself says."""
    aggregator, state = get_aggregator(rule, **options), START
    for number in range(rounds):
        updates = [ClientUpdate(node, 10, trained(node, state)) for node in nodes]
        state = aggregator.aggregate(state, updates, round=number).state
    return state


def start(strategy: Any, grid: Nodes, rounds: int = 2) -> Any:
    return strategy.start(grid, ArrayRecord(torch_state_dict=dict(START)), num_rounds=rounds)


def equal(arrays: Any, state: dict[str, torch.Tensor]) -> bool:
    found = arrays.to_torch_state_dict()
    return found.keys() == state.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value)
        for name, value in state.items()
    )


def test_a_run_is_what_the_rule_says_and_metrics_stay() -> None:
    result = start(wrap(FedAvg(), "craft", server_lr=0.1), Nodes())
    assert equal(result.arrays, alone("craft", 2, server_lr=0.1))
    assert result.arrays["norm.num_batches_tracked"].dtype == "int64"
    assert result.train_metrics_clientapp[2]["accuracy"] == 0.5
    assert result.evaluate_metrics_clientapp[2]["accuracy"] == 0.5
    again = start(CraftStrategy(rule_options={"server_lr": 0.1}), Nodes())
    assert equal(again.arrays, alone("craft", 2, server_lr=0.1))


def test_failed_replies_are_left_out() -> None:
    result = start(wrap(FedAvg(), "fedavg"), Nodes(failing=(12,)))
    assert equal(result.arrays, alone("fedavg", 2, nodes=(11, 13)))


def test_a_round_of_failures_keeps_the_model_or_stops() -> None:
    result = start(wrap(FedAvg(fraction_evaluate=0.0), "fedavg"), Nodes(failing=NODES), rounds=1)
    assert result.train_metrics_clientapp == {}
    with pytest.raises(NoUsableUpdates):
        start(wrap(FedAvg(), "fedavg", on_empty_round="raise"), Nodes(failing=NODES))


def test_sampling_and_attributes_are_the_strategys() -> None:
    grid = Nodes()
    strategy = wrap(FedAvg(fraction_train=0.67, fraction_evaluate=0.0, weighted_by_key="n"))
    assert strategy.weighted_by_key == "n"  # type: ignore[attr-defined]
    with pytest.raises(IncompatibleUpdate, match="'n' is needed"):
        start(strategy, grid, rounds=1)
    assert len(grid.received) == 2


def test_state_is_saved_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "rule.safetensors"
    first = start(wrap(FedAvg(), "craft", state_path=path), Nodes(), rounds=1)
    second = wrap(FedAvg(), "craft", state_path=path).start(Nodes(), first.arrays, num_rounds=1)
    assert equal(second.arrays, alone("craft", 2))


def test_what_a_rule_needs() -> None:
    with pytest.raises(UnsupportedSetup, match=r"needs local_steps from every client.*steps_key"):
        wrap(FedAvg(), "fednova")
    result = start(wrap(FedAvg(), "fednova", steps_key="steps"), Nodes(steps=4), rounds=1)
    assert result.arrays is not None
    with pytest.raises(IncompatibleUpdate, match="'steps' is needed"):
        start(wrap(FedAvg(), "fednova", steps_key="steps"), Nodes(), rounds=1)


def test_refusals() -> None:
    with pytest.raises(OptionError, match="the rule is an object"):
        wrap(FedAvg(), get_aggregator("craft"), server_lr=1.0)
    with pytest.raises(OptionError, match="on_empty_round must be"):
        wrap(FedAvg(), on_empty_round="stop")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedSetup, match="before configure_train"):
        wrap(FedAvg()).aggregate_train(1, [])
