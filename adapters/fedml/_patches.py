"""Replacing methods of the host, and putting them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from craft_adapters.errors import UnsupportedSetup

__all__ = ["RUN", "Patches"]

RUN = "_craft_run"
"""The attribute of FedML's own server object that holds what a run of ours adds to it."""

Method = Callable[..., Any]


class Patches:
    """A list of replaced attributes.

    Methods are replaced on their classes, in place, so that it does not matter who imported the
    class before, and by what name.
    """

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Method], Method]) -> None:
        """Set ``owner.name`` to ``make(original)``.

        Raises:
            UnsupportedSetup: the owner has no such attribute of its own: another FedML release.
        """
        if name not in vars(owner):
            self.undo()
            where = f"{getattr(owner, '__module__', '')}.{getattr(owner, '__qualname__', owner)}"
            raise UnsupportedSetup(
                f"this FedML has no {where.lstrip('.')}.{name}, which the adapter replaces; use "
                "FedML 0.9.6: pip install 'craft-adapters[fedml]'"
            )
        original = vars(owner)[name]
        self._originals.append((owner, name, original))
        setattr(owner, name, make(original))

    def undo(self) -> None:
        """Put every original back, last one first."""
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)
