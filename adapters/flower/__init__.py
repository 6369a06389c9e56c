"""CRAFT (or any registered rule) as the server step of Flower's current API.

In a new app::

    strategy = craft_adapters.flower.CraftStrategy(fraction_train=0.5)
    strategy.start(grid, initial_arrays, num_rounds=10)

A strategy that someone has keeps its sampling, its evaluation and its metrics; only what its
``aggregate_train`` returns as the new model comes from the rule::

    strategy = craft_adapters.flower.wrap(strategy, "craft", server_lr=0.1)

Flower itself is imported by these functions, never by importing this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._strategy import CraftStrategy, wrap

__all__ = ["CraftStrategy", "wrap"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from . import _strategy
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise ImportError(
            "Flower is not installed; install it with: pip install 'craft-adapters[flower]'",
            name="flwr",
        ) from error
    return getattr(_strategy, name)
