"""FedAvg: the weighted mean of the clients' models (McMahan et al. 2017, arXiv 1602.05629)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..plugins import hookimpl
from ._gram_rule import GramRule
from ._grams import Combination, Grams

__all__ = ["FedAvg"]


class FedAvg(GramRule):
    """theta <- sum_i p_i theta_i, with p_i the data shares of the clients of the round.

    Buffers, left-out clients and the report are treated as in every rule here; conflicts are
    counted, so that it can be compared. Arguments as in :class:`GramRule`.

    Example:
        >>> from craft_adapters import ClientUpdate
        >>> theta = {"w": torch.tensor([1.0, -1.0])}
        >>> clients = ClientUpdate.join(
        ...     [{"w": torch.tensor([2.0, 1.0])}, {"w": torch.tensor([0.0, -3.0])}], [3, 1]
        ... )
        >>> FedAvg().aggregate(theta, clients).state
        {'w': tensor([1.5000, 0.0000])}
    """

    name = "fedavg"
    separable = True

    def combine(self, grams: Grams) -> Combination:
        """The shares, in every group."""
        groups = len(grams.groups)
        return Combination(
            weights=grams.shares.expand(groups, -1),
            memory_weights=torch.zeros(groups, dtype=torch.float64),
            active=grams.norms > 0,
            lengths=torch.full((groups,), torch.nan, dtype=torch.float64),
            rates=torch.ones(groups, dtype=torch.float64),
            noise=torch.zeros(groups, dtype=torch.float64),
        )


@hookimpl
def craft_register_aggregators(register: Callable[[str, object], None]) -> None:
    """Offer the rule under its name."""
    register(FedAvg.name, FedAvg)
