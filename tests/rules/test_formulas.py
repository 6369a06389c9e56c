"""Each rule against its formula, written out on whole vectors in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from craft_adapters import AggregationResult, Aggregator, ClientUpdate, IncompatibleUpdate
from craft_adapters.aggregators import (
    AFL,
    ConFIG,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedFV,
    FedLF,
    FedMGDA,
    FedNova,
    FedYogi,
    QFedAvg,
)
from craft_adapters.aggregators.fedlf import _harmless
from craft_adapters.aggregators.fednova import normaliser

F64 = torch.float64
LAYERS = (7, 4, 9)

quick = settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
seeds = st.integers(0, 2**20)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def cut(row: Tensor, layers: Sequence[int] = LAYERS) -> dict[str, Tensor]:
    return {f"layer{i}.weight": part for i, part in enumerate(row.split(list(layers)))}


def one_round(
    rule: Aggregator,
    theta: Tensor,
    rows: Tensor,
    *,
    ids: Sequence[int] | None = None,
    counts: Sequence[float] | None = None,
    losses: Sequence[float] | None = None,
    steps: Sequence[int] | None = None,
    layers: Sequence[int] = LAYERS,
) -> tuple[Tensor, AggregationResult]:
    """The step theta - theta', and the result."""
    ids = range(len(rows)) if ids is None else ids
    device = rule.device  # type: ignore[attr-defined]
    clients = [
        ClientUpdate(
            client,
            1 if counts is None else counts[i],
            {name: part.to(device) for name, part in cut(rows[i], layers).items()},
            "update",
            loss=None if losses is None else float(losses[i]),
            local_steps=None if steps is None else int(steps[i]),
        )
        for i, client in enumerate(ids)
    ]
    state = {name: part.to(device) for name, part in cut(theta, layers).items()}
    result = rule.aggregate(state, clients)
    return theta - torch.cat([v.cpu() for v in result.state.values()]), result


def close(got: Tensor, wanted: Tensor, tolerance: float = 1e-9) -> None:
    scale = max(1e-300, float(wanted.abs().amax()))
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * scale)


def unit(vector: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vector, dim=-1, eps=0.0)


# -- server optimisers -----------------------------------------------------------------------------


@quick
@given(seed=seeds, beta=st.floats(0, 0.99), lr=st.floats(0.01, 2))
def test_fedavgm_is_sgd_with_momentum(
    seed: int, beta: float, lr: float, device: torch.device
) -> None:
    parameter = torch.nn.Parameter(noise(seed, 20))
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=beta)
    rule = FedAvgM(server_lr=lr, beta=beta, device=device)
    theta = parameter.detach().clone()
    shares = torch.tensor([0.1, 0.6, 0.3], dtype=F64)
    for number in range(4):
        rows = noise(seed + 1 + number, 3, 20)
        step, _ = one_round(rule, theta, rows, counts=(10 * shares).tolist())
        theta = theta - step
        parameter.grad = shares @ rows
        optimizer.step()
        close(theta, parameter.detach())


def test_momentum_moves_the_model_without_updates(device: torch.device) -> None:
    rule = FedAvgM(beta=0.5, device=device)
    rows = torch.ones(1, 20, dtype=F64)
    one_round(rule, torch.zeros(20, dtype=F64), rows)
    step, result = one_round(rule, torch.zeros(20, dtype=F64), 0 * rows)
    close(step, 0.5 * rows[0])
    assert result.report.groups[0].cosine_to_reference == pytest.approx(1.0)


@quick
@given(seed=seeds, start=st.floats(0, 1), lr=st.floats(0.01, 2))
def test_fedadagrad_is_torchs(seed: int, start: float, lr: float, device: torch.device) -> None:
    parameter = torch.nn.Parameter(noise(seed, 20))
    optimizer = torch.optim.Adagrad([parameter], lr=lr, eps=1e-3, initial_accumulator_value=start)
    rule = FedAdagrad(server_lr=lr, initial_accumulator=start, device=device)
    theta = parameter.detach().clone()
    for number in range(4):
        rows = noise(seed + 1 + number, 3, 20)
        step, _ = one_round(rule, theta, rows)
        theta = theta - step
        parameter.grad = rows.mean(0)
        optimizer.step()
        close(theta, parameter.detach())


@quick
@given(
    seed=seeds,
    beta1=st.floats(0, 0.99),
    beta2=st.floats(0, 0.999),
    tau=st.floats(1e-6, 1),
    variant=st.sampled_from(("none", "keras", "flower")),
    yogi=st.booleans(),
)
def test_fedadam_and_fedyogi(
    seed: int,
    beta1: float,
    beta2: float,
    tau: float,
    variant: Any,
    yogi: bool,
    device: torch.device,
) -> None:
    assume(not (yogi and variant == "flower"))
    make: Any = FedYogi if yogi else FedAdam
    rule = make(
        server_lr=0.1, beta1=beta1, beta2=beta2, tau=tau, bias_correction=variant, device=device
    )
    theta = noise(seed, 20)
    m, v = torch.zeros(20, dtype=F64), torch.full((20,), 0.0 if variant != "none" else tau**2)
    v = v.to(F64)
    for number in range(1, 5):
        rows = noise(seed + number, 3, 20)
        change = -rows.mean(0)
        m = beta1 * m + (1 - beta1) * change
        if yogi:
            v = v - (1 - beta2) * change**2 * torch.sign(v - change**2)
        else:
            v = beta2 * v + (1 - beta2) * change**2
        power = number + (variant == "flower")
        factor = 1.0
        if variant != "none":
            factor = math.sqrt(1 - beta2**power) / (1 - beta1**power)
        wanted = 0.1 * factor * m / (v.sqrt() + tau)
        step, _ = one_round(rule, theta, rows)
        close(-step, wanted, 1e-7)
        theta = theta - step


def test_adaptive_rules_move_without_updates_and_leave_buffers_alone(
    device: torch.device,
) -> None:
    rule = FedAdam(device=device)
    theta = {
        "w": torch.zeros(3, device=device),
        "bn.running_var": torch.ones(3, device=device),
    }
    moved = {"w": torch.ones(3, device=device), "bn.running_var": torch.full((3,), 0.5)}
    state = rule.aggregate(theta, [ClientUpdate(0, 1, moved)]).state
    assert torch.equal(state["bn.running_var"].cpu(), torch.full((3,), 0.5))
    assert set(rule.state_dict()["m"]) == {"w"}
    again = rule.aggregate(state, [ClientUpdate(0, 1, state)]).state
    assert bool((again["w"] > state["w"]).all())


# -- FedNova ---------------------------------------------------------------------------------------


@quick
@given(
    steps=st.integers(1, 60),
    momentum=st.one_of(st.just(0.0), st.floats(0, 0.999)),
    shrink=st.one_of(st.just(0.0), st.floats(0, 0.9), st.floats(1e-12, 1e-6)),
)
def test_normaliser_is_what_sgd_does_with_unit_gradients(
    steps: int, momentum: float, shrink: float
) -> None:
    buffer = moved = 0.0
    for _ in range(steps):
        buffer = momentum * buffer + 1.0
        moved = (1.0 - shrink) * moved + buffer
    found = float(normaliser(torch.tensor([float(steps)], dtype=F64), momentum, shrink))
    assert found == pytest.approx(moved, rel=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_normaliser_and_torchs_optimiser(momentum: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=F64))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=momentum)
    for steps in range(1, 8):
        parameter.grad = torch.ones(1, dtype=F64)
        optimizer.step()
        found = float(normaliser(torch.tensor([float(steps)], dtype=F64), momentum))
        assert 0.1 * found == pytest.approx(-parameter.item(), rel=1e-12)


def test_momentum_with_proximal_term() -> None:
    """The authors' code counts 5.312 here; its steps really give less."""
    found = float(normaliser(torch.tensor([3.0], dtype=F64), 0.5, 0.2))
    assert found == pytest.approx(3.59, abs=1e-12)


@quick
@given(seed=seeds, mu=st.sampled_from((0.0, 0.5)), server=st.sampled_from((0.0, 0.9)))
def test_fednova(seed: int, mu: float, server: float, device: torch.device) -> None:
    rule = FedNova(mu=mu, client_lr=0.1, server_momentum=server, device=device)
    theta, v = noise(seed, 20), torch.zeros(20, dtype=F64)
    shares = torch.tensor([0.2, 0.5, 0.3], dtype=F64)
    for number in range(3):
        rows = noise(seed + 1 + number, 3, 20)
        steps = torch.tensor([1 + (seed + i * number) % 9 for i in range(3)], dtype=F64)
        work = (1 - (1 - 0.1 * mu) ** steps) / (0.1 * mu) if mu else steps
        effective = shares @ (steps if mu else work)
        v = server * v + effective * ((shares / work) @ rows)
        step, _ = one_round(
            rule, theta, rows, counts=(100 * shares).tolist(), steps=steps.int().tolist()
        )
        close(step, v)


def test_a_client_without_steps_has_no_say(device: torch.device) -> None:
    rows, theta = noise(0, 3, 20), noise(1, 20)
    rows[1] = 0.0
    step, _ = one_round(FedNova(device=device), theta, rows, steps=[2, 0, 5])
    wanted, _ = one_round(FedNova(device=device), theta, rows[[0, 2]], steps=[2, 5])
    close(step, wanted)
    step, _ = one_round(FedNova(device=device), theta, rows[:1], steps=[0])
    assert not step.any()
    with pytest.raises(IncompatibleUpdate, match="client 0: local_steps must be >= 0"):
        one_round(FedNova(device=device), theta, rows[:1], steps=[-1])


# -- AFL -------------------------------------------------------------------------------------------


@quick
@given(seed=seeds, lr=st.floats(0.01, 3), count=st.integers(1, 6))
def test_afl_with_everybody_present(seed: int, lr: float, count: int, device: torch.device) -> None:
    rule = AFL(lambda_lr=lr, device=device)
    theta, weights = noise(seed, 20), torch.full((count,), 1 / count, dtype=F64)
    models = []
    for number in range(4):
        rows = noise(seed + 1 + number, count, 20)
        losses = noise(seed - 1 - number, count).abs()
        step, result = one_round(rule, theta, rows, losses=losses.tolist())
        close(step, weights @ rows)
        weights = nearest_weights(weights + lr * losses)
        close(torch.tensor(list(rule.weights.values()), dtype=F64), weights)
        theta = theta - step
        models.append(theta)
        mean = torch.cat([v.cpu() for v in rule.averaged_model(result.state).values()])
        close(mean, torch.stack(models).mean(0))


def nearest_weights(point: Tensor) -> Tensor:
    """By bisection on the shift, which the sorted formula finds in one go."""
    low, high = -float(point.amax()), 1.0 - float(point.amin())
    for _ in range(200):
        shift = (low + high) / 2
        low, high = (low, shift) if float((point + shift).clamp(min=0).sum()) > 1 else (shift, high)
    return (point + high).clamp(min=0)


def test_afl_with_clients_that_come_and_go(device: torch.device) -> None:
    rule = AFL(lambda_lr=0.1, device=device)
    theta, rows = noise(0, 20), noise(1, 6, 20)
    one_round(rule, theta, rows[:3], ids=[0, 1, 2], losses=[1.0, 2.0, 4.0])
    weights = dict(rule.weights)
    # A newcomer gets what each of four would have; those present share the step.
    shares = [0.75 * weights[1], 0.25]
    step, _ = one_round(rule, theta, rows[3:5], ids=[1, 7], losses=[3.0, 3.0])
    close(step, torch.tensor(shares, dtype=F64) @ rows[3:5] / sum(shares))
    point = [0.75 * weights[0], shares[0] + 0.3, 0.75 * weights[2], 0.25 + 0.3]
    wanted = nearest_weights(torch.tensor(point, dtype=F64))
    found = rule.weights
    assert [found[client] for client in (0, 1, 2, 7)] == pytest.approx(wanted.tolist())
    assert sum(found.values()) == pytest.approx(1.0)


def test_afl_when_all_weight_is_away(device: torch.device) -> None:
    rule = AFL(lambda_lr=10.0, device=device)
    theta, rows = noise(0, 20), noise(1, 3, 20)
    one_round(rule, theta, rows, losses=[0.0, 0.0, 9.0])
    assert rule.weights == {0: 0.0, 1: 0.0, 2: 1.0}
    step, _ = one_round(rule, theta, rows[:2], losses=[0.0, 0.0])
    close(step, rows[:2].mean(0))


def test_afl_without_the_mean_model(device: torch.device) -> None:
    rule = AFL(average=False, device=device)
    _, result = one_round(rule, noise(0, 20), noise(1, 2, 20), losses=[1.0, 2.0])
    assert rule.state_dict()["mean"] == {}
    for name, value in rule.averaged_model(result.state).items():
        assert torch.equal(value, result.state[name])
        assert value.data_ptr() != result.state[name].data_ptr()


# -- q-FedAvg --------------------------------------------------------------------------------------


@quick
@given(seed=seeds, q=st.sampled_from((0.0, 0.1, 0.5, 1.0, 5.0)), lr=st.floats(0.01, 1))
def test_qfedavg(seed: int, q: float, lr: float, device: torch.device) -> None:
    rows, theta = noise(seed, 4, 20), noise(seed + 1, 20)
    losses = noise(seed + 2, 4).abs() + 0.01
    rule = QFedAvg(q=q, client_lr=lr, loss_eps=0.0, device=device)
    step, _ = one_round(rule, theta, rows, counts=[1, 2, 3, 400], losses=losses.tolist())
    scaled = rows / lr
    total = (losses**q) @ scaled
    bound = q * losses ** (q - 1) * scaled.square().sum(1) + losses**q / lr
    close(step, total / bound.sum())
    if q == 0:
        close(step, rows.mean(0))


def test_qfedavg_losses_of_zero_and_below(device: torch.device) -> None:
    rows, theta = noise(0, 2, 20), noise(1, 20)
    for q in (0.0, 0.5, 1.0, 2.0):
        rule = QFedAvg(client_lr=0.1, q=q, loss_eps=0.0, device=device)
        step, _ = one_round(rule, theta, torch.stack([rows[0], 0 * rows[1]]), losses=[1.0, 0.0])
        assert bool(step.isfinite().all()) and bool(step.any())
    with pytest.raises(IncompatibleUpdate, match="client 1: loss must be >= 0"):
        one_round(rule, theta, rows, losses=[1.0, -0.5])


# -- FedMGDA+ --------------------------------------------------------------------------------------


@quick
@given(
    seed=seeds,
    count=st.integers(1, 9),
    rank=st.integers(1, 12),
    epsilon=st.sampled_from((0.0, 0.05, 0.1, 0.5, 1.0)),
)
def test_fedmgda(seed: int, count: int, rank: int, epsilon: float, device: torch.device) -> None:
    """Optimal by the conditions of the problem, with dependent rows too."""
    rows = noise(seed, count, rank) @ noise(seed + 1, rank, 20)
    rows = rows * (10.0 ** noise(seed + 2, count, 1))
    counts = [1 + (seed * i) % 50 for i in range(count)]
    rule = FedMGDA(epsilon=epsilon, server_lr=0.5, device=device)
    step, result = one_round(rule, noise(seed + 3, 20), rows, counts=counts)
    direction, units = step / 0.5, unit(rows)
    shares = torch.tensor(counts, dtype=F64) / sum(counts)
    assert float(torch.linalg.vector_norm(direction)) <= 1 + 1e-9
    if epsilon == 0:
        close(direction, shares @ units)
        return
    # Linear in lambda: the best vertex of the box must not be better than lambda itself.
    low, high = (shares - epsilon).clamp(min=0), (shares + epsilon).clamp(max=1)
    gain = units @ direction
    best = float(greedy(gain, low, high) @ gain)
    assert float(direction @ direction) <= best + 1e-6
    if epsilon == 1:
        assert float(gain.amin()) >= float(direction @ direction) - 1e-6
        if float(direction @ direction) > 1e-4:
            assert result.report.conflicts_after == 0


def greedy(costs: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The weights in a box, with sum 1, of the smallest total cost."""
    weights = low.clone()
    for i in costs.argsort().tolist():
        weights[i] += min(float(high[i] - low[i]), 1.0 - float(weights.sum()))
    return weights


def test_fedmgda_step_length_decays(device: torch.device) -> None:
    rule = FedMGDA(lr_decay=0.5, device=device)
    row = noise(0, 1, 20)
    for number in range(3):
        step, _ = one_round(rule, noise(1, 20), row * 10.0**-number)
        close(step, unit(row[0]) * 0.5**number)


# -- ConFIG ----------------------------------------------------------------------------------------


@quick
@given(
    seed=seeds,
    count=st.integers(1, 8),
    dtype=st.sampled_from((torch.float32, F64)),
    granularity=st.sampled_from(("model", "layer")),
)
def test_config(
    seed: int, count: int, dtype: torch.dtype, granularity: Any, device: torch.device
) -> None:
    layers = (20, 30) if granularity == "layer" else (7, 43)
    rows = (noise(seed, count, 50) + noise(seed + 1, 1, 50)) * 10.0 ** noise(seed + 2, count, 1)
    rows, theta = rows.to(dtype), torch.zeros(50, dtype=dtype)
    rule = ConFIG(granularity=granularity, server_lr=0.5, device=device)
    step, result = one_round(rule, theta, rows, layers=layers)
    parts = zip(step.split(layers), rows.split(layers, dim=1), strict=True)
    for got, some in parts if granularity == "layer" else [(step, rows)]:
        some = some.to(F64)
        best = torch.linalg.pinv(unit(some)) @ torch.ones(count, dtype=F64)
        direction = unit(best)
        wanted = 0.5 * (some @ direction).sum() * direction
        close(got.to(F64), wanted, 1e-9 if dtype == F64 else 1e-4)
        cosines = unit(some) @ unit(got.to(F64))
        assert float(cosines.amin()) > 0
        spread = float(cosines.amax() / cosines.amin()) - 1
        assert spread < (1e-9 if dtype == F64 else 1e-4)
    assert result.report.conflicts_after == 0
    assert all(group.note == "" for group in result.report.groups)


@quick
@given(seed=seeds, count=st.integers(2, 9), rank=st.integers(1, 8))
def test_config_with_dependent_rows(seed: int, count: int, rank: int, device: torch.device) -> None:
    rows = noise(seed, count, rank) @ noise(seed + 1, rank, 20)
    values = torch.linalg.svdvals(unit(rows))[: min(count, rank)]
    assume(values[-1] > 1e-3 * values[0])
    best = torch.linalg.pinv(unit(rows), rtol=1e-9) @ torch.ones(count, dtype=F64)
    assume(torch.linalg.vector_norm(best) > 1e-3)
    step, result = one_round(ConFIG(device=device), torch.zeros(20, dtype=F64), rows)
    close(step, (rows @ unit(best)).sum() * unit(best), 1e-7)
    (group,) = result.report.groups
    assert group.rank == min(count, rank)
    assert bool(group.note) is (rank < count)


# -- FedFV -----------------------------------------------------------------------------------------


class PlainFedFV:
    """FedFV step by step on vectors, with a memory of last updates."""

    def __init__(self, alpha: float, tau: int, variant: str) -> None:
        self.alpha, self.tau, self.variant = alpha, tau, variant
        self.round = 0
        self.history: dict[int, tuple[int, Tensor]] = {}

    def step(self, ids: Sequence[int], rows: Tensor, losses: Sequence[float]) -> Tensor:
        for client, row in zip(ids, rows, strict=True):
            self.history[client] = (self.round, row)
        count = len(rows)
        order = sorted(range(count), key=lambda i: losses[i])
        kept = order[math.ceil((count - 1) * (1 - self.alpha)) :] if self.alpha > 0 else []
        vectors = rows.clone()
        for i in range(count):
            for j in order:
                inner = rows[j] @ vectors[i]
                if i not in kept and j != i and inner < 0:
                    vectors[i] = vectors[i] - inner / rows[j].square().sum() * rows[j]
        mean = vectors.mean(0)
        first, last = (self.tau, 1) if self.variant == "paper" else (self.tau - 1, 0)
        if self.round >= self.tau:
            for back in range(first, last - 1, -1):
                against = [
                    row
                    for number, row in self.history.values()
                    if number == self.round - back and row @ mean < 0
                ]
                if against:
                    total = torch.stack(against).sum(0)
                    if mean @ total < 0:
                        mean = mean - (mean @ total) / total.square().sum() * total
        self.round += 1
        return unit(mean) * torch.linalg.vector_norm(rows.mean(0))


@quick
@given(
    seed=seeds,
    alpha=st.sampled_from((0.0, 0.1, 0.4, 1.0)),
    tau=st.integers(0, 3),
    variant=st.sampled_from(("paper", "code")),
    count=st.integers(1, 5),
)
def test_fedfv(
    seed: int, alpha: float, tau: int, variant: Any, count: int, device: torch.device
) -> None:
    rule = FedFV(alpha=alpha, tau=tau, variant=variant, device=device)
    plain = PlainFedFV(alpha, tau, variant)
    generator = torch.Generator().manual_seed(seed)
    theta = noise(seed, 20)
    for number in range(6):
        ids = torch.randperm(9, generator=generator)[:count].sort().values.tolist()
        rows = noise(seed + 10 * number, count, 20)
        losses = torch.rand(count, generator=generator, dtype=F64).tolist()
        step, result = one_round(rule, theta, rows, ids=ids, losses=losses)
        close(step, plain.step(ids, rows, losses), 1e-7)
        assert result.report.clients == tuple(ids)


def test_fedfv_absent_clients_count_in_the_paper_only(device: torch.device) -> None:
    """tau = 1: this round's mean does not point against who was there in the round before."""
    before, now = noise(0, 1, 20), noise(1, 2, 20)
    now = now - before  # against
    theta, losses = noise(2, 20), [1.0, 2.0]
    alone, _ = one_round(FedFV(device=device), theta, now, losses=losses)
    assert float(alone @ before[0]) < -0.1
    for variant in ("paper", "code"):
        rule = FedFV(variant=variant, device=device)  # type: ignore[arg-type]
        one_round(rule, theta, before, ids=[7], losses=[1.0])
        step, _ = one_round(rule, theta, now, losses=losses)
        if variant == "code":
            assert float(step @ before[0]) < -0.1
        else:
            assert float(step @ before[0]) == pytest.approx(0.0, abs=1e-9)
            # One round later it is too long ago.
            step, _ = one_round(rule, theta, now, losses=losses)
            close(step, alone)


def test_fedfv_the_largest_loss_is_respected(device: torch.device) -> None:
    """With alpha 0 everybody else is projected on it last."""
    rows = torch.stack([noise(i, 20) for i in range(6)])
    rows[5] = -rows[:5].sum(0)
    losses = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    step, _ = one_round(FedFV(alpha=0.0, device=device), noise(9, 20), rows, losses=losses)
    assert float(rows.mean(0) @ rows[5]) == pytest.approx(0.0, abs=1e-9)
    assert float(step @ rows[5]) > -1e-9


# -- FedLF -----------------------------------------------------------------------------------------


def fair(losses: Tensor) -> Tensor:
    """d/dF of -cos((1, ..., 1), F), by autograd."""
    variable = losses.clone().requires_grad_()
    cosine = torch.nn.functional.cosine_similarity(torch.ones_like(losses), variable, dim=0)
    (-cosine).backward()
    assert variable.grad is not None
    return variable.grad


@quick
@given(seed=seeds, count=st.integers(2, 5), variant=st.sampled_from(("paper", "code")))
def test_fedlf(seed: int, count: int, variant: Any, device: torch.device) -> None:
    """Every row's inner product with its layer's step is at least the mixture's square."""
    rule = FedLF(variant=variant, device=device)
    generator = torch.Generator().manual_seed(seed)
    theta = noise(seed, 60)
    history: dict[int, tuple[int, Tensor]] = {}
    for number in range(5):
        ids = torch.randperm(7, generator=generator)[:count].sort().values.tolist()
        rows = noise(seed + 10 * number, count, 60)
        losses = 0.1 + torch.rand(count, generator=generator, dtype=F64)
        window = len(history) // count if len(history) > count else 0
        away = [
            row
            for client, (last, row) in sorted(history.items())
            if client not in ids and number - last <= window
        ]
        step, result = one_round(
            rule, theta, rows, ids=ids, losses=losses.tolist(), layers=(20, 40)
        )
        # Both layers are rescaled by one factor: to the length of the plain mean.
        length = torch.linalg.vector_norm(rows.mean(0))
        assert float(torch.linalg.vector_norm(step)) == pytest.approx(float(length), rel=1e-9)
        scales = []
        for got, start, stop in ((step[:20], 0, 20), (step[20:], 20, 60)):
            part = rows[:, start:stop]
            norms = torch.linalg.vector_norm(part, dim=1, keepdim=True)
            if variant == "code":
                part = part / norms * norms.mean()
            row = fair(losses) @ part
            everyone = [*part, row, *(a[start:stop] for a in away)]
            if variant == "code":
                everyone[count:] = [unit(r) * norms.mean() for r in everyone[count:]]
            matrix = torch.stack(everyone)
            along = matrix @ got
            # Optimal: got = c d, d in the hull, and row . d >= |d|^2 for every row.
            scales.append(float(got.square().sum() / along.amin()))
            assert float(along.amin()) > 0
            hull = torch.linalg.lstsq(
                torch.cat([matrix, torch.ones(len(matrix), 1, dtype=F64) * 100], 1).T,
                torch.cat([got / scales[-1], torch.tensor([100.0], dtype=F64)]),
            )
            assert float(hull.solution.amin()) > -1e-6
        assert scales[0] == pytest.approx(scales[1], rel=1e-5)
        assert result.report.conflicts_after == 0
        for client, row in zip(ids, rows, strict=True):
            history[client] = (number, row)


def test_fedlf_equal_losses_have_no_fair_row(device: torch.device) -> None:
    rows = noise(0, 3, 20)
    steps = [
        one_round(FedLF(device=device), noise(1, 20), rows, losses=losses)[0]
        for losses in ([2.0, 2.0, 2.0], [2.0, 2.0000001, 2.0], [0.0, 0.0, 0.0])
    ]
    close(steps[0], steps[1])
    close(steps[0], steps[2])
    other, _ = one_round(FedLF(device=device), noise(1, 20), rows, losses=[2.0, 2.1, 2.0])
    assert float((other - steps[0]).abs().amax()) > 1e-3


def test_fedlf_merges_layers_without_common_descent(device: torch.device) -> None:
    """Opposite in the first layer: with the next one there is a direction for both."""
    rows = noise(0, 2, 20)
    rows[1, :7] = -2 * rows[0, :7]
    losses = [1.0, 1.0]
    step, _ = one_round(FedLF(device=device), noise(1, 20), rows, losses=losses)
    merged, _ = one_round(FedLF(device=device), noise(1, 20), rows, losses=losses, layers=(11, 9))
    close(step, merged)
    assert bool(step[:7].any())
    code, _ = one_round(FedLF(variant="code", device=device), noise(1, 20), rows, losses=losses)
    assert not code[:7].any()
    # The last layer joins the one before it.
    rows = rows.flip(1)
    step, _ = one_round(FedLF(device=device), noise(1, 20), rows, losses=losses, layers=(9, 4, 7))
    close(step, merged.flip(0))


def test_fedlf_stops_where_nothing_helps_everybody(device: torch.device) -> None:
    row = noise(0, 20)
    for variant in ("paper", "code"):
        rule = FedLF(variant=variant, device=device)  # type: ignore[arg-type]
        step, _ = one_round(rule, noise(1, 20), torch.stack([row, -3 * row]), losses=[1.0, 1.0])
        assert not step.any()


@pytest.mark.parametrize(
    ("rate", "least", "wanted"),
    [(8.0, 0.5, 8.0), (8.0, -1e-8, 8.0), (8.0, -5e-7, 2.0), (8.0, -1.0, 1.0), (1.5, -1.0, 1.0)],
)
def test_fedlf_codes_guard(rate: float, least: float, wanted: float) -> None:
    """The factor is halved while it is above 2, and then left out, for rounding below zero."""
    assert _harmless(rate, least) == wanted


# -- a model-wide rule and its layers --------------------------------------------------------------


@pytest.mark.parametrize("make", [ConFIG, FedMGDA, FedFV])
def test_model_wide_rules_do_not_see_layers(make: Any, device: torch.device) -> None:
    rows, theta = noise(0, 4, 20), noise(1, 20)
    step, result = one_round(make(device=device), theta, rows, losses=[1.0, 2.0, 3.0, 4.0])
    other, _ = one_round(
        make(device=device), theta, rows, losses=[1.0, 2.0, 3.0, 4.0], layers=(20,)
    )
    close(step, other)
    (group,) = result.report.groups
    assert (group.name, group.width) == ("model", 20)
    layered, _ = one_round(
        make(granularity="layer", device=device), theta, rows, losses=[1.0, 2.0, 3.0, 4.0]
    )
    assert float((layered - step).abs().amax()) > 1e-3


@pytest.mark.parametrize("block_bytes", [64, 5000, None])
def test_adaptive_rules_in_parts(block_bytes: int | None, device: torch.device) -> None:
    """However little memory there is to work in, the same numbers."""
    rule = FedAdam(device=device, block_bytes=block_bytes)
    plain = FedAdam(device=device)
    theta = noise(0, 3000)
    for number in range(3):
        rows = noise(1 + number, 4, 3000)
        step, report = one_round(rule, theta, rows, layers=(1000, 500, 1500))
        wanted, other = one_round(plain, theta, rows, layers=(1000, 500, 1500))
        close(step, wanted)
        for one, two in zip(report.report.groups, other.report.groups, strict=True):
            assert one.step_norm == pytest.approx(two.step_norm)
            assert one.conflicts_after == two.conflicts_after
