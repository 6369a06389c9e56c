"""FedAvgM: averaging with server momentum (Hsu, Qi, Brown 2019, arXiv 1909.06335)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from .._layout import Granularity
from ..plugins import hookimpl
from ._common import Common, plain_step, shows_common_options, within
from ._grams import Combination, Grams
from ._momentum import MomentumRule

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FedAvgM"]


@shows_common_options
class FedAvgM(MomentumRule):
    """v <- beta v + sum_i p_i g_i, theta <- theta - server_lr v, with g_i = theta - theta_i.

    p_i are the data shares of the clients of the round; v starts at zero, without dampening. The
    same as ``torch.optim.SGD(lr=server_lr, momentum=beta)`` on the mean update. Steps grow up to
    1 / (1 - beta) times the mean update: lower the clients' learning rate or ``server_lr`` for
    that. Buffers are averaged and have no momentum.

    Args:
        server_lr: Step length, > 0; the paper's is 1.
        beta: Momentum, 0 <= beta < 1. The paper tries 0 (FedAvg) to 0.997; 0.9 is the usual one.
        granularity: As for the other options, see :class:`GramRule`.
        **common: ``layout``, ``on_nonfinite``, ...: see :class:`GramRule`.

    Raises:
        OptionError: an option has a value that it does not take.

    Example:
        >>> import torch
        >>> from craft_adapters import ClientUpdate
        >>> rule = FedAvgM(beta=0.5)
        >>> theta = {"w": torch.tensor([1.0])}
        >>> client = ClientUpdate(0, 10, {"w": torch.tensor([0.25])}, "update")
        >>> theta = rule.aggregate(theta, [client]).state
        >>> rule.aggregate(theta, [client]).state  # 1 - 0.25 - (0.125 + 0.25)
        {'w': tensor([0.3750])}
    """

    name = "fedavgm"
    separable = True

    def __init__(
        self,
        *,
        server_lr: float = 1.0,
        beta: float = 0.9,
        granularity: Granularity = "layer",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(granularity=granularity, **common)
        within("server_lr", server_lr, 0, math.inf, ends="()")
        within("beta", beta, 0, 1, ends="[)")
        self.server_lr = server_lr
        self.momentum = beta

    def combine(self, grams: Grams) -> Combination:
        """Shares on the clients, beta on v."""
        return plain_step(grams, grams.shares, memory_weight=self.momentum, rate=self.server_lr)


@hookimpl
def craft_register_aggregators(register: Callable[[str, object], None]) -> None:
    """Offer the rule under its name."""
    register(FedAvgM.name, FedAvgM)
