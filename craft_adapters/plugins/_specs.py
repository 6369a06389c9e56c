"""What a plug-in may implement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from .._contract import AggregationReport, Aggregator

PROJECT = "craft_adapters"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plug-in's functions as implementations of the hooks below."""


@dataclass(frozen=True, slots=True)
class AdapterDescriptor:
    """What there is to know about a host adapter without importing it or its host.

    Attributes:
        name: The adapter's name in the registry.
        distribution: The host's distribution, as pip knows it; None for a host that has none.
        tested: Versions of the host that the adapter was run on.
        extra: What to install to get adapter and host, e.g. ``"craft-adapters[fedml]"``.
        summary: One line for listings.
        load: Imports and returns the adapter.

    Example:
        >>> descriptor = AdapterDescriptor("toy", None, (), None, "a toy", load=lambda: None)
        >>> descriptor.found is None
        True
    """

    name: str
    distribution: str | None
    tested: tuple[str, ...]
    extra: str | None
    summary: str
    load: Callable[[], Any]

    @property
    def found(self) -> str | None:
        """Version of the host that is installed, read from its metadata, or None."""
        if self.distribution is None:
            return None
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None


@hookspec
def craft_register_aggregators(register: Callable[[str, Callable[..., Aggregator]], None]) -> None:
    """Call ``register(name, factory)`` for each rule.

    ``factory`` takes the rule's options as keyword arguments. Annotated ones are checked, listed
    and read from text (``float``, ``int``, ``bool``, ``str``, ``Literal[...]``, unions with None).
    """


@hookspec
def craft_register_adapters(register: Callable[[AdapterDescriptor], None]) -> None:
    """Call ``register(descriptor)`` for each host adapter. Do not import the host."""


@hookspec
def craft_round_end(report: AggregationReport) -> None:
    """Called after each round of a rule from ``get_aggregator``, with its report."""
