"""Ditto (Li et al. 2021): a personal model for each client, whatever averages the shared one.

>>> from craft_adapters.ditto import Ditto
>>> Ditto("craft", lam=0.5).aggregator.name
'craft'
"""

from __future__ import annotations

from ._ditto import Ditto

__all__ = ["Ditto", "federation_method"]

federation_method = Ditto
"""What ``method: ditto`` in a run's configuration makes."""
