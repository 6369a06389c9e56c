"""What rules ask of the clients' training reaches it, through attributes and no names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from craft_adapters.aggregators import FedAvg
from craft_adapters.errors import OptionError
from craft_adapters.plugins import get_plugin_manager
from craft_adapters.plugins._registry import Origin
from craft_adapters.simulation import LocalTraining, Run, read_config, read_lines
from craft_adapters.simulation._accord import agreed

BASE: dict[str, Any] = {
    "rounds": 3,
    "clients_per_round": 5,
    "evaluate_every": 1,
    "partition": {"name": "dirichlet", "clients": 20, "alpha": 0.3},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"engine": "loop", "lr": 0.05, "decay": 0.5},
}


class Curious(FedAvg):
    """A stranger's rule with everything that the federation looks for."""

    def __init__(self, *, client_lr: float, mu: float = 0.5, client_momentum: float = 0.9) -> None:
        super().__init__()
        self.client_lr, self.mu, self.client_momentum = client_lr, mu, client_momentum
        self.rates: list[float] = []

    def aggregate(self, *args: Any, **kwargs: Any) -> Any:
        self.rates.append(self.client_lr)
        return super().aggregate(*args, **kwargs)

    def averaged_model(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: torch.zeros_like(value) for name, value in state.items()}


@pytest.fixture
def curious(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = get_plugin_manager().aggregators
    monkeypatch.setitem(rules._entries, "curious", (Curious, Origin("curious", "tests")))


def play(folder: Path, **changes: Any) -> Run:
    run = Run(read_config({**BASE, **changes}), str(folder))
    list(run)
    return run


def test_everything_reaches_training_and_evaluation(
    curious: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = play(tmp_path, aggregator="curious")
    assert (run.federation.training.proximal, run.federation.training.momentum) == (0.5, 0.9)
    assert run.method.aggregator.rates == [0.05, 0.05, 0.025]  # type: ignore[attr-defined]
    last = list(read_lines(tmp_path / "metrics.jsonl"))[-1]
    zeros = {name: torch.zeros_like(value) for name, value in run.state.items()}
    scores = run.federation.evaluate(zeros)
    assert last["client_loss"] == {str(k): v for k, v in scores.loss.items()}
    assert any(value.any() for value in run.state.values()), "training goes on from its own model"


def test_fedprox_trains_with_its_term(tmp_path: Path) -> None:
    by_rule = play(tmp_path / "a", aggregator={"name": "fedprox", "mu": 0.7})
    by_hand = play(tmp_path / "b", training={**BASE["training"], "proximal": 0.7})
    without = play(tmp_path / "c")
    for name, value in by_rule.state.items():
        assert torch.equal(value, by_hand.state[name])
    assert any(not torch.equal(v, without.state[n]) for n, v in by_rule.state.items())


def test_rules_that_know_the_rate_are_not_told_it_twice(tmp_path: Path) -> None:
    run = play(tmp_path, aggregator={"name": "qfedavg", "q": 0.1})
    assert run.config.resolved()["aggregator"]["client_lr"] == 0.05
    assert run.method.aggregator.client_lr == 0.025  # type: ignore[attr-defined]
    nova = read_config({**BASE, "aggregator": {"name": "fednova", "mu": 0.1}}).method().aggregator
    assert nova.client_lr == 0.05  # type: ignore[attr-defined]


def test_afl_is_evaluated_at_its_mean_model(tmp_path: Path) -> None:
    run = play(tmp_path, aggregator="afl", clients_per_round=1.0)
    mean = run.method.aggregator.averaged_model(run.state)  # type: ignore[attr-defined]
    last = list(read_lines(tmp_path / "metrics.jsonl"))[-1]
    scores = run.federation.evaluate(mean)
    assert last["client_loss"] == {str(k): v for k, v in scores.loss.items()}
    assert scores.loss != run.federation.evaluate(run.state).loss


@pytest.mark.parametrize(
    ("rule", "training", "message"),
    [
        ({"name": "fedprox", "mu": 1}, {"proximal": 0.5}, "proximal is 0.5 and mu .*fedprox.* 1"),
        ("fednova", {"momentum": 0.9}, "momentum is 0.9 and client_momentum of rule 'fednova' 0"),
        ({"name": "qfedavg", "client_lr": 0.3}, {}, "lr is 0.1 and client_lr .* leave client_lr"),
    ],
)
def test_contradictions_are_refused(rule: Any, training: Any, message: str) -> None:
    with pytest.raises(OptionError, match=f"config: training: {message}"):
        read_config({"aggregator": rule, "training": training})


def test_a_rule_that_says_nothing_changes_nothing() -> None:
    training = LocalTraining(proximal=0.3, momentum=0.9)
    assert agreed(FedAvg(), training) == training
