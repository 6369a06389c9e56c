"""FedAdagrad: a step per coordinate, by past squares (Reddi et al. 2021, arXiv 2003.00295)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from .._layout import Granularity
from ..plugins import hookimpl
from ._adaptive import AdaptiveRule
from ._common import Common, shows_common_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FedAdagrad"]


@shows_common_options
class FedAdagrad(AdaptiveRule):
    """v <- v + Delta^2, theta <- theta + server_lr m / (sqrt v + tau), with Delta the mean change.

    Element by element; m <- beta1 m + (1 - beta1) Delta from zero. Delta = sum_i p_i
    (theta_i - theta), with the data shares p_i of the round. Buffers are averaged. The same as
    ``torch.optim.Adagrad(eps=tau, initial_accumulator_value=initial_accumulator)`` with beta1 0.

    Args:
        server_lr: eta, > 0; tuned in the paper.
        beta1: Weight of the past in m, 0 <= beta1 < 1; 0 in the paper's experiments.
        tau: Added to sqrt v, > 0.
        initial_accumulator: v before the first round, >= 0; None: tau^2, the paper's (0 in some
            codes).
        granularity: As for the other options, see :class:`GramRule`.
        **common: ``layout``, ``on_nonfinite``, ...: see :class:`GramRule`.

    Raises:
        OptionError: an option has a value that it does not take.

    Example:
        >>> import torch
        >>> from craft_adapters import ClientUpdate
        >>> theta = {"w": torch.tensor([1.0, -1.0])}
        >>> client = ClientUpdate(0, 10, {"w": torch.tensor([0.5, -0.2])}, "update")
        >>> FedAdagrad(server_lr=0.1).aggregate(theta, [client]).state
        {'w': tensor([ 0.9002, -0.9005])}
    """

    name = "fedadagrad"

    def __init__(
        self,
        *,
        server_lr: float = 0.1,
        beta1: float = 0.0,
        tau: float = 1e-3,
        initial_accumulator: float | None = None,
        granularity: Granularity = "layer",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            server_lr=server_lr,
            beta1=beta1,
            tau=tau,
            initial_accumulator=initial_accumulator,
            granularity=granularity,
            **common,
        )

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The sum."""
        return v + square


@hookimpl
def craft_register_aggregators(register: Callable[[str, object], None]) -> None:
    """Offer the rule under its name."""
    register(FedAdagrad.name, FedAdagrad)
