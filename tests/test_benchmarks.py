"""The benchmarks run and their numbers are complete. What they measure is for people to judge."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
Answer = tuple[str, dict[str, Any], Path]


def run(script: str, *options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(BENCHMARKS / script), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def answer(script: str, folder: Path, *options: str) -> Answer:
    """What a script printed, its numbers, and the folder it wrote to."""
    done = run(script, "--out", folder, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    file = (folder / script).with_suffix(".json")
    return done.stdout, json.loads(file.read_text(encoding="utf-8")), folder


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, int | float) else []


def table(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    return lines


# --- aggregate.py -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def aggregate(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """Two tiny rows, one of which counts as slow."""
    return answer("aggregate.py", tmp_path_factory.mktemp("out"), "--quick", "--rows", "tiny")


def test_the_table_has_a_line_for_each_row(aggregate: Answer) -> None:
    lines = table(aggregate[0])
    assert len(lines) == 4
    assert lines[2].startswith("| tiny x 3 ")
    assert lines[3].startswith("| tiny x 5 ")


def test_what_was_left_out_is_shown_with_the_reason(aggregate: Answer) -> None:
    row = aggregate[1]["rows"][1]
    for rival in ("published", "torchjd", "conflictfree"):
        assert f"(1) tinyx5, {rival}: left out by --quick" in aggregate[0].splitlines()
        assert row["times"][rival] == {"reason": "left out by --quick"}
        assert f"{rival}_over_ours" not in row["ratios"]


@pytest.mark.parametrize("rival", ["torchjd", "conflictfree"])
def test_a_rival_runs_if_it_is_installed(aggregate: Answer, rival: str) -> None:
    row = aggregate[1]["rows"][0]
    if find_spec(rival):
        assert row["ratios"][f"{rival}_over_ours"] > 0
    else:
        assert row["times"][rival]["reason"].startswith("not installed")


def test_the_numbers_are_complete_and_finite(aggregate: Answer) -> None:
    about, rows = aggregate[1]["about"], aggregate[1]["rows"]
    assert {"python", "torch", "craft_adapters", "cpu", "cores", "threads"} <= about.keys()
    assert all(map(math.isfinite, numbers(aggregate[1])))
    for row in rows:
        for rule in ("ours", "fedml", "mean"):
            assert row["times"][rule]["seconds"] == min(row["times"][rule]["all"]) > 0
        floor = row["times"]["floor"]
        assert floor["parts"].keys() == {"read", "multiply", "apply"}
        assert floor["seconds"] == pytest.approx(sum(floor["parts"].values()))
        ours = row["times"]["ours"]["seconds"]
        assert row["ratios"]["ours_over_floor"] == pytest.approx(ours / floor["seconds"])
        assert row["largest_block_bytes"] == row["clients"] * 8 * 16 * 4
        assert row["memory"].keys() & {"bytes", "reason"}
    assert rows[0]["ratios"]["published_over_ours"] > 0


def test_the_published_rule_and_ours_meet_the_targets(aggregate: Answer) -> None:
    for row in aggregate[1]["rows"]:
        assert row["times"]["ours"]["missed"] < 1e-5
    assert aggregate[1]["rows"][0]["times"]["published"]["missed"] < 1e-4


def test_an_unknown_row_is_refused_with_the_known_ones() -> None:
    done = run("aggregate.py", "--rows", "resnet18")
    assert done.returncode == 2
    assert "resnet20x10" in done.stderr


def test_table_and_picture_are_in_the_folder_too(aggregate: Answer) -> None:
    assert (aggregate[2] / "aggregate.md").read_text(encoding="utf-8") == aggregate[0]
    pytest.importorskip("matplotlib")
    assert (aggregate[2] / "aggregate.png").read_bytes().startswith(b"\x89PNG")
