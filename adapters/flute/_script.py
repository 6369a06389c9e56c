"""Running FLUTE's entry script with the strategy added, without a change to it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from craft_adapters import _script

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
    # FLUTE's packages are beside its script.
    _script.run_script(path, args, install)
