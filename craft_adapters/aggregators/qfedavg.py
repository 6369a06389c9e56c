"""q-FedAvg: more weight for clients with higher loss (Li et al. 2020, arXiv 1905.10497)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from .._contract import ClientUpdate
from .._layout import Granularity
from ..plugins import hookimpl
from ._common import Common, plain_step, shows_common_options, within
from ._gram_rule import GramRule
from ._grams import Combination, Grams
from ._requirements import losses

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["QFedAvg"]


@shows_common_options
class QFedAvg(GramRule):
    """theta <- theta - sum_i F_i^q G_i / sum_i h_i, with G_i = L (theta - theta_i), L = 1 / lr.

    h_i = q F_i^(q-1) |G_i|^2 + L F_i^q bounds the curvature of F^(q+1) / (q+1), with F_i the loss
    of the broadcast model on the client's training data, before it trains. Clients count equally
    whatever their size; with q = 0 the step is the plain mean. Sample clients in proportion to
    their size, as the paper does, if that is not wanted.

    Needs ``ClientUpdate.loss``, >= 0.

    Args:
        client_lr: The clients' learning rate of this round, > 0. Where it decays, set
            ``rule.client_lr`` each round.
        q: How much losses count, >= 0. Tuned in the paper, from 0.001 to 15.
        loss_eps: Added to the losses, as in the authors' code. With q < 1 a client with no loss
            left makes h so large that the model stands still: give a sensible floor there.
        granularity: What is one vector: ``"model"`` (the paper), ``"layer"``, ... As for the other
            options, see :class:`GramRule`.
        **common: ``layout``, ``on_nonfinite``, ...: see :class:`GramRule`.

    Raises:
        OptionError: an option has a value that it does not take.

    Example:
        >>> from craft_adapters import ClientUpdate
        >>> theta = {"w": torch.tensor([1.0, -1.0])}
        >>> rows = torch.tensor([[0.1, 0.0], [0.0, 0.2]])
        >>> clients = [
        ...     ClientUpdate(0, 10, {"w": rows[0]}, "update", loss=0.5),
        ...     ClientUpdate(1, 10, {"w": rows[1]}, "update", loss=2.0),
        ... ]
        >>> QFedAvg(client_lr=0.1, q=1.0).aggregate(theta, clients).state
        {'w': tensor([ 0.9833, -1.1333])}
    """

    name = "qfedavg"
    separable = True
    requires = frozenset({"loss"})

    def __init__(
        self,
        *,
        client_lr: float,
        q: float = 1.0,
        loss_eps: float = 1e-10,
        granularity: Granularity = "model",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(granularity=granularity, **common)
        within("client_lr", client_lr, 0, math.inf, ends="()")
        within("q", q, 0, math.inf, ends="[)")
        within("loss_eps", loss_eps, 0, math.inf, ends="[)")
        self.client_lr = client_lr
        self.q = q
        self.loss_eps = loss_eps

    def check(self, clients: Sequence[ClientUpdate]) -> None:
        """Losses are not negative: F^q has to be a weight."""
        losses(clients, least=0.0)

    def combine(self, grams: Grams) -> Combination:
        """F_i^q L / sum h on client i, with |G_i|^2 from the diagonal of the Gram matrix."""
        loss = losses(grams.clients) + self.loss_eps
        steep = 1.0 / self.client_lr
        squares = steep**2 * grams.products.diagonal(dim1=-2, dim2=-1)
        curvature = steep * loss**self.q
        if self.q:
            curvature = curvature + squares * torch.where(
                squares > 0, self.q * loss ** (self.q - 1.0), 0.0
            )
        return plain_step(grams, steep * loss**self.q / curvature.sum(-1, keepdim=True))


@hookimpl
def craft_register_aggregators(register: Callable[[str, object], None]) -> None:
    """Offer the rule under its name."""
    register(QFedAvg.name, QFedAvg)
