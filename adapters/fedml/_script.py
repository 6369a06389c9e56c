"""Running a FedML user's script with the server step replaced, without a change to it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from craft_adapters import _script

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
    _script.run_script(path, args, install)
