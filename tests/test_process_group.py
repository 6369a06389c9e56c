"""One model over several processes: real ones, with Gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from craft_adapters import ClientUpdate, get_aggregator

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)

WORKER = Path(__file__).with_name("process_group_worker.py")

CASES: dict[str, dict[str, Any]] = {
    "published": {"rule": "craft"},
    "ema, steady": {
        "rule": "craft",
        "options": {"reference": "ema", "scale": "steady", "client_length": 1.0},
    },
    "float64": {"rule": "craft", "dtype": "float64"},
    "balanced": {"rule": "craft_balanced"},
    "more clients than numbers": {"rule": "craft", "clients": 40},
    "fedavg": {"rule": "fedavg"},
    "a client with NaN in one shard": {"rule": "craft", "spoilt": 1},
    "dtensor": {"rule": "craft", "dtensor": True},
    "whole clients on each rank": {"rule": "craft", "by_clients": True},
    "whole clients, float64 and more of them": {
        "rule": "craft",
        "by_clients": True,
        "dtype": "float64",
        "clients": 7,
        "options": {"scale": "client_norm"},
    },
    "whole clients, fewer than ranks": {"rule": "fedavg", "by_clients": True, "clients": 1},
    "small blocks": {"rule": "craft", "options": {"block_bytes": 3000}},
}


def federation(case: Mapping[str, Any], round: int) -> tuple[dict[str, Tensor], list[ClientUpdate]]:
    """The whole model and the clients' whole replies; the worker cuts them in shards."""
    generator = torch.Generator().manual_seed(round)
    shapes = {"a.weight": (7, 5), "a.bias": (7,), "b.weight": (2, 9), "b.bias": (2,)}
    if case.get("by_clients"):  # what cannot be cut in rows is not this test's to cut
        shapes |= {"b.scale": (), "norm.running_mean": (3,), "norm.num_batches_tracked": ()}
    kind = getattr(torch, case.get("dtype", "float32"))

    def draw() -> dict[str, Tensor]:
        values = {n: torch.randn(s, generator=generator).to(kind) for n, s in shapes.items()}
        if "norm.num_batches_tracked" in values:
            values["norm.num_batches_tracked"] = torch.randint(9, (), generator=generator)
        return values

    theta = draw()
    updates = [ClientUpdate(i, 3 + i % 4, draw()) for i in range(case.get("clients", 4))]
    if "spoilt" in case:
        updates[case["spoilt"]].values["b.weight"][1, 8] = torch.nan  # type: ignore[index]
    return theta, updates


SPECIAL: dict[str, dict[str, Any]] = {
    "disagree": {"rule": "craft", "disagree": True},
    "replicate": {"rule": "craft", "dtensor": True, "replicate": True},
}


@pytest.fixture(
    scope="module",
    params=[2, pytest.param(4, marks=pytest.mark.slow)],
    ids="{} ranks".format,
)
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank reports, by rank: processes are dear, so one set of them runs all cases."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = request.param
    cases = json.dumps({**CASES, **SPECIAL})
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(ranks), str(folder), cases],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in started:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("name", CASES)
def test_as_on_one_process(name: str, answers: list[dict[str, Any]]) -> None:
    case = CASES[name]
    rule = get_aggregator(case["rule"], device="cpu", **case.get("options", {}))
    dtype = case.get("dtype", "float32")
    tolerance = 1e-10 if dtype == "float64" else 2e-5
    for number in range(2):
        theta, updates = federation(case, number)
        result = rule.aggregate(theta, updates)
        rounds = [answer[name]["rounds"][number] for answer in answers]
        for there in rounds:
            for entry, value in result.state.items():
                got = torch.tensor(there["state"][entry], dtype=value.dtype).view(value.shape)
                assert torch.allclose(got, value, rtol=tolerance, atol=tolerance), entry
            assert there["dropped"] == [[d.client_id, d.entry] for d in result.report.dropped]
            for group, ours in zip(there["groups"], result.report.groups, strict=True):
                assert group["width"] == ours.width
                assert group["conflicts_before"] == ours.conflicts_before
                assert group["rank"] == ours.rank
                assert group["step_norm"] == pytest.approx(ours.step_norm, rel=1e-4)
        # To the bit the same on every rank.
        assert all(there == rounds[0] for there in rounds)


def test_one_all_reduce_of_the_grams_a_step(answers: list[dict[str, Any]]) -> None:
    """However many layers there are: clients, Gram matrices, lengths of the steps."""
    for answer in answers:
        assert answer["published"]["all_reduces"] == [3, 3]


def test_ranks_that_disagree_are_told(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert "do not agree on clients" in answer["disagree"]["error"]


def test_a_dtensor_that_is_copied_is_refused(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert "'a.weight'" in answer["replicate"]["error"]
        assert "Shard placements" in answer["replicate"]["error"]
