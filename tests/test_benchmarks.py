"""The benchmark runs and its table is complete. What it measures is for people to judge."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "aggregate.py"


def run(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Table and JSON of two tiny rows, one of which counts as slow."""
    file = tmp_path_factory.mktemp("benchmark") / "numbers.json"
    done = run("--quick", "--rows", "tiny", "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(file.read_text(encoding="utf-8"))


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, int | float) else []


def test_the_table_has_a_line_for_each_row(answer: tuple[str, dict[str, Any]]) -> None:
    table = [line for line in answer[0].splitlines() if line.startswith("|")]
    assert len(table) == 4
    assert len({line.count("|") for line in table}) == 1
    assert table[2].startswith("| tiny x 3 ")
    assert table[3].startswith("| tiny x 5 ")


def test_a_rule_that_was_left_out_is_shown_with_the_reason(
    answer: tuple[str, dict[str, Any]],
) -> None:
    assert "(1) tinyx5, published: left out by --quick" in answer[0].splitlines()
    row = answer[1]["rows"][1]
    assert row["published"] == {"reason": "left out by --quick"}
    assert "published_over_ours" not in row


def test_the_numbers_are_complete_and_finite(answer: tuple[str, dict[str, Any]]) -> None:
    about, rows = answer[1]["about"], answer[1]["rows"]
    assert {"python", "torch", "craft_adapters", "cpu", "cores", "threads"} <= about.keys()
    assert all(map(math.isfinite, numbers(answer[1])))
    for row in rows:
        for rule in ("ours", "fedml"):
            assert row[rule]["seconds"] == min(row[rule]["all"]) > 0
        assert row["ours_over_fedml"] > 0
        assert row["largest_block_bytes"] == row["clients"] * 8 * 16 * 4
        assert row["memory"].keys() & {"bytes", "reason"}
    assert rows[0]["published_over_ours"] > 0


def test_the_published_rule_and_ours_meet_the_targets(
    answer: tuple[str, dict[str, Any]],
) -> None:
    for row in answer[1]["rows"]:
        assert row["ours"]["missed"] < 1e-5
    assert answer[1]["rows"][0]["published"]["missed"] < 1e-4


def test_an_unknown_row_is_refused_with_the_known_ones() -> None:
    done = run("--rows", "resnet18")
    assert done.returncode == 2
    assert "resnet20x10" in done.stderr
