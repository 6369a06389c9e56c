"""The README shows what is in the files, and the files run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SNIPPETS = re.findall(
    r"<!-- from (\S+) -->\n```\w+\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL
)


def test_every_way_is_shown() -> None:
    shown = [path for path, _ in SNIPPETS]
    assert shown == [
        "examples/fedml/fedml_config.yaml",
        "examples/fedml/one_line.py",
        "examples/fedml/explicit.py",
        "examples/own_loop.py",
        "examples/federation/ditto_craft.yaml",
    ]


@pytest.mark.parametrize(("path", "snippet"), SNIPPETS, ids=[path for path, _ in SNIPPETS])
def test_snippets_are_copied_from_files(path: str, snippet: str) -> None:
    assert snippet.strip()
    assert snippet in (ROOT / path).read_text()


@pytest.mark.slow
def test_the_loop_of_your_own_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "own_loop.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 10
