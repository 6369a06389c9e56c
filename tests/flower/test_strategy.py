"""Flower's own ``Strategy.start`` around the rule, with a grid whose nodes answer at once."""

from __future__ import annotations

import copy
import doctest
import importlib
import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from craft_adapters import ClientUpdate, Layout, get_aggregator
from craft_adapters.errors import (
    CheckpointError,
    IncompatibleUpdate,
    NoUsableUpdates,
    OptionError,
    UnsupportedSetup,
)

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")

from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedXgbBagging,
    Strategy,
)

from craft_adapters.flower import CraftStrategy, wrap
from craft_adapters.flower._arrays import Decoded

NODES = (11, 12, 13)
START = {
    "body.weight": torch.tensor([[1.0, -1.0], [0.5, 2.0]]),
    "norm.running_mean": torch.zeros(2),
    "norm.num_batches_tracked": torch.tensor(3),
}


def trained(node: int, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weight = state["body.weight"]
    # Another step in each round: after equal rounds the rule's memory would change nothing.
    step = torch.sin(node * torch.arange(1.0, 5.0).view(2, 2) + 5 * weight[0, 0])
    return {
        "body.weight": weight + step,
        "norm.running_mean": state["norm.running_mean"] + node,
        "norm.num_batches_tracked": state["norm.num_batches_tracked"] + node,
    }


class Nodes:
    """A grid. Answers hold ``metrics``; ``odd`` are those of the last node."""

    def __init__(
        self, failing: tuple[int, ...] = (), odd: dict[str, Any] | None = None, **metrics: Any
    ) -> None:
        self.failing = failing
        self.metrics = {"num-examples": 10, "accuracy": 0.5, **metrics}
        self.odd = self.metrics if odd is None else odd
        self.received: list[dict[str, torch.Tensor]] = []

    def get_node_ids(self) -> Iterable[int]:
        return NODES

    def send_and_receive(self, messages: Iterable[Message], **_: Any) -> list[Message]:
        return [self.answer(message) for message in messages]

    def answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if node in self.failing:
            return Message(Error(code=0, reason="out of battery"), reply_to=message)
        metrics = self.odd if node == NODES[-1] else self.metrics
        answer = RecordDict({"metrics": MetricRecord(dict(metrics))})
        if message.metadata.message_type == "train":
            answer["arrays"] = self.train(node, message.content["arrays"])
        return Message(answer, reply_to=message)

    def train(self, node: int, arrays: ArrayRecord) -> ArrayRecord:
        state = arrays.to_torch_state_dict()
        self.received.append(state)
        return ArrayRecord(torch_state_dict=trained(node, state))


class Unnamed(Nodes):
    """Clients that send plain lists, the last of them without its last ``cut`` arrays."""

    def __init__(self, cut: int = 0, names: bool = False) -> None:
        super().__init__()
        self.cut, self.names = cut, names

    def train(self, node: int, arrays: ArrayRecord) -> ArrayRecord:
        state = dict(zip(START, map(torch.from_numpy, arrays.to_numpy_ndarrays()), strict=True))
        answer = trained(node, state)
        if self.names:
            return ArrayRecord(torch_state_dict=answer)
        count = len(answer) - self.cut * (node == NODES[-1])
        return ArrayRecord([each.numpy() for each in answer.values()][:count])


def alone(rule: str, rounds: int, nodes: tuple[int, ...] = NODES, **options: Any) -> Any:
    """What the rule itself says."""
    aggregator, state = get_aggregator(rule, **options), START
    for number in range(rounds):
        # Read one by one, as the adapter does: the rule rounds otherwise than with all in memory.
        answers = {node: Decoded(trained(node, state), torch.Tensor.numpy) for node in nodes}
        updates = [ClientUpdate(node, 10, answer) for node, answer in answers.items()]
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
    again = start(CraftStrategy(server_lr=0.1), Nodes())
    assert equal(again.arrays, alone("craft", 2, server_lr=0.1))


def test_failed_replies_are_left_out_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    result = start(wrap(FedAvg(), "fedavg"), Nodes(failing=(12,)))
    assert equal(result.arrays, alone("fedavg", 2, nodes=(11, 13)))
    for number in (1, 2):
        assert f"fedavg: round {number}: client 12 left out: out of battery" in caplog.messages


def test_a_client_that_the_rule_drops_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    odd = {"num-examples": 0, "accuracy": 0.5}
    result = start(wrap(FedAvg(), "fedavg"), Nodes(odd=odd), rounds=1)
    assert equal(result.arrays, alone("fedavg", 1, nodes=(11, 12)))
    assert "fedavg: round 1: client 13 left out: zero examples" in caplog.messages


def test_a_round_of_failures_keeps_the_model_or_stops(caplog: pytest.LogCaptureFixture) -> None:
    result = start(wrap(FedAvg(fraction_evaluate=0.0), "fedavg"), Nodes(failing=NODES), rounds=1)
    assert result.train_metrics_clientapp == {}
    assert any(m.endswith("the model stays as it is") for m in caplog.messages)
    with pytest.raises(NoUsableUpdates):
        start(wrap(FedAvg(), "fedavg", on_empty_round="raise"), Nodes(failing=NODES))


def test_sampling_and_attributes_are_the_strategys() -> None:
    grid = Nodes()
    own = FedAvg(fraction_train=0.67, fraction_evaluate=0.0, weighted_by_key="n")
    strategy = wrap(own)
    assert strategy.weighted_by_key == "n"
    assert isinstance(strategy, FedAvg)
    assert type(own) is FedAvg  # the one that was given is as it was
    with pytest.raises(IncompatibleUpdate, match=r"client 1[123].*'n' is needed"):
        start(strategy, grid, rounds=1)
    assert len(grid.received) == 2


def test_functions_for_metrics_are_the_strategys() -> None:
    def spread(replies: Sequence[RecordDict], key: str) -> MetricRecord:
        found = [reply["metrics"]["accuracy"] for reply in replies]
        return MetricRecord({"spread": max(found) - min(found), "replies": len(found)})

    odd = {"num-examples": 10, "accuracy": 0.75}
    own = FedAvg(train_metrics_aggr_fn=spread, evaluate_metrics_aggr_fn=spread)
    result = start(wrap(own, "fedavg"), Nodes(odd=odd), rounds=1)
    expected = {"spread": 0.25, "replies": 3}
    assert dict(result.train_metrics_clientapp[1]) == expected
    assert dict(result.evaluate_metrics_clientapp[1]) == expected


def test_metrics_that_only_some_report_are_refused() -> None:
    with pytest.raises(IncompatibleUpdate, match=r"client 1[123].*report the same from all"):
        start(wrap(FedAvg(), "fedavg"), Nodes(odd={"num-examples": 10}), rounds=1)


def test_an_aggregation_of_ones_own_runs_for_its_metrics(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            return ArrayRecord(), MetricRecord({"mine": server_round})

    result = start(wrap(Mine(), "fedavg"), Nodes())
    assert equal(result.arrays, alone("fedavg", 2))
    assert dict(result.train_metrics_clientapp[2]) == {"mine": 2}
    assert any("Mine.aggregate_train runs for its metrics only" in m for m in caplog.messages)


def test_a_class_of_ones_own_sees_the_rules_arrays() -> None:
    class Mine(CraftStrategy):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            self.seen = arrays
            return arrays, metrics

    strategy = Mine("fedavg", fraction_evaluate=0.0)
    result = start(strategy, Nodes())
    assert strategy.seen is result.arrays
    assert equal(result.arrays, alone("fedavg", 2))


def test_a_server_optimizer_in_the_strategy_is_not_a_second_step() -> None:
    assert equal(start(wrap(FedAdam(), "craft"), Nodes()).arrays, alone("craft", 2))


def test_state_is_saved_and_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "made" / "rule.safetensors"
    first = start(wrap(FedAvg(), "craft", state_path=path), Nodes(), rounds=1)
    second = wrap(FedAvg(), "craft", state_path=path).start(Nodes(), first.arrays, num_rounds=1)
    assert equal(second.arrays, alone("craft", 2))
    assert f"craft: resumed from {path}" in caplog.messages
    forgetful = wrap(FedAvg(), "craft").start(Nodes(), first.arrays, num_rounds=1)
    found = forgetful.arrays.to_torch_state_dict()["body.weight"]
    assert float((found - alone("craft", 2)["body.weight"]).abs().max()) > 0.01
    with pytest.raises(CheckpointError, match="rule 'craft', not 'fedavg'"):
        wrap(FedAvg(), "fedavg", state_path=path)


def test_a_copy_has_a_rule_of_its_own() -> None:
    strategy = wrap(FedAvg(), "craft")
    start(copy.deepcopy(strategy), Nodes())
    assert equal(start(strategy, Nodes()).arrays, alone("craft", 2))


def test_what_a_rule_needs() -> None:
    with pytest.raises(UnsupportedSetup, match=r"needs local_steps.*steps_key") as refused:
        wrap(FedAvg(), "fednova")
    would_run = str(refused.value).rpartition(": ")[2].split(", ")
    assert {"craft", "fedavg"} <= set(would_run) and not {"fednova", "afl"} & set(would_run)
    with pytest.raises(UnsupportedSetup, match=r"needs loss.*loss_key.*: .*fednova"):
        CraftStrategy("afl", steps_key="steps")
    result = start(wrap(FedAvg(), "fednova", steps_key="steps"), Nodes(steps=4), rounds=1)
    assert result.arrays is not None
    for metrics in ({}, {"steps": [4]}):
        with pytest.raises(IncompatibleUpdate, match="'steps' is needed as a number"):
            start(wrap(FedAvg(), "fednova", steps_key="steps"), Nodes(**metrics), rounds=1)


def test_arrays_without_names() -> None:
    arrays = ArrayRecord([each.numpy() for each in START.values()])
    grid = Unnamed()
    with pytest.raises(UnsupportedSetup, match=r"have no names.*names="):
        wrap(FedAvg()).start(grid, arrays, num_rounds=1)
    assert not grid.received  # said before anybody trains
    strategy = wrap(FedAvg(), "craft", names=START)
    result = strategy.start(grid, arrays, num_rounds=2)
    assert list(result.arrays) == ["0", "1", "2"]
    expected = alone("craft", 2).values()
    for found, value in zip(result.arrays.to_numpy_ndarrays(), expected, strict=True):
        assert found.dtype == value.numpy().dtype and (found == value.numpy()).all()
    with pytest.raises(IncompatibleUpdate, match="client 13: 2 arrays for the model's 3 entries"):
        wrap(FedAvg(), names=START).start(Unnamed(cut=1), arrays, num_rounds=1)
    with pytest.raises(IncompatibleUpdate, match=r"its arrays have names.*the model's have not"):
        wrap(FedAvg(), names=START).start(Unnamed(names=True), arrays, num_rounds=1)
    with pytest.raises(OptionError, match="2 names for the model's 3 arrays"):
        wrap(FedAvg(), names=["a", "b"]).start(grid, arrays, num_rounds=1)
    with pytest.raises(OptionError, match="names= is for arrays without names"):
        start(wrap(FedAvg(), names=START), Nodes())


def test_a_layout_tells_what_names_do_not() -> None:
    layout = Layout(groups=(), averaged=("body.weight", "norm.running_mean"), counted=(*START,)[2:])
    result = start(wrap(FedAvg(), "craft", layout=layout), Nodes(), rounds=1)
    found = result.arrays.to_torch_state_dict()["body.weight"]
    mean = torch.stack([trained(node, START)["body.weight"] for node in NODES]).mean(0)
    assert torch.allclose(found, mean)
    assert not torch.allclose(found, alone("craft", 1)["body.weight"])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (torch.nn.Sequential(torch.nn.Linear(1, 1)), "got a Linear"),
        (["a", "b", "a"], "given twice: a"),
    ],
)
def test_names_that_are_none(names: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        wrap(FedAvg(), names=names)


def test_refusals() -> None:
    with pytest.raises(OptionError, match="the rule is an object"):
        wrap(FedAvg(), get_aggregator("craft"), server_lr=1.0)
    with pytest.raises(OptionError, match="a rule's name or an Aggregator"):
        wrap(FedAvg(), None)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="on_empty_round must be"):
        wrap(FedAvg(), on_empty_round="stop")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="takes a strategy object"):
        wrap(FedAvg)
    with pytest.raises(OptionError, match="fraction_fit"):
        CraftStrategy(fraction_fit=0.5)
    near = r"no option 'fraction_trian'; .*; did you mean 'fraction_train' of Flower's FedAvg\?$"
    with pytest.raises(OptionError, match=near):
        CraftStrategy("craft", fraction_trian=0.5)
    with pytest.raises(
        OptionError, match=r"no option 'sever_lr'; did you mean 'server_lr'\? Known"
    ):
        CraftStrategy("craft", sever_lr=0.5)
    with pytest.raises(UnsupportedSetup, match="before configure_train"):
        wrap(FedAvg()).aggregate_train(1, [])
    with pytest.raises(UnsupportedSetup, match="wrapped already"):
        wrap(wrap(FedAvg()))
    with pytest.raises(UnsupportedSetup, match="wrapped already"):
        wrap(CraftStrategy())


def test_strategies_whose_aggregation_must_stay() -> None:
    private = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 3)
    with pytest.raises(UnsupportedSetup, match=r"DifferentialPrivacy.* noise"):
        wrap(private)
    with pytest.raises(UnsupportedSetup, match=r"FedXgbBagging.* trees"):
        wrap(FedXgbBagging())


def test_a_strategy_that_is_no_fedavg() -> None:
    class Mine(Strategy):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            return FedAvg().configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            return None, MetricRecord({"replies": len(list(replies))})

        def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            return []

        def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
            return None

        def summary(self) -> None:
            pass

    result = start(wrap(Mine(), "craft"), Nodes(failing=(12,)))
    assert equal(result.arrays, alone("craft", 2, nodes=(11, 13)))
    assert dict(result.train_metrics_clientapp[1]) == {"replies": 2}


def test_replies_of_another_form() -> None:
    class Two(Nodes):
        def answer(self, message: Message) -> Message:
            reply = super().answer(message)
            reply.content["more"] = MetricRecord({"x": 1})
            return reply

    with pytest.raises(IncompatibleUpdate, match="1 ArrayRecords and 2 MetricRecords"):
        start(wrap(FedAvg()), Two(), rounds=1)


def test_no_option_of_a_rule_is_one_of_flowers() -> None:
    """CraftStrategy takes both, so their names must not meet."""
    from flwr.server.strategy import FedAvg as LegacyFedAvg

    from craft_adapters import available_aggregators
    from craft_adapters.flower._step import ServerStep
    from craft_adapters.plugins import get_plugin_manager

    manager = get_plugin_manager()
    ours = set(inspect.signature(ServerStep).parameters)
    for rule in available_aggregators():
        ours |= set(inspect.signature(manager.aggregator_factory(rule)).parameters)
    assert "server_lr" in ours and "state_path" in ours
    for theirs in (FedAvg, LegacyFedAvg):
        assert not ours & set(inspect.signature(theirs).parameters)


@pytest.mark.parametrize("module", ["_arrays", "_front", "_legacy", "_step", "_strategy"])
def test_docstrings(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"craft_adapters.flower.{module}"))
    assert found.attempted and not found.failed
