"""The benchmarks of the federation run, stop in time, and their numbers are complete."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from craft_adapters.simulation import read_config

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = (
    "model=mlp",
    "model.hidden=8",
    "partition.clients=6",
    "clients_per_round=2",
    "evaluate_every=2",
)


def run(script: str, *options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(BENCHMARKS / script), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def federation(folder: Path, *changes: str, minutes: float = 5) -> dict[str, Any]:
    where = ("--device", "cpu", "--data", "synthetic", "--images", "300", "--out", folder)
    overrides = [word for change in (*SMALL, *changes) for word in ("--set", change)]
    done = run("federation_gpu.py", *where, "--minutes", str(minutes), *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "federation_gpu.json").read_text())
    return found


@pytest.mark.slow
def test_the_paper_on_a_card_in_small(tmp_path: Path) -> None:
    found = federation(tmp_path, "rounds=3")
    assert (found["rounds"], found["of"], found["ended"]) == (3, 3, "finished")
    assert "synthetic: 300 images of shape (3, 32, 32)" in found["about"]["data"]
    assert found["config"]["aggregator"]["name"] == "craft"
    assert [e["round"] for e in found["evaluations"]] == [0, 2, 3]
    assert all(0 <= e[figure] <= 1 for e in found["evaluations"] for figure in ("mean", "worst10"))
    times = found["seconds_of_one_round"]
    assert times["loop_over_many"] == pytest.approx(times["loop"] / times["many"])
    assert found["images_per_second"] > 0
    assert found["aggregate_seconds"] > 0


@pytest.mark.slow
def test_it_stops_when_the_time_is_up_and_goes_on(tmp_path: Path) -> None:
    stopped = federation(tmp_path, "rounds=4", "checkpoint_every=1", minutes=0)
    assert (stopped["rounds"], stopped["ended"]) == (0, "time is up")
    assert [e["round"] for e in stopped["evaluations"]] == [0]
    assert federation(tmp_path, "rounds=4", "checkpoint_every=1")["ended"] == "finished"


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--out", tmp_path, "--data", tmp_path / "none")
    done = run("federation_gpu.py", *options)
    assert done.returncode == 2
    assert "none does not exist" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so() -> None:
    done = run("federation_gpu.py", "--data", "synthetic")
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr


@pytest.mark.slow
def test_training_is_timed_against_a_plain_loop(tmp_path: Path) -> None:
    done = run("training.py", "--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "training.json").read_text())["rows"]
    assert row["times"].keys() == {"plain", "loop", "many", "auto"}
    for name, ratio in row["plain_over"].items():
        seconds = row["times"]["plain"]["seconds"] / row["times"][name]["seconds"]
        assert ratio == pytest.approx(seconds)
        assert math.isfinite(ratio)


def test_the_plain_loop_learns_as_the_federation_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """One full batch for each client, so that the order of the examples does not matter."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from training import engines, plain

    config = read_config({"partition": {"clients": 20}, "training": {"batch_size": 2000}})
    data = config.dataset()
    given = data, config.split(data), config.model(data), config.training, range(3)
    dataset, split, model, training, clients = given
    expected = plain(model, dataset, split, clients, training)
    for play in engines(*given).values():
        for trained, wanted in zip(play(), expected, strict=True):
            for name, value in wanted.items():
                torch.testing.assert_close(trained.state[name], value, rtol=1e-4, atol=1e-6)
