"""FedProx: averaging, after local training with a proximal term (Li 2020, arXiv 1812.06127).

The server step is FedAvg's. What differs is done by the clients;
:meth:`FedProx.add_proximal_gradient` is there for local training loops that do not have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from .._layout import Granularity
from ..plugins import hookimpl
from ._common import Common, shows_common_options, within
from .fedavg import FedAvg

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FedProx"]


@shows_common_options
class FedProx(FedAvg):
    """theta <- sum_i p_i theta_i, where client i minimises F_i(w) + mu/2 |w - theta|^2.

    The rule cannot see whether clients added the term: local training must do so. A host that has
    the term itself has its own option for it.

    Args:
        mu: Weight of the proximal term, >= 0, for local training to read. The authors' examples
            use 1, their grid is 0.001, 0.01, 0.1, 1; with 0 this is FedAvg.
        granularity: As for the other options, see :class:`GramRule`.
        **common: ``layout``, ``on_nonfinite``, ...: see :class:`GramRule`.

    Raises:
        OptionError: an option has a value that it does not take.

    Example:
        >>> import torch
        >>> from craft_adapters import ClientUpdate
        >>> theta = {"w": torch.tensor([1.0, -1.0])}
        >>> clients = ClientUpdate.join(
        ...     [{"w": torch.tensor([2.0, 1.0])}, {"w": torch.tensor([0.0, -3.0])}], [3, 1]
        ... )
        >>> FedProx(mu=0.1).aggregate(theta, clients).state
        {'w': tensor([1.5000, 0.0000])}
    """

    name = "fedprox"

    def __init__(
        self, *, mu: float = 1.0, granularity: Granularity = "layer", **common: Unpack[Common]
    ) -> None:
        super().__init__(granularity=granularity, **common)
        within("mu", mu, 0, math.inf, ends="[)")
        self.mu = mu

    def add_proximal_gradient(
        self, parameters: Iterable[Tensor], broadcast: Iterable[Tensor]
    ) -> None:
        """Add mu (w - theta) to the gradients: between ``backward()`` and the optimiser's step.

        Args:
            parameters: The client's parameters; those without a gradient are left alone.
            broadcast: The same parameters as the client received them, in the same order.

        Example:
            >>> import torch
            >>> w = torch.tensor([3.0], requires_grad=True)
            >>> (2 * w).backward()
            >>> FedProx(mu=0.5).add_proximal_gradient([w], [torch.tensor([1.0])])
            >>> w.grad
            tensor([3.])
        """
        for local, start in zip(parameters, broadcast, strict=True):
            if local.grad is not None:
                local.grad.add_(local.detach() - start.detach(), alpha=self.mu)


@hookimpl
def craft_register_aggregators(register: Callable[[str, object], None]) -> None:
    """Offer the rule under its name."""
    register(FedProx.name, FedProx)
