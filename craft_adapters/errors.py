"""Every error this package raises on purpose.

All derive from :class:`CraftError`, so that a training job can catch them in one place, and from
the built-in that fits, so that code that never heard of this package still reads them right.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "CheckpointError",
    "CraftError",
    "IncompatibleUpdate",
    "NoUsableUpdates",
    "NonFiniteUpdate",
    "OptionError",
    "PluginError",
    "UnsupportedSetup",
    "nearest",
]


class CraftError(Exception):
    """Base of all errors of this package."""


class NoUsableUpdates(CraftError, ValueError):
    """No client is left to aggregate: none reported, none has examples, or all were left out."""


class IncompatibleUpdate(CraftError, ValueError):
    """A client's values do not fit the global model (names, shapes, types); names both."""


class NonFiniteUpdate(CraftError, ValueError):
    """NaN or infinity in a client's values (with ``on_nonfinite="raise"``) or the global model."""


class OptionError(CraftError, ValueError):
    """An unknown rule or option, or a value the option does not take."""


class CheckpointError(CraftError, ValueError):
    """A saved state that is damaged, foreign, or of another rule or model."""


class PluginError(CraftError, RuntimeError):
    """A plug-in that cannot be used (raised in strict mode only)."""


class UnsupportedSetup(CraftError, ValueError):
    """A host setup in which the server step cannot be replaced, with the reason."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of an error message: the nearest known name, then all of them.

    >>> nearest("crft", ["craft", "fedavg"])
    "did you mean 'craft'? Known: craft, fedavg"
    >>> nearest("zzz", ["craft", "fedavg"])
    'known: craft, fedavg'
    """
    names = sorted(known)
    listing = ", ".join(names)
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}? Known: {listing}" if close else f"known: {listing}"
