"""CRAFT (or any registered rule) as the server step of Flower.

In a new app::

    strategy = craft_adapters.flower.CraftStrategy(fraction_train=0.5)
    strategy.start(grid, initial_arrays, num_rounds=10)

A strategy that someone has keeps its sampling, its evaluation and its metrics; only what its
``aggregate_train`` returns as the new model comes from the rule::

    strategy = craft_adapters.flower.wrap(strategy, "craft", server_lr=0.1)

The same for the legacy API, whose arrays have no names::

    strategy = craft_adapters.flower.wrap(strategy, "craft", names=model.state_dict())

Flower itself is imported by these functions, never by importing this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._front import wrap
    from ._legacy import LegacyCraftStrategy
    from ._strategy import CraftStrategy

__all__ = ["CraftStrategy", "LegacyCraftStrategy", "wrap"]

_HOMES = {"CraftStrategy": "_strategy", "LegacyCraftStrategy": "_legacy", "wrap": "_front"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = importlib.import_module(f".{_HOMES[name]}", __name__)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise ImportError(
            "Flower is not installed; install it with: pip install 'craft-adapters[flower]'",
            name="flwr",
        ) from error
    return getattr(home, name)
