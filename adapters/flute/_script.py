"""Running FLUTE's entry script with the strategy added, without a change to it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path

from ._install import install

__all__ = ["run_script"]


def run_script(path: str | os.PathLike[str], args: Iterable[str] = ()) -> None:
    """Run a script as ``python path args...`` would, after :func:`install`.

    FLUTE reads its files relative to the working folder: run it from the repository's.

    Args:
        path: FLUTE's ``e2e_trainer.py``, or an entry script of your own beside it.
        args: Its arguments.

    Raises:
        FileNotFoundError: there is no such script.
        ImportError: see :func:`install`.
        SystemExit: the script's own.
    """
    script = Path(path)
    if not script.is_file():
        raise FileNotFoundError(f"no such script: {script}")
    argv, first = sys.argv, sys.path[0]
    sys.argv = [os.fspath(path), *args]
    sys.path[0] = os.fspath(script.resolve().parent)  # where FLUTE's packages are
    try:
        install()
        runpy.run_path(os.fspath(path), run_name="__main__")
    finally:
        sys.argv, sys.path[0] = argv, first
