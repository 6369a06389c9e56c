"""FedYogi: a step per coordinate, scaled slowly (Reddi et al. 2021, arXiv 2003.00295)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from .._layout import Granularity
from ..plugins import hookimpl
from ._adaptive import DecayingRule
from ._common import Common, shows_common_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FedYogi"]


@shows_common_options
class FedYogi(DecayingRule):
    """theta <- theta + server_lr m / (sqrt v + tau), with v that follows Delta^2 slowly.

    Element by element, with Delta = sum_i p_i (theta_i - theta) and the data shares p_i of the
    round; m <- beta1 m + (1 - beta1) Delta from zero, v <- v - (1 - beta2) Delta^2
    sign(v - Delta^2). Buffers are averaged. The first steps are about ``server_lr`` long in every
    coordinate, whatever the size of the updates.

    Args:
        server_lr: eta, > 0; tuned in the paper.
        beta1: Weight of the past in m, 0 <= beta1 < 1.
        beta2: Weight of the past in v, 0 <= beta2 < 1.
        tau: Added to sqrt v, > 0.
        bias_correction: ``"none"`` (the paper; Flower too), ``"keras"``: eta is multiplied by
            sqrt(1 - beta2^t) / (1 - beta1^t) in the t-th round, t = 1, 2, ..., as in the paper's
            experiments.
        initial_accumulator: v before the first round, >= 0; None: tau^2, the paper's, and 0 with
            a bias correction.
        granularity: As for the other options, see :class:`GramRule`.
        **common: ``layout``, ``on_nonfinite``, ...: see :class:`GramRule`.

    Raises:
        OptionError: an option has a value that it does not take.

    Example:
        >>> from craft_adapters import ClientUpdate
        >>> theta = {"w": torch.tensor([1.0, -1.0])}
        >>> client = ClientUpdate(0, 10, {"w": torch.tensor([0.5, -0.2])}, "update")
        >>> FedYogi(server_lr=0.1).aggregate(theta, [client]).state
        {'w': tensor([ 0.9020, -0.9049])}
    """

    name = "fedyogi"

    def __init__(
        self,
        *,
        server_lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        bias_correction: Literal["none", "keras"] = "none",
        initial_accumulator: float | None = None,
        granularity: Granularity = "layer",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            server_lr=server_lr,
            beta1=beta1,
            beta2=beta2,
            tau=tau,
            bias_correction=bias_correction,
            initial_accumulator=initial_accumulator,
            granularity=granularity,
            **common,
        )

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The next v."""
        return v - (1 - self.beta2) * square * torch.sign(v - square)


@hookimpl
def craft_register_aggregators(register: Callable[[str, object], None]) -> None:
    """Offer the rule under its name."""
    register(FedYogi.name, FedYogi)
