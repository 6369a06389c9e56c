"""CRAFT, conflict-resolved aggregation, for the federated-learning framework you already run.

    aggregator = get_aggregator("craft", server_lr=0.1)
    result = aggregator.aggregate(global_state, updates)

Names are imported on first use: importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._contract import (
        AggregationReport,
        AggregationResult,
        Aggregator,
        ClientUpdate,
        DroppedClient,
        GroupReport,
    )
    from ._layout import Layout
    from .errors import (
        CheckpointError,
        CraftError,
        IncompatibleUpdate,
        NonFiniteUpdate,
        NoUsableUpdates,
        OptionError,
        PluginError,
        UnsupportedSetup,
    )
    from .lazy import LazyValues, Spill
    from .plugins import available_aggregators, get_aggregator, hookimpl

__all__ = [
    "AggregationReport",
    "AggregationResult",
    "Aggregator",
    "CheckpointError",
    "ClientUpdate",
    "CraftError",
    "DroppedClient",
    "GroupReport",
    "IncompatibleUpdate",
    "Layout",
    "LazyValues",
    "NoUsableUpdates",
    "NonFiniteUpdate",
    "OptionError",
    "PluginError",
    "Spill",
    "UnsupportedSetup",
    "available_aggregators",
    "get_aggregator",
    "hookimpl",
]

_HOMES = {
    "_contract": (
        "AggregationReport",
        "AggregationResult",
        "Aggregator",
        "ClientUpdate",
        "DroppedClient",
        "GroupReport",
    ),
    "_layout": ("Layout",),
    "errors": (
        "CheckpointError",
        "CraftError",
        "IncompatibleUpdate",
        "NoUsableUpdates",
        "NonFiniteUpdate",
        "OptionError",
        "PluginError",
        "UnsupportedSetup",
    ),
    "lazy": ("LazyValues", "Spill"),
    "plugins": ("available_aggregators", "get_aggregator", "hookimpl"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("craft-adapters")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
