"""Running a FedML user's script with the server step replaced, without a change to it."""

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

    The config that the script reads (``--cf``) decides whether anything changes: without
    ``enable_craft: true`` FedML behaves as without this package.

    Args:
        path: The script.
        args: Its arguments.

    Raises:
        FileNotFoundError: there is no such script.
        ImportError: FedML is not installed; names the extra.
        SystemExit: the script's own.
    """
    script = Path(path)
    if not script.is_file():
        raise FileNotFoundError(f"no such script: {script}")
    install()
    argv, first = sys.argv, sys.path[0]
    sys.argv = [os.fspath(path), *args]
    if not getattr(sys.flags, "safe_path", False):  # python -P: no folder is put there
        sys.path[0] = os.fspath(script.resolve().parent)
    try:
        runpy.run_path(os.fspath(path), run_name="__main__")
    finally:
        sys.argv, sys.path[0] = argv, first
