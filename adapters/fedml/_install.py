"""The one line: every seam at once, idle until a run's config says ``enable_craft: true``."""

from __future__ import annotations

from . import _cross_silo, _entry, _failure, _mpi, _sp, _telemetry
from ._host import require_fedml
from ._patches import Patches

__all__ = ["install", "uninstall"]

_patches: Patches | None = None


def install() -> None:
    """Let FedML runs whose config says ``enable_craft: true`` use a registered rule.

    Call it once, before ``fedml.init``; calling it again does nothing. It imports FedML and
    replaces methods on the classes in which all of FedML's entrances meet (``FedMLRunner``, the
    server classes used directly, one-liners such as ``fedml.run_simulation()``). Runs without
    ``enable_craft: true`` go through the original methods.

    Raises:
        ImportError: FedML is not installed; names the extra.
        UnsupportedSetup: a FedML release that lacks one of the methods.
    """
    global _patches
    if _patches is not None:
        return
    require_fedml()
    patches = Patches()
    for seam in (_entry, _failure, _telemetry, _sp, _mpi, _cross_silo):
        seam.patch(patches)
    _patches = patches


def uninstall() -> None:
    """Put FedML's own methods back. Server objects that exist already keep their rule."""
    global _patches
    if _patches is not None:
        _patches.undo()
        _patches = None
