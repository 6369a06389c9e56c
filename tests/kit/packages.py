"""Installing packages of strangers beside ours, without a network, and using them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NO_ENVIRONMENT = ("CRAFT_", "PYTHONPATH", "PYTEST_")


def run(*words: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A Python process; ``path`` is on its path like a site-packages folder."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(NO_ENVIRONMENT)}
    environment["OMP_NUM_THREADS"] = "1"  # small tensors
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def command(*words: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``craft-adapters`` in a process of its own."""
    start = "import sys; from craft_adapters.cli import main; main(prog_name='craft-adapters')"
    return run("-c", start, *words, path=path)


def install(source: Path, site: Path) -> None:
    """Build and install a package into a folder, from a copy: building leaves files behind."""
    copy = site.with_name(f"{site.name}-{source.name}")
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
    done = run("-m", "pip", "install", *offline, "--target", site, copy)
    assert done.returncode == 0, done.stdout + done.stderr
