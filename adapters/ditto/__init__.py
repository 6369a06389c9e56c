"""Ditto (Li et al. 2021): a personal model for each client, whatever averages the shared one.

>>> from craft_adapters.ditto import Ditto
>>> Ditto("craft", lam=0.5).aggregator.name
'craft'

``federation_method``, which is Ditto, is what ``method: ditto`` in a run's configuration makes.
Names are imported on first use: importing this package imports no federation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._ditto import Ditto
    from ._ditto import Ditto as federation_method

__all__ = ["Ditto", "federation_method"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._ditto import Ditto

    return Ditto
