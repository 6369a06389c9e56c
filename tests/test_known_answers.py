"""CRAFT's and FedAvg's known answers, which an independent numpy implementation computed.

tests/data/known_answers.json holds them; CRAFT's agree with the published class to 2.3e-16. Where
the design decides otherwise, EXCEPTIONS says why, and the value that it wants instead is checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from craft_adapters import AggregationResult, ClientUpdate, NoUsableUpdates
from craft_adapters.aggregators import Craft, FedAvg

Kind = Literal["state", "update"]
Case = Mapping[str, Any]

FILE = Path(__file__).parent / "data" / "known_answers.json"
CASES: dict[str, Case] = {
    case["id"]: case for case in json.loads(FILE.read_text(encoding="utf-8"))["cases"]
}
ENTRY = "layer.weight"


def vector(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


def close(got: Tensor, wanted: list[float], tolerance: float) -> None:
    expected = torch.tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(got.cpu(), expected, rtol=0.0, atol=tolerance)


def federation(
    theta: Tensor, updates: list[Tensor], counts: list[float], kind: Kind, entry: str = ENTRY
) -> tuple[dict[str, Tensor], list[ClientUpdate]]:
    sent = [theta - g if kind == "state" else g for g in updates]
    clients = [
        ClientUpdate(i, n, {entry: value}, kind)
        for i, (n, value) in enumerate(zip(counts, sent, strict=True))
    ]
    return {entry: theta}, clients


def craft_round(
    case: Case, kind: Kind, device: torch.device, entry: str = ENTRY
) -> tuple[Tensor, AggregationResult, Craft]:
    """The step that the model made, the result and the rule."""
    inputs = case["inputs"]
    rows = [vector(g, device) for g in inputs["g_layer"]]
    rule = Craft(server_lr=1.0, device=device, **case["hyperparameters"])
    if inputs["prev_layer_update"] is not None:
        past = vector(inputs["prev_layer_update"], device)
        rule.load_state_dict({"reference": {entry: past}})
    theta = vector([0.5, -2.0, 0.25][: len(rows[0])], device)
    state, clients = federation(theta, rows, [100 * share for share in inputs["rho"]], kind, entry)
    result = rule.aggregate(state, clients)
    return theta - result.state[entry], result, rule


def fedavg_round(case: Case, kind: Kind, device: torch.device) -> tuple[Tensor, Tensor]:
    """The next model and the step."""
    inputs = case["inputs"]
    theta = vector(inputs["theta"], device)
    updates = [theta - vector(local, device) for local in inputs["client_thetas"]]
    state, clients = federation(theta, updates, inputs["n"], kind)
    result = FedAvg(device=device).aggregate(state, clients)
    return result.state[ENTRY], theta - result.state[ENTRY]


def one_client_follows_the_formula(case: Case, kind: Kind, device: torch.device) -> None:
    step, result, rule = craft_round(case, kind, device)
    past = case["inputs"]["prev_layer_update"]
    # r + (rho - u.r) u, with rho = 1
    wanted = {"craft_single_usable_client": [0.6, 0.8, 1.0]}.get(case["id"], [0.6, -0.8])
    close(step, wanted, case["tolerance"])
    close(rule.state_dict()["reference"][ENTRY], wanted, case["tolerance"])
    (group,) = result.report.groups
    assert group.rank == 1
    assert group.clients == (0,)
    assert (group.cosine_to_reference is None) is (past is None)


def no_client_has_examples(case: Case, kind: Kind, device: torch.device) -> None:
    with pytest.raises(NoUsableUpdates):
        craft_round(case, kind, device)


def buffers_are_averaged(case: Case, kind: Kind, device: torch.device) -> None:
    step, result, rule = craft_round(case, kind, device, entry="bn.running_var")
    close(step, [0.005, 0.005], case["tolerance"])
    assert result.report.groups == ()
    assert rule.state_dict()["reference"] == {}
    # As the weights of a layer, the same numbers have the published answer.
    close(craft_round(case, kind, device)[0], case["expected"]["update"], case["tolerance"])


def absent_clients_have_no_weight(case: Case, kind: Kind, device: torch.device) -> None:
    renormalised = CASES["fedavg_partial_renormalised"]
    assert renormalised["inputs"] == case["inputs"]
    close(
        fedavg_round(case, kind, device)[0],
        renormalised["expected"]["theta_next"],
        case["tolerance"],
    )


EXCEPTIONS: dict[str, tuple[str, Callable[[Case, Kind, torch.device], None]]] = {
    "craft_single_usable_client": (
        "the published code returns the one active client's raw update, whose length has nothing "
        "to do with the others' and which forgets the reference; ours is the same formula",
        one_client_follows_the_formula,
    ),
    "craft_single_active_client": (
        "as craft_single_usable_client: a step of length 1, not the raw update",
        one_client_follows_the_formula,
    ),
    "craft_rho_all_zero": (
        "a client with zero examples is left out whole; nobody is left, so NoUsableUpdates "
        "instead of uniform targets",
        no_client_has_examples,
    ),
    "craft_bn_variance_buffer": (
        "running statistics are averaged, never projected: here the projection would make a "
        "variance negative",
        buffers_are_averaged,
    ),
    "fedavg_partial_keep_old": (
        "another variant, in which the share of absent clients stays on the old model; ours "
        "renormalises over those present, as fedavg_partial_renormalised",
        absent_clients_have_no_weight,
    ),
}
REGULAR = [name for name in CASES if name not in EXCEPTIONS]


def test_no_case_is_left_out() -> None:
    assert len(CASES) == len(json.loads(FILE.read_text(encoding="utf-8"))["cases"]) == 20
    assert set(EXCEPTIONS) <= set(CASES)
    assert len(REGULAR) + len(EXCEPTIONS) == len(CASES)
    assert all(name.startswith(("craft_", "fedavg_")) for name in CASES)
    assert all(reason for reason, _ in EXCEPTIONS.values())


@pytest.mark.parametrize("kind", ["state", "update"])
@pytest.mark.parametrize("name", REGULAR)
def test_known_answer(name: str, kind: Kind, device: torch.device) -> None:
    case = CASES[name]
    expected, tolerance = case["expected"], case["tolerance"]
    checked = set()
    if name.startswith("craft_"):
        step, result, rule = craft_round(case, kind, device)
        (group,) = result.report.groups
        close(step, expected["update"], tolerance)
        # What is remembered is the step before server_lr, not normalised; zero if it cancelled.
        close(rule.state_dict()["reference"][ENTRY], expected["update"], tolerance)
        rows = torch.tensor(case["inputs"]["g_layer"], dtype=torch.float64)
        units = torch.nn.functional.normalize(rows[list(group.clients)], dim=1)
        close(units @ step.cpu(), expected["alignment"], tolerance)
        checked = {"update", "alignment"}
    else:
        after, step = fedavg_round(case, kind, device)
        close(after, expected["theta_next"], tolerance)
        checked = {"theta_next"}
        if "update" in expected:
            close(step, expected["update"], tolerance)
            checked.add("update")
    assert checked == set(expected)


@pytest.mark.parametrize("kind", ["state", "update"])
@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exception(name: str, kind: Kind, device: torch.device) -> None:
    EXCEPTIONS[name][1](CASES[name], kind, device)


@pytest.mark.parametrize("kind", ["state", "update"])
def test_cancelled_step_is_exactly_zero(kind: Kind, device: torch.device) -> None:
    """Rounding noise must not become a unit reference: the design's guard."""
    step, _, rule = craft_round(CASES["craft_opposite_equal_weights"], kind, device)
    assert not step.any()
    assert not rule.state_dict()["reference"][ENTRY].any()


@pytest.mark.parametrize("kind", ["state", "update"])
def test_group_without_active_clients_forgets_its_reference(
    kind: Kind, device: torch.device
) -> None:
    _, result, rule = craft_round(CASES["craft_all_zero"], kind, device)
    assert not rule.state_dict()["reference"][ENTRY].any()
    (group,) = result.report.groups
    assert group.inactive == (0, 1)
    assert "weighted average" in group.note
