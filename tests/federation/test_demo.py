"""The demonstration for a Python on which FedML cannot be installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo" / "federation_demo.py"


@pytest.mark.slow
def test_the_demo_says_what_it_is_and_shows_both_federations(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), "--rounds", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "This is the bundled federation" in done.stdout
    assert ("FedML 0.9.6 cannot be installed" in done.stdout) == (sys.version_info >= (3, 12))
    (out,) = tmp_path.iterdir()
    summary = [json.loads(line) for line in (out / "summary.jsonl").read_text().splitlines()]
    assert len({(row["world"], row["rule"]) for row in summary}) == 6
    published = [row for row in summary if row["rule"] == "CRAFT, published"]
    assert all(row["conflicts_after"] < 1 for row in published)
    assert {path.name for path in out.glob("*.png")} == {"accuracy.png", "clients.png"}
    for world in {row["world"] for row in summary}:
        assert world in done.stdout
