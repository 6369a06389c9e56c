"""Running a user's script as Python would, with something changed before it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["run_script"]


def run_script(
    path: str | os.PathLike[str], args: Iterable[str], prepare: Callable[[], None]
) -> None:
    """Run a script as ``python path args...`` would, after ``prepare()``.

    That is called when the script's folder is where modules are looked for first, as it would be
    in the script's first line.

    Raises:
        FileNotFoundError: there is no such script.
        SystemExit: the script's own.
    """
    script = Path(path)
    if not script.is_file():
        raise FileNotFoundError(f"no such script: {script}")
    argv, first = sys.argv, sys.path[0]
    sys.argv = [os.fspath(path), *args]
    if not getattr(sys.flags, "safe_path", False):  # python -P: no folder is put there
        sys.path[0] = os.fspath(script.resolve().parent)
    try:
        prepare()
        runpy.run_path(os.fspath(path), run_name="__main__")
    finally:
        sys.argv, sys.path[0] = argv, first
