"""CRAFT (or any registered rule) as the server step of NVFlare's FedAvg.

In a job script::

    recipe = FedAvgRecipe(
        model=model,
        min_clients=2,
        train_script="client.py",
        aggregator=craft_adapters.nvflare.CraftAggregator("craft", {"server_lr": 0.1}),
    )

NVFlare itself is imported by :class:`CraftAggregator`, never by importing this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._aggregator import CraftAggregator

__all__ = ["CraftAggregator"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from ._aggregator import CraftAggregator
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "nvflare":
            raise
        raise ImportError(
            "NVFlare is not installed; install it with: pip install 'craft-adapters[nvflare]'",
            name="nvflare",
        ) from error
    return CraftAggregator
