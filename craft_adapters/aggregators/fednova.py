"""FedNova: updates divided by the local work behind them (Wang 2020, arXiv 2007.07481)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._contract import ClientUpdate
from .._layout import Granularity
from ..errors import OptionError
from ..plugins import hookimpl
from ._common import Common, plain_step, shows_common_options, within
from ._grams import Combination, Grams
from ._momentum import MomentumRule
from ._requirements import local_steps

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FedNova", "normaliser"]


@shows_common_options
class FedNova(MomentumRule):
    """theta <- theta - tau_eff sum_i p_i g_i / a_i, with g_i = theta - theta_i.

    a_i is the weight that client i's tau_i local steps give its gradients in all
    (:func:`normaliser`): tau_i for plain SGD. tau_eff = sum_i p_i a_i, and sum_i p_i tau_i with a
    proximal term, as in the authors' code. So clients that do more steps do not pull the model
    towards themselves; where all do the same, this is FedAvg.

    Needs ``ClientUpdate.local_steps``. A client that made none has no say in the step.

    Args:
        server_momentum: Momentum of the server's step, 0 <= server_momentum < 1 (``gmf``). It
            carries the step itself, which is the authors' rule as long as the clients' learning
            rate is constant.
        client_momentum: Momentum of the clients' SGD, without dampening or Nesterov, reset each
            round.
        mu: Weight of the clients' proximal term.
        client_lr: The clients' learning rate; must be given with ``mu``.
        granularity: As for the other options, see :class:`GramRule`.
        **common: ``layout``, ``on_nonfinite``, ...: see :class:`GramRule`.

    Raises:
        OptionError: an option has a value that it does not take, or ``client_lr`` is missing.

    Example:
        >>> from craft_adapters import ClientUpdate
        >>> theta = {"w": torch.tensor([1.0, 1.0])}
        >>> one, four = torch.tensor([0.1, 0.0]), torch.tensor([0.0, 0.4])
        >>> clients = [
        ...     ClientUpdate(0, 10, {"w": one}, "update", local_steps=1),
        ...     ClientUpdate(1, 10, {"w": four}, "update", local_steps=4),
        ... ]
        >>> FedNova().aggregate(theta, clients).state  # tau_eff 2.5
        {'w': tensor([0.8750, 0.8750])}
    """

    name = "fednova"
    separable = True
    requires = frozenset({"local_steps"})

    def __init__(
        self,
        *,
        server_momentum: float = 0.0,
        client_momentum: float = 0.0,
        mu: float = 0.0,
        client_lr: float | None = None,
        granularity: Granularity = "layer",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(granularity=granularity, **common)
        within("server_momentum", server_momentum, 0, 1, ends="[)")
        within("client_momentum", client_momentum, 0, 1, ends="[)")
        within("mu", mu, 0, math.inf, ends="[)")
        if client_lr is not None:
            within("client_lr", client_lr, 0, math.inf, ends="()")
        elif mu:
            raise OptionError("client_lr must be given with mu: the clients' learning rate")
        self.momentum = server_momentum
        self.client_momentum = client_momentum
        self.mu = mu
        self.client_lr = client_lr
        within("mu * client_lr", self._shrink, 0, 1, ends="[)")

    @property
    def _shrink(self) -> float:
        """What one local step takes off the distance to the broadcast model."""
        return self.mu * (self.client_lr or 0.0)

    def check(self, clients: Sequence[ClientUpdate]) -> None:
        """Steps are counted from zero."""
        local_steps(clients)

    def combine(self, grams: Grams) -> Combination:
        """tau_eff p_i / a_i on client i."""
        steps = local_steps(grams.clients)
        works = steps > 0
        shares = works * grams.shares
        shares = shares / shares.sum().clamp(min=torch.finfo(shares.dtype).tiny)
        work = normaliser(steps.clamp(min=1.0), self.client_momentum, self._shrink)
        effective = (shares * (steps if self._shrink else work)).sum()
        return plain_step(grams, effective * shares / work, memory_weight=self.momentum)


def normaliser(steps: Tensor, momentum: float = 0.0, shrink: float = 0.0) -> Tensor:
    """Weight that ``steps`` local steps give their gradients in all: the 1-norm of a_i.

    Each step adds the momentum buffer b <- momentum b + 1 to what the ones before it left,
    s <- (1 - shrink) s + b; s after the last is returned. For plain SGD it is ``steps``. (The
    authors' code counts both terms where momentum and a proximal term come together.)

    Args:
        steps: (m,) float64, >= 1.
        momentum: 0 <= momentum < 1.
        shrink: Learning rate times the weight of the proximal term, 0 <= shrink < 1.

    Returns:
        (m,) float64.

    Example:
        >>> steps = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
        >>> normaliser(steps, momentum=0.5)
        tensor([1.0000, 2.5000, 8.0625], dtype=torch.float64)
    """
    # s = (sum_j<n x^j - momentum sum_j<n x^(n-1-j) momentum^j) / (1 - momentum), x = 1 - shrink.
    most, least = max(1.0 - shrink, momentum), min(1.0 - shrink, momentum)
    both = most ** (steps - 1.0) * _geometric((least - most) / most, steps)
    return (_geometric(-shrink, steps) - momentum * both) / (1.0 - momentum)


def _geometric(excess: float, terms: Tensor) -> Tensor:
    """sum_{j < terms} (1 + excess)^j, to the last digits however small the excess."""
    if excess == 0.0:
        return terms
    rate = torch.tensor(excess, dtype=terms.dtype)
    return torch.expm1(terms * torch.log1p(rate)) / rate


@hookimpl
def craft_register_aggregators(register: Callable[[str, object], None]) -> None:
    """Offer the rule under its name."""
    register(FedNova.name, FedNova)
