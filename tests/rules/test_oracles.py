"""The rules beside published implementations, where those are installed.

None of them is needed to run the rules. They have other defaults and other defects: what is
compared here is what they agree with the papers on.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from craft_adapters import Aggregator
from craft_adapters.aggregators import (
    ConFIG,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedMGDA,
    FedYogi,
    QFedAvg,
)
from craft_adapters.aggregators._convex import min_norm_in_box, min_norm_point

from .test_formulas import close, noise, one_round, unit

F64 = torch.float64
SIZES = [(1, 20), (2, 20), (5, 20), (12, 20), (30, 200)]


def imported(name: str) -> Any:
    """Other people's warnings at import are not errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


@pytest.mark.parametrize(("count", "width"), SIZES)
def test_config_and_torchjds(count: int, width: int, device: torch.device) -> None:
    oracle = imported("torchjd.aggregation").ConFIG()
    rows = noise(count, count, width) * 10.0 ** noise(7, count, 1)
    step, _ = one_round(ConFIG(device=device), torch.zeros(width, dtype=F64), rows, layers=(width,))
    close(step, oracle(rows), 1e-8)


@pytest.mark.parametrize(("count", "width"), SIZES[1:])
def test_config_and_conflictfrees(count: int, width: int, device: torch.device) -> None:
    oracle = imported("conflictfree.grad_operator").ConFIG_update
    rows = noise(count, count, width)
    step, _ = one_round(ConFIG(device=device), torch.zeros(width, dtype=F64), rows, layers=(width,))
    wanted = oracle(rows.float(), use_least_square=False).to(F64)
    close(step, wanted, 1e-4)


@pytest.mark.parametrize(("count", "width"), SIZES)
def test_fedmgda_and_torchjds_mgda(count: int, width: int, device: torch.device) -> None:
    """Theirs stops after some iterations: ours is as short, or shorter."""
    oracle = imported("torchjd.aggregation").MGDA(epsilon=1e-9, max_iters=2000)
    rows = unit(noise(count, count, width))
    rule = FedMGDA(epsilon=1.0, device=device)
    step, _ = one_round(rule, torch.zeros(width, dtype=F64), rows, layers=(width,))
    wanted = oracle(rows)
    assert float(step.norm()) <= float(wanted.norm()) * (1 + 1e-9)
    close(step, wanted, 0.05)


@pytest.mark.parametrize("solver", ["quadprog", "cvxopt"])
@pytest.mark.parametrize(("count", "width"), SIZES)
@pytest.mark.parametrize("radius", [0.02, 0.1, 1.0])
def test_mixtures_and_other_solvers(solver: str, count: int, width: int, radius: float) -> None:
    """Independent rows, where the weights are unique; quadprog takes no others."""
    package = imported(solver)
    rows = unit(noise(count + width, count, width))
    products = rows @ rows.T
    centre = torch.full((count,), 1 / count, dtype=F64)
    low, high = (centre - radius).clamp(min=0), (centre + radius).clamp(max=1)
    if solver == "quadprog":
        sides = np.hstack([np.ones((count, 1)), np.eye(count), -np.eye(count)])
        bounds = np.concatenate([[1.0], low.numpy(), -high.numpy()])
        wanted = package.solve_qp(products.numpy(), np.zeros(count), sides, bounds, 1)[0]
    else:
        matrix = package.matrix
        package.solvers.options.update(show_progress=False, abstol=1e-12, reltol=1e-12)
        found = package.solvers.qp(
            matrix(products.numpy()),
            matrix(np.zeros(count)),
            matrix(np.vstack([np.eye(count), -np.eye(count)])),
            matrix(np.concatenate([high.numpy(), -low.numpy()])),
            matrix(np.ones((1, count))),
            matrix(np.ones(1)),
        )
        wanted = np.array(found["x"]).ravel()
    oracle = torch.from_numpy(np.asarray(wanted))
    close(min_norm_in_box(products, low, high), oracle, 1e-5)
    if radius == 1.0:
        close(min_norm_point(products), oracle, 1e-5)


# -- Flower ---------------------------------------------------------------------------------------


def flower_step(
    strategy: Any, number: int, theta: Tensor, rows: Tensor, counts: Sequence[int], **more: Any
) -> Tensor:
    """theta - theta' of a round of a Flower strategy."""
    app = imported("flwr.app")

    def record(values: Tensor) -> Any:
        return app.ArrayRecord({"w": app.Array(values.numpy())})

    replies = []
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        metrics = {"num-examples": count, **{name: values[i] for name, values in more.items()}}
        content = app.RecordDict(
            {"arrays": record(theta - row), "metrics": app.MetricRecord(metrics)}
        )
        # A message of its own kind can only be made inside a running federation.
        replies.append(SimpleNamespace(content=content, has_error=lambda: False))
    # The adaptive ones keep plain arrays.
    adaptive = hasattr(strategy, "v_t")
    strategy.current_arrays = {"w": theta.numpy()} if adaptive else record(theta)
    arrays, _ = strategy.aggregate_train(number, replies)
    assert arrays is not None
    return theta - torch.from_numpy(arrays["w"].numpy())


@pytest.mark.parametrize(
    ("name", "options", "rule"),
    [
        ("FedAdagrad", {"tau": 1e-3}, FedAdagrad(server_lr=0.1, initial_accumulator=0.0)),
        ("FedAdam", {}, FedAdam(server_lr=0.1, bias_correction="flower")),
        ("FedYogi", {"eta": 0.1}, FedYogi(server_lr=0.1, initial_accumulator=0.0)),
        ("FedAvgM", {"server_momentum": 0.9}, FedAvgM()),
    ],
)
def test_server_optimisers_and_flowers(
    name: str, options: dict[str, Any], rule: Aggregator
) -> None:
    strategy = getattr(imported("flwr.serverapp.strategy"), name)(**options)
    theta, counts = noise(0, 20), [3, 1, 6]
    for number in range(1, 5):
        rows = noise(number, 3, 20)
        step, _ = one_round(rule, theta, rows, counts=counts)
        close(step, flower_step(strategy, number, theta, rows, counts), 1e-9)
        theta = theta - step


@pytest.mark.parametrize("q", [0.1, 1.0, 3.0])
def test_qfedavg_and_flowers(q: float, device: torch.device) -> None:
    strategy = imported("flwr.serverapp.strategy").QFedAvg(client_learning_rate=0.1, q=q)
    theta, rows, losses = noise(0, 20), noise(1, 3, 20), [0.3, 1.0, 2.5]
    rule = QFedAvg(client_lr=0.1, q=q, device=device)
    step, _ = one_round(rule, theta, rows, losses=losses)
    wanted = flower_step(strategy, 1, theta, rows, [1, 1, 1], train_loss=losses)
    close(step, wanted, 1e-6)
