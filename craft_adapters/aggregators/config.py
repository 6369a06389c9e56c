"""ConFIG: the same cosine to every client (Liu et al. 2024, arXiv 2408.11104)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .._layout import Granularity
from ..plugins import hookimpl
from ..projection import Cosines, solve
from ._common import EPS64, NOISE, Common, cutoff, shows_common_options, within
from ._gram_rule import GramRule
from ._grams import Combination, Grams

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ConFIG"]


@shows_common_options
class ConFIG(GramRule):
    """theta <- theta - server_lr (sum_i g_i . e) e, with e = b / |b|, b = U^+ 1.

    U has the unit updates u_i = g_i / |g_i| as rows, so that e has the same cosine with every
    client, as long as they are independent; else b is the least-squares solution, cosines differ
    and may be negative, and the report lists who conflicts. Clients that did not move are left
    out; exactly opposite ones leave no direction, and the model stands still.

    The length of the step is the **sum** of the clients' projections on e, not their mean: m equal
    clients move the model m times as far as one. ``server_lr`` of 1 / m has the scale of FedAvg.

    Args:
        server_lr: Factor on the step, > 0; the paper's is 1.
        granularity: What is one vector: ``"model"`` (the paper), ``"layer"``, ... As for the other
            options, see :class:`GramRule`.
        **common: ``layout``, ``on_nonfinite``, ...: see :class:`GramRule`.

    Raises:
        OptionError: an option has a value that it does not take.

    Example:
        >>> from craft_adapters import ClientUpdate
        >>> theta = {"w": torch.zeros(2)}
        >>> rows = torch.tensor([[3.0, 4.0], [-2.0, 0.0]])
        >>> clients = ClientUpdate.join([{"w": row} for row in rows], [1, 1], kind="update")
        >>> ConFIG().aggregate(theta, clients).state
        {'w': tensor([ 1.4000, -2.8000])}
    """

    name = "config"
    separable = True

    def __init__(
        self,
        *,
        server_lr: float = 1.0,
        granularity: Granularity = "model",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(granularity=granularity, **common)
        within("server_lr", server_lr, 0, math.inf, ends="()")
        self.server_lr = server_lr

    def combine(self, grams: Grams) -> Combination:
        """With K the cosines and x = K^+ 1: b = sum_i x_i u_i, U b = K x, |b|^2 = x . K x."""
        norms = grams.norms
        active = norms > 0
        inverse = torch.where(active, 1.0 / norms, 0.0)
        ones = active.to(torch.float64)
        solution = solve(
            Cosines(grams.products, inverse),
            ones.unsqueeze(-1),
            rtol=cutoff(grams),
        )
        weights = solution.x.squeeze(-1) * inverse
        along = (grams.products @ weights.unsqueeze(-1)).squeeze(-1)  # g_i . b
        length = (weights * along).sum(-1).clamp(min=0.0).sqrt()
        count = ones.sum(-1)
        return Combination(
            weights=weights,
            memory_weights=torch.zeros_like(count),
            active=active,
            lengths=self.server_lr * along.sum(-1) / length,
            rates=torch.ones_like(count),
            noise=NOISE * torch.maximum(grams.rounding, count * EPS64) * count.sqrt(),
            targets=ones,
            solution=solution,
            notes={
                q: f"{int(count[q])} clients span {rank} directions: alignment is not guaranteed"
                for q, rank in enumerate(solution.rank.tolist())
                if rank < count[q]
            },
        )


@hookimpl
def craft_register_aggregators(register: Callable[[str, object], None]) -> None:
    """Offer the rule under its name."""
    register(ConFIG.name, ConFIG)
