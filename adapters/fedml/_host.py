"""The host: whether it is there, and whether it is the release this adapter was made for."""

from __future__ import annotations

import importlib
import logging
import sys

__all__ = ["TESTED", "require_fedml"]

TESTED = ("0.9.6",)
"""FedML releases that the tests ran against."""

_EXTRA = "craft-adapters[fedml]"


def require_fedml() -> None:
    """Import FedML, or say what to install.

    Raises:
        ImportError: FedML, or something it imports without declaring it, is not installed.
    """
    try:
        version = getattr(importlib.import_module("fedml"), "__version__", None)
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "fedml":
            raise ImportError(_missing(), name="fedml") from error
        raise ImportError(
            f"FedML is installed but does not import: {error}. Install {_EXTRA!r}, which also "
            "holds what FedML needs and does not declare (setuptools<82 for pkg_resources)",
            name=error.name,
        ) from error
    if version is None:  # any folder called fedml on sys.path is imported as a namespace package
        raise ImportError(_missing(), name="fedml")
    if version not in TESTED:
        logging.warning(
            "craft-adapters: FedML %s is installed; this adapter replaces private methods and was "
            "tested with %s only",
            version,
            ", ".join(TESTED),
        )


def _missing() -> str:
    message = f"FedML is not installed; install it with: pip install {_EXTRA!r}"
    if sys.version_info >= (3, 12):
        message += (
            f". This is Python {sys.version_info.major}.{sys.version_info.minor}, and FedML "
            f"{TESTED[-1]} stops at 3.11 (one of its pinned dependencies does not build on 3.12): "
            "make an environment with Python 3.10 or 3.11"
        )
    return message
