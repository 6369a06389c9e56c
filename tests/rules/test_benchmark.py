"""The benchmark of the rules runs, and its rivals come to the same steps."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest

from ..test_benchmarks import Answer, answer, numbers, run, table

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """Four clients of two layers."""
    return answer("rules.py", tmp_path_factory.mktemp("out"), "--rows", "tiny")


def test_every_rule_has_a_line_and_a_bar(rules: Answer) -> None:
    text, found, _ = rules
    titles = ["FedFV", "FedMGDA+", "FedMGDA+, free", "ConFIG", "FedLF"]
    assert [row["rule"] for row in found["rows"]] == titles
    assert len(table(text)) == 2 + len(titles)
    assert all(map(math.isfinite, numbers(found)))
    for row in found["rows"]:
        assert row["times"]["ours"]["seconds"] > 0
        (bar,) = row["bars"]
        assert bar["bar"] == 1
        assert bar["value"] == row["ratio"]


@pytest.mark.parametrize(
    ("rule", "package", "apart"),
    [
        ("FedFV", "flgo", 1e-5),
        ("FedMGDA+", "flgo", 1e-5),
        ("FedMGDA+, free", "torchjd", 0.05),  # theirs stops early
        ("ConFIG", "torchjd", 1e-5),
    ],
)
def test_rivals_that_are_installed_come_to_the_same_step(
    rules: Answer, rule: str, package: str, apart: float
) -> None:
    text, found, _ = rules
    (row,) = (row for row in found["rows"] if row["rule"] == rule)
    rival = row["times"]["rival"]
    if find_spec(package):
        assert rival["missed"] <= apart
        assert row["ratio"] > 0
    else:
        assert rival["reason"].startswith("not installed")
        assert row["ratio"] is None
        assert f"(1) tinyx4, {rule}, rival: {rival['reason']}" in text.splitlines()


def test_an_unknown_row_is_refused_with_the_known_ones() -> None:
    done = run("rules.py", "--rows", "resnet18")
    assert done.returncode == 2
    assert "resnet20x10" in done.stderr
