"""The real FLUTE, where ``CRAFT_FLUTE_HOME`` names a checkout: its hello world, and the kit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from craft_adapters.flute._harness import HOME

EXAMPLE = Path(__file__).parents[2] / "examples" / "flute" / "hello_world.py"
NEEDED = ("easydict", "cerberus", "psutil", "yaml", "scipy", "h5py")
LIMIT = 300

_MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(HOME not in os.environ, reason=f"{HOME} names no checkout of msrflute"),
    pytest.mark.skipif(bool(_MISSING), reason=f"FLUTE needs {', '.join(_MISSING)}"),
]


def call(*words: str) -> subprocess.CompletedProcess[str]:
    offline = [str(EXAMPLE.parent / "offline"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, offline))
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_hello_world(processes: int, tmp_path: Path) -> None:
    words = [str(EXAMPLE), os.environ[HOME], str(tmp_path), "--processes", str(processes)]
    done = call(*words)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [
        json.loads(line)
        for path in tmp_path.glob("out/*/models/craft_report.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert [report["round"] for report in reports] == [0, 1, 2]
    for report in reports:
        assert len(report["clients"]) == 3 and not report["dropped"]
        assert report["conflicts_after"] == 0
    if processes > 1:  # in one process FLUTE does not resume if it validates, whatever the strategy
        done = call(*words, "--resume", "--rounds", "4")
        assert done.returncode == 0, done.stderr[-3000:]
        assert "resumed from" in done.stdout + done.stderr


def test_kit() -> None:
    done = call("-c", "from craft_adapters.cli import main; main()", "check", "flute")
    assert f"flute on FLUTE in {os.environ[HOME]}: pass" in done.stdout
    assert done.returncode == 0, done.stdout
