"""Names to registered things, with the plug-in that each came from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ..errors import OptionError, PluginError, nearest

__all__ = ["Origin", "Registry"]

T = TypeVar("T")

# A name must survive a YAML file and a command line without quotes.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Origin:
    """A plug-in: the name of its entry point and the distribution that declares it."""

    plugin: str
    distribution: str

    def __str__(self) -> str:
        return f"plug-in {self.plugin!r} of {self.distribution}"


class Registry(Mapping[str, T]):
    """Registered things by name, in the order of their names; a name is given once.

    Args:
        kind: What the things are called in error messages.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, tuple[T, Origin]] = {}

    def __getitem__(self, name: str) -> T:
        return self._entries[name][0]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def origin(self, name: str) -> Origin:
        """The plug-in that registered a name."""
        return self._entries[name][1]

    def copy(self) -> Registry[T]:
        """A registry with the same entries, to try a plug-in on."""
        other: Registry[T] = Registry(self.kind)
        other._entries = dict(self._entries)
        return other

    def add(self, name: str, thing: T, origin: Origin) -> None:
        """Register a thing.

        Raises:
            PluginError: the name is taken, or is none.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PluginError(
                f"{name!r} is no name: the name of a {self.kind} has letters, digits, '_', '.', '-'"
            )
        if name in self._entries:
            raise PluginError(f"the {self.kind} name {name!r} is taken by {self.origin(name)}")
        self._entries[name] = (thing, origin)

    def find(self, name: str) -> T:
        """The thing of a name.

        Raises:
            OptionError: nothing has this name; names the nearest.
        """
        if isinstance(name, str) and name in self._entries:
            return self[name]
        tail = nearest(str(name), self) if self._entries else "none is registered"
        raise OptionError(f"no {self.kind} is named {name!r}; {tail}")
