"""What a plug-in can implement, and what it registers.

A plug-in is a module that a distribution names in its entry-point group ``craft_adapters``. Hook
implementations may take fewer arguments than the specs below; so specs only ever gain arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pluggy

from ..errors import PluginError, nearest

if TYPE_CHECKING:
    from .._contract import AggregationReport, Aggregator

__all__ = [
    "CAPABILITIES",
    "PROJECT",
    "AdapterDescriptor",
    "craft_register_adapters",
    "craft_register_aggregators",
    "craft_round_end",
    "hookimpl",
]

PROJECT = "craft_adapters"
"""Name of the pluggy project and of the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plug-in as the implementation of the hook of the same name."""


CAPABILITIES = {
    "updates": "each client's own update, not only their sum",
    "client_ids": "identities of clients that stay the same from round to round",
    "loss": "the broadcast model's loss on each client's training data",
    "local_steps": "each client's number of local optimiser steps",
    "server_state": "a place where the rule's state survives a restart of the server",
}
"""What a host can give a rule; the names of ``Aggregator.requires`` are among them."""


@dataclass(frozen=True, slots=True)
class AdapterDescriptor:
    """What is known of a host adapter before its host is imported.

    The module that registers one imports neither the host nor the adapter's own code: ``load``
    does, when the adapter is used.

    Attributes:
        name: The adapter's name, ``"fedml"``.
        distribution: The host's distribution, as pip knows it; None for a host that has none.
        tested: Versions of the host that the adapter is tested with.
        extra: The extra of craft-adapters that installs the host, or None.
        summary: One line for listings.
        load: Imports the adapter and returns it.
        gives: What the host can give a rule, out of :data:`CAPABILITIES`. The conformance kit
            checks what is named here and skips the rest, saying so.
        harness: Imports and returns what the conformance kit drives the host with, a
            :class:`craft_adapters.testing.Harness`; None if the adapter has none.

    Raises:
        PluginError: ``gives`` names something else.

    Example:
        >>> toy = AdapterDescriptor("toy", "no-such-host", ("1.0",), None, "a toy", load=dict)
        >>> toy.found is None
        True
    """

    name: str
    distribution: str | None
    tested: tuple[str, ...]
    extra: str | None
    summary: str
    load: Callable[[], Any]
    gives: frozenset[str] = frozenset({"updates"})
    harness: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        for name in sorted(self.gives - CAPABILITIES.keys()):
            raise PluginError(
                f"adapter {self.name!r} gives {name!r}, which is no capability; "
                f"{nearest(name, CAPABILITIES)}"
            )

    @property
    def found(self) -> str | None:
        """Version of the installed host, read from its metadata; None if there is none."""
        if self.distribution is None:
            return None
        try:
            return version(self.distribution)
        except Exception:  # not installed, or a name or metadata that cannot be read
            return None


@hookspec
def craft_register_aggregators(register: Callable[[str, Callable[..., Aggregator]], None]) -> None:
    """Register rules: call ``register(name, factory)`` for each.

    ``factory`` is a class or function with annotated keyword options that returns an
    :class:`~craft_adapters.Aggregator`; see :func:`craft_adapters.get_aggregator`.
    """


@hookspec
def craft_register_adapters(register: Callable[[AdapterDescriptor], None]) -> None:
    """Register host adapters: call ``register(descriptor)`` for each."""


@hookspec
def craft_round_end(report: AggregationReport) -> None:
    """Called with the report of every round of a rule that ``get_aggregator`` has made.

    An implementation that raises is warned about once and never stops a round, except in strict
    mode.
    """
