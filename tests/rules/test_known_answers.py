"""Known answers of the rules that CRAFT is compared with.

known_answers.json beside this file holds them, in the format of tests/data/known_answers.json;
they were computed by an independent numpy implementation and checked against published code.
Every number of every case is compared: a case whose ``expected`` has a key that nobody checks
fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from craft_adapters import AggregationResult, Aggregator, ClientUpdate, Layout
from craft_adapters._layout import Group
from craft_adapters.aggregators import (
    AFL,
    ConFIG,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedFV,
    FedLF,
    FedMGDA,
    FedNova,
    FedProx,
    FedYogi,
    QFedAvg,
)
from craft_adapters.aggregators._convex import min_norm_point, simplex_projection
from craft_adapters.aggregators.fedfv import kept_clients
from craft_adapters.aggregators.fedlf import fair_weights
from craft_adapters.aggregators.fednova import normaliser

from ..test_known_answers import ENTRY, Case, Kind, close, federation, vector

FILE = Path(__file__).with_name("known_answers.json")
CASES: dict[str, Case] = {
    case["id"]: case for case in json.loads(FILE.read_text(encoding="utf-8"))["cases"]
}
F64 = torch.float64
Checked = set[str]


def moved(
    rule: Aggregator,
    theta: Tensor,
    rows: list[list[float]],
    kind: Kind,
    counts: list[float] | None = None,
    **reports: list[float],
) -> tuple[Tensor, AggregationResult]:
    """The next model and the result of one round, with what clients report besides."""
    updates = [vector(row, theta.device) for row in rows]
    state, clients = federation(theta, updates, counts or [1.0] * len(rows), kind)
    clients = [
        ClientUpdate(
            c.client_id,
            c.num_examples,
            c.values,
            c.kind,
            **{name: values[i] for name, values in reports.items()},  # type: ignore[arg-type]
        )
        for i, c in enumerate(clients)
    ]
    result = rule.aggregate(state, clients)
    return result.state[ENTRY], result


# -- one function per algorithm: checks a case, returns the keys of `expected` that it compared ----


def fedprox(case: Case, kind: Kind, device: torch.device) -> Checked:
    inputs, options = case["inputs"], case["hyperparameters"]
    start, optimum = vector(inputs["theta"], device), vector(inputs["a"], device)
    rule = FedProx(mu=options["mu"], device=device)
    local = start.clone().requires_grad_()
    lr = options.get("lr", 0.5)
    path = []
    for _ in range(inputs.get("steps", 200)):
        local.grad = None
        (0.5 * (local - optimum).square().sum()).backward()
        rule.add_proximal_gradient([local], [start])
        with torch.no_grad():
            local -= lr * local.grad
        path.append(local.detach().clone())
    close(path[-1], case["expected"]["theta_client"], case["tolerance"])
    # The server's step is the mean.
    mean, _ = moved(rule, start, [(start - path[-1]).tolist(), [0.0, 0.0]], kind)
    torch.testing.assert_close(mean, (path[-1] + start) / 2)
    if "trajectory" not in case["expected"]:
        return {"theta_client"}
    for point, wanted in zip(path, case["expected"]["trajectory"], strict=True):
        close(point, wanted, case["tolerance"])
    return {"theta_client", "trajectory"}


def fednova(case: Case, kind: Kind, device: torch.device) -> Checked:
    inputs, options, expected = case["inputs"], case["hyperparameters"], case["expected"]
    tau = [float(steps) for steps in inputs["tau"]]
    rule = FedNova(
        server_momentum=options.get("gmf", 0.0),
        client_momentum=options.get("client_momentum", 0.0),
        device=device,
    )
    theta = vector(inputs["theta"], device)
    counts = [100 * p for p in inputs["p"]]
    rows = inputs.get("g") or inputs["g_each_round"]
    path = []
    for _ in range(len(expected.get("theta_rounds", [0]))):
        theta, _ = moved(rule, theta, rows, kind, counts, local_steps=inputs["tau"])
        path.append(theta)
    for point, wanted in zip(
        path, expected.get("theta_rounds") or [expected["theta_next"]], strict=True
    ):
        close(point, wanted, case["tolerance"])
    work = normaliser(torch.tensor(tau, dtype=F64), rule.client_momentum)
    if "a_norm" in expected:
        close(work, expected["a_norm"], case["tolerance"])
        effective = float(work @ torch.tensor(inputs["p"], dtype=F64))
        assert effective == pytest.approx(expected["tau_eff"], abs=case["tolerance"])
    return set(expected)


def fedavgm(case: Case, kind: Kind, device: torch.device) -> Checked:
    inputs, expected = case["inputs"], case["expected"]
    rule = FedAvgM(device=device, **case["hyperparameters"])
    theta = vector(inputs["theta"], device)
    for row, v, wanted in zip(
        inputs["mean_g_rounds"], expected["v_rounds"], expected["theta_rounds"], strict=True
    ):
        theta, _ = moved(rule, theta, [row], kind)
        close(theta, wanted, case["tolerance"])
        close(rule.state_dict()["velocity"][ENTRY], v, case["tolerance"])
    return set(expected)


def fedopt(case: Case, kind: Kind, device: torch.device) -> Checked:
    inputs, options = case["inputs"], dict(case["hyperparameters"])
    name, _, rest = case["id"].partition("_")
    make: Any = {"fedadagrad": FedAdagrad, "fedadam": FedAdam, "fedyogi": FedYogi}[name]
    options.pop("bias_correction", None)
    options["server_lr"] = options.pop("eta")
    options["initial_accumulator"] = options.pop("v_init")
    if make is FedAdagrad:
        options.pop("beta2", None)
    elif variant := next((word for word in ("flower", "keras") if word in rest), None):
        options["bias_correction"] = variant
        assert options.pop("initial_accumulator") == 0.0  # the default of these variants
    elif options["initial_accumulator"] == options["tau"] ** 2:
        options.pop("initial_accumulator")  # the default
    rule = make(device=device, **options)
    theta = vector(inputs["theta"], device)
    for change, wanted in zip(inputs["mean_delta_rounds"], case["expected"]["rounds"], strict=True):
        assert set(wanted) == {"m", "v", "theta"}
        theta, _ = moved(rule, theta, [[-number for number in change]], kind)
        close(theta, wanted["theta"], case["tolerance"])
        state = rule.state_dict()
        close(-state["m"][ENTRY], wanted["m"], case["tolerance"])  # ours has the updates' sign
        close(state["v"][ENTRY], wanted["v"], case["tolerance"])
    return {"rounds"}


def afl(case: Case, kind: Kind, device: torch.device) -> Checked:
    inputs, expected = case["inputs"], case["expected"]
    if "y" in inputs:
        found = simplex_projection(torch.tensor(inputs["y"], dtype=F64))
        if "wrong_projection" in expected:  # a published helper's defect
            assert float((found - torch.tensor(expected["wrong_projection"])).abs().amax()) > 0.01
            assert float(found.sum()) == pytest.approx(1.0)
            assert expected["wrong_sum"] != pytest.approx(1.0)
            return set(expected)
        close(found, expected["projection"], case["tolerance"])
        return {"projection"}
    rule = AFL(lambda_lr=case["hyperparameters"]["lambda_lr"], device=device)
    theta = vector(inputs["theta"], device)
    path = [1 / 3] * 3
    close(torch.tensor(path, dtype=F64), expected["lambda_rounds"][0], case["tolerance"])
    for rows, loss, weights, wanted in zip(
        inputs["g_rounds"],
        inputs["losses_rounds"],
        expected["lambda_rounds"][1:],
        expected["theta_rounds"],
        strict=True,
    ):
        theta, result = moved(rule, theta, rows, kind, loss=loss)
        close(theta, wanted, case["tolerance"])
        close(torch.tensor(list(rule.weights.values()), dtype=F64), weights, case["tolerance"])
    close(rule.averaged_model(result.state)[ENTRY], expected["averaged_model"], case["tolerance"])
    return set(expected)


def qfedavg(case: Case, kind: Kind, device: torch.device) -> Checked:
    inputs, expected, options = case["inputs"], case["expected"], case["hyperparameters"]
    rule = QFedAvg(device=device, **options)
    theta = vector(inputs["theta"], device)
    after, _ = moved(rule, theta, inputs["g"], kind, loss=inputs["losses"])
    close(after, expected["theta_next"], case["tolerance"])
    # Delta and h are not kept: what they amount to is the weight on each client.
    wanted = torch.tensor(inputs["losses"], dtype=F64) + options["loss_eps"]
    wanted = wanted ** options["q"] / options["client_lr"] / sum(expected["h"])
    steps = (theta - after).cpu()
    rows = torch.tensor(inputs["g"], dtype=F64)
    torch.testing.assert_close(steps, wanted @ rows, rtol=1e-9, atol=case["tolerance"])
    if "Delta" in expected:
        total = torch.tensor(expected["Delta"], dtype=F64).sum(0) / sum(expected["h"])
        close(steps, total.tolist(), case["tolerance"])
    return {"theta_next", "h", "Delta"} & set(expected)


def fedmgda(case: Case, kind: Kind, device: torch.device) -> Checked:
    inputs, options, expected = case["inputs"], case["hyperparameters"], case["expected"]
    assert options["normalise"]
    rule = FedMGDA(server_lr=options["eta"], epsilon=options["epsilon"], device=device)
    theta = vector(inputs["theta"], device)
    after, _ = moved(rule, theta, inputs["g"], kind, inputs["n"])
    close(theta - after, expected["direction"], case["tolerance"])
    if "theta_next" in expected:
        close(after, expected["theta_next"], case["tolerance"])
    if "lambda_" in expected:  # the rows are independent: the direction has one lambda
        rows = torch.nn.functional.normalize(torch.tensor(inputs["g"], dtype=F64), dim=1)
        weights = torch.tensor(expected["lambda_"], dtype=F64)
        close((theta - after).cpu(), (weights @ rows).tolist(), case["tolerance"])
    return {"direction", "theta_next", "lambda_"} & set(expected)


def fedfv(case: Case, kind: Kind, device: torch.device) -> Checked:
    inputs, options, expected = case["inputs"], case["hyperparameters"], case["expected"]
    if "kept" in expected:
        assert [kept_clients(m, options["alpha"]) for m in inputs["m"]] == expected["kept"]
        return {"kept"}
    variant: Any = "code" if case["variant"].startswith("code") else "paper"
    rule = FedFV(alpha=options["alpha"], tau=options["tau"], variant=variant, device=device)
    rule.load_state_dict({"rounds": inputs["round"]})
    theta = torch.zeros(2, dtype=F64, device=device)
    after, _ = moved(rule, theta, inputs["g"], kind, loss=inputs["losses"])
    close(theta - after, expected["update"], case["tolerance"])
    if "order" not in expected:
        return {"update"}
    order = torch.tensor(inputs["losses"]).argsort(stable=True).tolist()
    count = len(order)
    assert order == expected["order"]
    kept = order[count - kept_clients(count, options["alpha"]) :]
    assert kept == expected["keep_original"]
    # Step by step, the projected vectors give what the rule gave in one go.
    rows = torch.tensor(inputs["g"], dtype=F64)
    projected = torch.tensor(expected["projected"], dtype=F64)
    for i in kept:
        torch.testing.assert_close(projected[i], rows[i])
    close(projected.mean(0), expected["after_internal"], case["tolerance"])
    external = torch.tensor(expected["after_external"], dtype=F64)
    length = torch.linalg.vector_norm(rows.mean(0))
    scaled = torch.nn.functional.normalize(external, dim=0) * length
    close((theta - after).cpu(), scaled.tolist(), case["tolerance"])
    return set(expected)


def fedlf(case: Case, kind: Kind, device: torch.device) -> Checked:
    inputs, expected = case["inputs"], case["expected"]
    if "last_seen_round" in inputs:
        return fedlf_window(case, device)
    loss = torch.tensor(inputs["losses"], dtype=F64)
    if "h" in expected:
        close(fair_weights(loss), expected["h"], case["tolerance"])
    if "g" not in inputs:
        return {"h"}
    rows = torch.tensor(inputs["g"], dtype=F64)
    layers = [f"layer{i}.weight" for i in range(len(inputs["layers"]))]
    rule = FedLF(
        variant=case["variant"],
        layout=Layout(tuple(Group(name, (name,)) for name in layers)),
        device=device,
    )

    def cut(flat: Tensor) -> dict[str, Tensor]:
        parts = zip(layers, inputs["layers"], strict=True)
        return {name: flat[start:stop].to(device) for name, (start, stop) in parts}

    theta = torch.linspace(-1, 1, rows.shape[1], dtype=F64)
    clients = [
        ClientUpdate(i, 1, cut(row if kind == "update" else theta - row), kind, loss=float(f))
        for i, (row, f) in enumerate(zip(rows, loss, strict=True))
    ]
    result = rule.aggregate(cut(theta), clients)
    step = theta - torch.cat([result.state[name].cpu() for name in layers])
    close(step, expected["update"], case["tolerance"])
    close(rows @ step, expected["alignment"], case["tolerance"])
    # The step is the direction, rescaled; the direction is made of each layer's rows.
    direction = torch.tensor(expected["direction"], dtype=F64)
    length = torch.linalg.vector_norm(step) / torch.linalg.vector_norm(direction)
    close(step, (length * direction).tolist(), case["tolerance"])
    for (start, stop), weights, fair in zip(
        inputs["layers"], expected["lambdas"], expected["fair_rows"], strict=True
    ):
        part = rows[:, start:stop]
        if case["variant"] == "code":
            norms = torch.linalg.vector_norm(part, dim=1, keepdim=True)
            part = part / norms * norms.mean()
        part = torch.cat([part, torch.tensor([fair], dtype=F64)])
        found = min_norm_point(part @ part.T)
        close(found, weights, case["tolerance"])
        close(found @ part, expected["direction"][start:stop], case["tolerance"])
    return set(expected)


def fedlf_window(case: Case, device: torch.device) -> Checked:
    inputs, expected = case["inputs"], case["expected"]
    seen = {int(client): number for client, number in inputs["last_seen_round"].items()}
    theta = {ENTRY: torch.zeros(2, dtype=F64, device=device)}
    rule = FedLF(variant="code", device=device)
    asked: list[int] = []
    combine = rule.combine

    def spy(grams: Any) -> Any:
        asked[:] = [update.client_id for update in grams.past]
        return combine(grams)

    rule.combine = spy  # type: ignore[method-assign]
    for number in range(inputs["round"] + 1):
        clients = [client for client, last in seen.items() if last == number]
        clients = inputs["online"] if number == inputs["round"] else clients or [max(seen) + 1]
        values = {ENTRY: torch.tensor([1.0, float(number)], dtype=F64, device=device)}
        rule.aggregate(theta, [ClientUpdate(c, 1, values, "update", loss=1.0) for c in clients])
        if number == inputs["round"] - 1:
            # Drop the stand-in of rounds in which nobody of the case was seen.
            state = rule.state_dict()
            for table in ("last", "updates"):
                state[table].pop(str(max(seen) + 1), None)
            rule.load_state_dict(state)
            assert rule.window(len(inputs["online"])) == expected["tau"]
    assert asked == expected["used_absent"]
    return {"tau", "used_absent"}


def config(case: Case, kind: Kind, device: torch.device) -> Checked:
    inputs, expected = case["inputs"], case["expected"]
    rule = ConFIG(device=device)
    theta = torch.ones(2, dtype=F64, device=device)
    after, result = moved(rule, theta, inputs["g"], kind)
    step = (theta - after).cpu()
    close(step, expected["update"], case["tolerance"])
    assert float(torch.linalg.vector_norm(step)) == pytest.approx(
        expected["length"], abs=case["tolerance"]
    )
    close(step, [expected["length"] * x for x in expected["unit"]], case["tolerance"])
    (group,) = result.report.groups
    best = torch.tensor(expected["best_direction"], dtype=F64)
    length = float(torch.linalg.vector_norm(best))
    assert group.step_norm == pytest.approx(length, abs=case["tolerance"])
    close(step, (best / max(length, 1e-12) * expected["length"]).tolist(), case["tolerance"])
    return {"update", "length", "unit", "best_direction"}


CHECKS: Mapping[str, Callable[[Case, Kind, torch.device], Checked]] = {
    "FedProx": fedprox,
    "FedNova": fednova,
    "FedAvgM": fedavgm,
    "FedAdagrad": fedopt,
    "FedAdam": fedopt,
    "FedYogi": fedopt,
    "AFL": afl,
    "q-FedAvg": qfedavg,
    "FedMGDA+": fedmgda,
    "FedFV": fedfv,
    "FedLF": fedlf,
    "ConFIG": config,
}


def test_no_case_is_left_out() -> None:
    assert len(CASES) == len(json.loads(FILE.read_text(encoding="utf-8"))["cases"]) == 54
    assert {case["algorithm"] for case in CASES.values()} == set(CHECKS)


@pytest.mark.parametrize("kind", ["state", "update"])
@pytest.mark.parametrize("name", CASES)
def test_known_answer(name: str, kind: Kind, device: torch.device) -> None:
    case = CASES[name]
    assert CHECKS[case["algorithm"]](case, kind, device) == set(case["expected"])


@pytest.mark.parametrize("kind", ["state", "update"])
@pytest.mark.parametrize("name", ["config_opposite_rows", "fedfv_opposite_cancel"])
def test_what_cancels_is_exactly_zero(name: str, kind: Kind, device: torch.device) -> None:
    """Rounding noise must not be rescaled to a step."""
    rule: Aggregator = ConFIG(device=device) if "config" in name else FedFV(alpha=0, device=device)
    theta = torch.ones(2, dtype=F64, device=device)
    after, _ = moved(rule, theta, CASES[name]["inputs"]["g"], kind, loss=[1.0, 2.0])
    assert torch.equal(after, theta)


def test_equal_steps_are_fedavg(device: torch.device) -> None:
    case = CASES["fednova_equal_tau_is_fedavg"]
    theta = vector(case["inputs"]["theta"], device)
    counts = [100 * p for p in case["inputs"]["p"]]
    after, _ = moved(FedAvg(device=device), theta, case["inputs"]["g"], "update", counts)
    close(after, case["expected"]["theta_next"], case["tolerance"])
