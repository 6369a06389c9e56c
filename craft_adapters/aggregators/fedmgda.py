"""FedMGDA+: the shortest mixture of unit updates (Hu et al. 2022, arXiv 2006.11489)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._contract import State
from .._layout import Granularity
from ..plugins import hookimpl
from ..projection import Cosines
from ._common import Common, cancelled, plain_step, shows_common_options, within
from ._convex import min_norm_in_box, min_norm_point, require
from ._entries import read_round
from ._gram_rule import GramRule
from ._grams import Combination, Grams

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FedMGDA"]


@shows_common_options
class FedMGDA(GramRule):
    """theta <- theta - server_lr d, with d = sum_i lambda_i u_i and unit updates u_i.

    lambda = argmin |sum_i lambda_i u_i|^2, with sum 1 and |lambda_i - p_i| <= epsilon for the data
    shares p_i. d does not point against anybody whose lambda is not at its bound. |d| <= 1 however
    small the updates are: the server's step must be made smaller as training goes on. Clients
    that did not move are left out; opposite clients may give d = 0.

    Needs daqp, or scipy where ``epsilon`` is 1: the extra ``rules``.

    Args:
        server_lr: Length of the step along d, > 0.
        lr_decay: Factor on it each round, 0 < lr_decay <= 1; the paper lets it decay.
        epsilon: How far lambda may be from the data shares: 0 is the mean of the unit updates, 1
            is free (MGDA).
        granularity: What is one vector: ``"model"`` (the paper), ``"layer"``, ... As for the other
            options, see :class:`GramRule`.
        **common: ``layout``, ``on_nonfinite``, ...: see :class:`GramRule`.

    Raises:
        OptionError: an option has a value that it does not take.
        ImportError: the solver is missing.

    Example:
        >>> from craft_adapters import ClientUpdate
        >>> theta = {"w": torch.zeros(2)}
        >>> rows = torch.tensor([[3.0, 4.0], [-4.0, 0.0]])
        >>> clients = ClientUpdate.join([{"w": row} for row in rows], [1, 3], kind="update")
        >>> FedMGDA(epsilon=0.1).aggregate(theta, clients).state  # lambda (.35, .65)
        {'w': tensor([ 0.4400, -0.2800])}
    """

    name = "fedmgda"
    separable = True

    def __init__(
        self,
        *,
        server_lr: float = 1.0,
        lr_decay: float = 1.0,
        epsilon: float = 0.1,
        granularity: Granularity = "model",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(granularity=granularity, **common)
        within("server_lr", server_lr, 0, math.inf, ends="()")
        within("lr_decay", lr_decay, 0, 1, ends="(]")
        within("epsilon", epsilon, 0, 1)
        require("scipy" if epsilon == 1 else "daqp")
        self.server_lr = server_lr
        self.lr_decay = lr_decay
        self.epsilon = epsilon

    def combine(self, grams: Grams) -> Combination:
        """lambda_i / |g_i| on client i."""
        norms = grams.norms
        active = norms > 0
        inverse = torch.where(active, 1.0 / norms, 0.0)
        cosines = Cosines(grams.products, inverse)
        weights = torch.zeros_like(norms)
        for q, some in enumerate(active):
            if bool(some.any()):
                (matrix,) = cosines.of(slice(q, q + 1))
                weights[q, some] = self._mixture(matrix[some][:, some], grams.shares[some])
        weights = weights * inverse
        rate = self.server_lr * self.lr_decay**self._round
        return plain_step(grams, weights, rate=rate, noise=cancelled(grams, weights))

    def state_dict(self) -> State:
        """Round counter, on which the decay depends."""
        return {"round": self._round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`craft_adapters.Aggregator.load_state_dict`."""
        self._round = read_round(self.name, state, {"round"})

    def _mixture(self, cosines: Tensor, shares: Tensor) -> Tensor:
        centre = shares / shares.sum()
        if self.epsilon == 0 or len(centre) == 1:
            return centre
        if self.epsilon == 1:
            return min_norm_point(cosines)
        low, high = centre - self.epsilon, centre + self.epsilon
        return min_norm_in_box(cosines, low.clamp(min=0.0), high.clamp(max=1.0))


@hookimpl
def craft_register_aggregators(register: Callable[[str, object], None]) -> None:
    """Offer the rule under its name."""
    register(FedMGDA.name, FedMGDA)
