"""Flower's legacy ``Server.fit`` around the rule, with clients that answer at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
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

from flwr.common import (
    Code,
    EvaluateRes,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server import History, Server, SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import (
    DPFedAvgFixed,
    FaultTolerantFedAvg,
    FedAvg,
    FedXgbNnAvg,
    Strategy,
)

from craft_adapters.flower import LegacyCraftStrategy, wrap
from craft_adapters.flower._arrays import Decoded

CLIENTS = ("11", "12", "13")
START = {
    "body.weight": torch.tensor([[1.0, -1.0], [0.5, 2.0]]),
    "norm.running_mean": torch.zeros(2),
    "norm.num_batches_tracked": torch.tensor(3),
}
OK = Status(Code.OK, "")


def trained(cid: str, arrays: Sequence[Any]) -> list[Any]:
    weight, mean, counter = arrays
    # Another step in each round: after equal rounds the rule's memory would change nothing.
    numbers = np.arange(1.0, 5.0, dtype=np.float32).reshape(2, 2)
    step = np.sin(int(cid) * numbers + 5 * weight[0, 0])
    return [weight + step, mean + np.float32(cid), np.asarray(counter + int(cid))]


class Proxy(ClientProxy):
    """A client; it fails in the way that ``failing`` says."""

    def __init__(self, cid: str, failing: str = "", **metrics: float) -> None:
        super().__init__(cid)
        self.failing, self.metrics = failing, metrics

    def fit(self, ins: Any, timeout: Any, group_id: Any) -> FitRes:
        if self.failing == "raises":
            raise ConnectionError("out of battery")
        if self.failing == "says":
            status = Status(Code.FIT_NOT_IMPLEMENTED, "cannot train")
            return FitRes(status, Parameters([], ""), 0, {})
        arrays = trained(self.cid, parameters_to_ndarrays(ins.parameters))
        if self.failing == "forgets":
            del arrays[1]
        return FitRes(OK, ndarrays_to_parameters(arrays), 10, dict(self.metrics))

    def evaluate(self, ins: Any, timeout: Any, group_id: Any) -> EvaluateRes:
        return EvaluateRes(OK, 0.5, 10, {"accuracy": 0.25})

    def get_parameters(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        raise NotImplementedError

    get_properties = reconnect = get_parameters


def parameters(state: dict[str, torch.Tensor] = START) -> Parameters:
    return ndarrays_to_parameters([value.numpy() for value in state.values()])


def fedavg(**options: Any) -> FedAvg:
    return FedAvg(initial_parameters=parameters(), **options)


def fit(
    strategy: Strategy, rounds: int = 2, failing: dict[str, str] | None = None, **metrics: float
) -> tuple[list[Any], History]:
    """Flower's server, to the end."""
    manager = SimpleClientManager()
    for cid in CLIENTS:
        manager.register(Proxy(cid, (failing or {}).get(cid, ""), **metrics))
    server = Server(client_manager=manager, strategy=strategy)
    history, _ = server.fit(num_rounds=rounds, timeout=None)
    return parameters_to_ndarrays(server.parameters), history


def alone(rule: str, rounds: int, clients: Sequence[str] = CLIENTS, **options: Any) -> list[Any]:
    """What the rule itself says."""
    aggregator, state = get_aggregator(rule, **options), START
    for number in range(rounds):
        arrays = [value.numpy() for value in state.values()]
        # Read one by one, as the adapter does: the rule rounds otherwise than with all in memory.
        answers = {cid: dict(zip(START, trained(cid, arrays), strict=True)) for cid in clients}
        updates = [
            ClientUpdate(cid, 10, Decoded(answer, np.asarray)) for cid, answer in answers.items()
        ]
        state = aggregator.aggregate(state, updates, round=number).state
    return [value.numpy() for value in state.values()]


def equal(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(
        one.dtype == other.dtype and one.shape == other.shape and (one == other).all()
        for one, other in zip(found, expected, strict=True)
    )


def test_a_run_is_what_the_rule_says_and_metrics_stay() -> None:
    def total(metrics: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        return {"sum": sum(count * each["accuracy"] for count, each in metrics)}

    own = fedavg(fit_metrics_aggregation_fn=total, evaluate_metrics_aggregation_fn=total)
    model, history = fit(wrap(own, "craft", names=START, server_lr=0.1), accuracy=0.5)
    assert equal(model, alone("craft", 2, server_lr=0.1))
    assert history.metrics_distributed_fit == {"sum": [(1, 15.0), (2, 15.0)]}
    assert history.metrics_distributed == {"sum": [(1, 7.5), (2, 7.5)]}
    assert history.losses_distributed == [(1, 0.5), (2, 0.5)]
    again = LegacyCraftStrategy(names=START, server_lr=0.1, initial_parameters=parameters())
    assert equal(fit(again)[0], model)


def test_names_must_be_given() -> None:
    for make in (lambda: wrap(fedavg()), LegacyCraftStrategy):
        with pytest.raises(UnsupportedSetup, match=r"without names.*names=model\.state_dict\(\)"):
            make()
    with pytest.raises(OptionError, match="2 names for the model's 3 arrays"):
        fit(wrap(fedavg(), names=["a", "b"]))


def test_names_say_what_is_a_buffer() -> None:
    names = ["body.weight", "norm.bias", "norm.num_batches_tracked"]
    assert not equal(fit(wrap(fedavg(), names=names))[0], alone("craft", 2))


def test_failures_are_left_out_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = fit(wrap(fedavg(), "craft", names=START), failing={"11": "raises"})
    assert equal(model, alone("craft", 2, ["12", "13"]))
    assert "craft: round 2: a client left out: out of battery" in caplog.messages
    model, _ = fit(wrap(fedavg(), "craft", names=START), failing={"12": "says"})
    assert equal(model, alone("craft", 2, ["11", "13"]))
    assert "craft: round 2: client 12 left out: cannot train" in caplog.messages


def test_a_round_of_failures_keeps_the_model_or_stops(caplog: pytest.LogCaptureFixture) -> None:
    failing = dict.fromkeys(CLIENTS, "raises")
    model, _ = fit(wrap(fedavg(), names=START), failing=failing)
    assert equal(model, alone("craft", 0))
    assert any(each.endswith("the model stays as it is") for each in caplog.messages)
    with pytest.raises(NoUsableUpdates):
        fit(wrap(fedavg(), names=START, on_empty_round="raise"), failing=failing)


@pytest.mark.parametrize(
    "strategy",
    [
        fedavg(accept_failures=False),
        FaultTolerantFedAvg(min_completion_rate_fit=0.9, initial_parameters=parameters()),
    ],
    ids=["accept_failures", "completion rate"],
)
def test_failures_that_the_strategy_does_not_accept(
    strategy: FedAvg, caplog: pytest.LogCaptureFixture
) -> None:
    failing = {"12": "raises"}
    model, _ = fit(wrap(copy.copy(strategy), names=START), failing=failing)
    assert equal(model, alone("craft", 0))
    assert any("1 failures, which the strategy does not accept" in m for m in caplog.messages)
    assert equal(fit(wrap(strategy, names=START))[0], alone("craft", 2))


def test_state_is_saved_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "rule.safetensors"
    first, _ = fit(wrap(fedavg(), names=START, state_path=path), rounds=1)
    own = FedAvg(initial_parameters=ndarrays_to_parameters(first))
    second, _ = fit(wrap(copy.copy(own), names=START, state_path=path), rounds=1)
    assert equal(second, alone("craft", 2))
    assert not equal(fit(wrap(own, names=START), rounds=1)[0], second)


def test_what_a_rule_needs() -> None:
    with pytest.raises(UnsupportedSetup, match=r"needs local_steps.*steps_key.*: .*craft"):
        wrap(fedavg(), "fednova", names=START)
    strategy = wrap(fedavg(), "fednova", names=START, steps_key="steps")
    model, _ = fit(copy.deepcopy(strategy), steps=4)
    assert not equal(model, alone("craft", 0))
    with pytest.raises(IncompatibleUpdate, match=r"client '1[123]'.*'steps' is needed as a number"):
        fit(strategy)


def test_an_aggregation_of_ones_own_runs_for_its_metrics() -> None:
    class Mine(FedAvg):
        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            return None, {"results": len(results)}

    strategy = wrap(Mine(initial_parameters=parameters()), "craft", names=START)
    model, history = fit(strategy)
    assert equal(model, alone("craft", 2))
    assert history.metrics_distributed_fit == {"results": [(1, 3), (2, 3)]}


def test_a_list_that_is_too_short_names_the_entry() -> None:
    with pytest.raises(
        IncompatibleUpdate,
        match=r"client '12': 2 arrays for the model's 3 entries; where 'norm.running_mean' belongs",
    ):
        fit(wrap(fedavg(), names=START), failing={"12": "forgets"})


def test_sums_of_secure_aggregation_are_refused() -> None:
    strategy = wrap(fedavg(), names=START)
    manager = SimpleClientManager()
    proxies = [Proxy(cid) for cid in CLIENTS]
    for proxy in proxies:
        manager.register(proxy)
    strategy.configure_fit(1, parameters(), manager)
    total = parameters()
    results = [(proxy, FitRes(OK, total, 10, {})) for proxy in proxies]
    with pytest.raises(UnsupportedSetup, match="SecAgg"):
        strategy.aggregate_fit(1, results, [])


def test_refusals() -> None:
    with pytest.raises(UnsupportedSetup, match="before configure_fit"):
        wrap(fedavg(), names=START).aggregate_fit(1, [], [])
    with pytest.raises(UnsupportedSetup, match="wrapped already"):
        wrap(LegacyCraftStrategy(names=START), names=START)
    with pytest.raises(UnsupportedSetup, match=r"DPFedAvgFixed.* noise"):
        wrap(DPFedAvgFixed(fedavg(), 3, 1.0), names=START)
    with pytest.raises(UnsupportedSetup, match=r"FedXgbNnAvg.* trees"):
        wrap(FedXgbNnAvg(), names=START)
