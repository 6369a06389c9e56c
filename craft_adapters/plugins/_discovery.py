"""Put entry points in order, without importing any of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint

from ._registry import Origin

__all__ = ["BrokenPlugin", "Found", "arrange"]

_BUNDLED = "craft-adapters"
_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """A plug-in that was left out, whole, and why.

    Attributes:
        name: Name of its entry point.
        distribution: The distribution that declares it.
        reason: What went wrong, in one line.
    """

    name: str
    distribution: str
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """A plug-in that has not been loaded."""

    origin: Origin
    entry_point: EntryPoint


def arrange(points: Iterable[EntryPoint]) -> list[Found]:
    """One of each: the bundled first, so that nobody takes their names; then by name.

    A distribution that is on the path twice (an editable install beside a wheel) counts once: the
    first wins, as it does for imports.
    """
    found: dict[tuple[str, str], Found] = {}
    for point in points:
        name = _name(point.dist)
        found.setdefault((_normal(name), point.name), Found(Origin(point.name, name), point))
    return [found[key] for key in sorted(found, key=lambda key: (key[0] != _BUNDLED, key))]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _name(distribution: Distribution | None) -> str:
    try:
        return str(distribution.metadata["Name"] or _UNKNOWN) if distribution else _UNKNOWN
    except Exception:  # no METADATA file, or not text
        return _UNKNOWN
