"""FedLF: layer-wise fair descent (Pan et al. 2024, AAAI 38)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from .._layout import Granularity
from ..errors import OptionError
from ..plugins import hookimpl
from ._common import EPS64, NOISE, Common, cancelled, plain_step, shows_common_options
from ._convex import min_norm_point, require
from ._grams import Combination, Grams
from ._history import HistoryRule
from ._requirements import losses

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FedLF", "fair_weights"]

# Losses that clients compute in float32 are equal up to this angle to (1, ..., 1).
_EQUAL = 1e-6
# The published code does not let an online client's inner product with the step fall below this.
_OPPOSED = -1e-6


@shows_common_options
class FedLF(HistoryRule):
    """Per layer, the shortest mixture of updates and a fair direction, at the plain mean's length.

    For each layer l, d_l is the shortest vector among the mixtures of the clients' updates g_i,l,
    of the last updates of absent clients, and of the fair row f_l = sum_i h_i g_i,l, with
    h = d P / d F for P(F) = -cos((1, ..., 1), F) of the losses F. So d_l points against none of
    them. d is all d_l, rescaled to the length of the unweighted mean of the g_i, and
    theta <- theta - d.

    Last updates count for int(M / m) rounds, for M clients seen before and m in the round; only if
    M > m. Rows that are zero in a layer are left out there, and so is the fair row where the
    losses are equal.

    Needs ``ClientUpdate.loss``, and scipy: the extra ``rules``.

    Args:
        variant: ``"paper"``: a layer with d_l = 0 is merged with the next one (the last with the
            one before) until there is none, or a single layer with d = 0. ``"code"``: rows are
            rescaled, per layer, to the mean length of the clients' rows, the fair row is made from
            those and rescaled too, layers are not merged, and the final rescaling is halved or
            left out where it would take an online client's inner product below -1e-6.
        history_limit: Number of clients whose last updates are kept, the latest; None: all.
        history_folder: A folder for last updates; None keeps them in memory.
        granularity: What is a layer; ``"tensor"`` in the published code. As for the other options,
            see :class:`GramRule`.
        **common: ``layout``, ``on_nonfinite``, ...: see :class:`GramRule`.

    Raises:
        OptionError: an option has a value that it does not take.
        ImportError: scipy is missing.

    Example:
        >>> from craft_adapters import ClientUpdate
        >>> theta = {"w": torch.zeros(2)}
        >>> clients = [
        ...     ClientUpdate(0, 10, {"w": torch.tensor([2.0, 0.0])}, "update", loss=1.0),
        ...     ClientUpdate(1, 10, {"w": torch.tensor([0.0, 2.0])}, "update", loss=1.0),
        ... ]
        >>> FedLF().aggregate(theta, clients).state
        {'w': tensor([-1., -1.])}
    """

    name = "fedlf"
    requires = frozenset({"loss"})

    def __init__(
        self,
        *,
        variant: Literal["paper", "code"] = "paper",
        history_limit: int | None = None,
        history_folder: str | None = None,
        granularity: Granularity = "layer",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            history_limit=history_limit,
            history_folder=history_folder,
            granularity=granularity,
            **common,
        )
        if variant not in ("paper", "code"):
            raise OptionError(f"variant must be 'paper' or 'code', got {variant!r}")
        require("scipy")
        self.variant = variant

    def window(self, present: int) -> int:
        """M / m rounds, if more clients are known than are present."""
        seen = len(self._last)
        return seen // present if seen > present else 0

    def combine(self, grams: Grams) -> Combination:
        """The mixtures of all layers."""
        count, products = len(grams.clients), grams.all_products
        fair = fair_weights(losses(grams.clients))
        weights = torch.zeros(products.shape[:2], dtype=torch.float64)
        if self.variant == "code":
            for q, matrix in enumerate(products):
                weights[q] = _mixture(matrix, fair, level=True)
        else:
            for layers, mixture in _merged(products, fair, grams.rounding):
                weights[layers] = mixture
        inner = (products @ weights.unsqueeze(-1)).squeeze(-1)
        length = float((weights * inner).sum().clamp(min=0.0).sqrt())
        mean = float(products[:, :count, :count].sum().clamp(min=0.0).sqrt()) / count
        rate = mean / length if length > 0 else 0.0
        if self.variant == "code":
            rate = _harmless(rate, float(inner[:, :count].sum(0).amin()))
        combination = plain_step(
            grams, weights[:, :count], rate=rate, noise=cancelled(grams, weights)
        )
        return dataclasses.replace(combination, past_weights=weights[:, count:])


def fair_weights(losses: Tensor) -> Tensor:
    """The gradient h (m,) of P(F) = -cos((1, ..., 1), F), which lowers the larger losses first.

    h = ((1 . F) F / (|1| |F|) - 1 |F| / |1|) / |F|^2, orthogonal to F; zero where the losses are
    equal, or all zero.

    >>> fair_weights(torch.tensor([1.0, 2.0], dtype=torch.float64))
    tensor([-0.1265,  0.0632], dtype=torch.float64)
    """
    norm, root = losses.square().sum().sqrt(), math.sqrt(len(losses))
    if norm == 0:
        return torch.zeros_like(losses)
    unit = losses / norm
    tilt = (unit.sum() * unit - 1.0) / root  # as long as the sine of the angle between 1 and F
    return tilt / norm if float(tilt.square().sum().sqrt()) > _EQUAL else torch.zeros_like(losses)


def _mixture(products: Tensor, fair: Tensor, *, level: bool = False) -> Tensor:
    """Weights (m + k,) on the rows of the shortest mixture of the rows and the fair one.

    Args:
        products: (m + k, m + k) Gram matrix of one layer.
        fair: (m,) h.
        level: Rescale all rows to the mean length of the clients' first.
    """
    lengths = products.diagonal().clamp(min=0.0).sqrt()
    clients = lengths[: len(fair)]
    if not bool((clients > 0).any()):
        return torch.zeros_like(lengths)
    common = clients[clients > 0].mean()
    scale = torch.where(lengths > 0, common / lengths, 0.0) if level else torch.ones_like(lengths)
    rows = torch.diag(scale)[lengths > 0]
    row = torch.nn.functional.pad(fair, (0, len(lengths) - len(fair))) * scale
    length = float((row @ products @ row).clamp(min=0.0).sqrt())
    # Shorter than what rounding leaves of its terms: it has no direction.
    if length > 1e-12 * float((row.abs() * lengths).sum()):
        rows = torch.cat([rows, (row * (common / length if level else 1.0)).unsqueeze(0)])
    return min_norm_point(rows @ products @ rows.T) @ rows


def _merged(products: Tensor, fair: Tensor, rounding: Tensor) -> list[tuple[list[int], Tensor]]:
    """Layers that have one mixture, and its weights; merged until no mixture cancels."""
    # Float32 rows that ought to cancel leave their rounding; float64 itself loses the rest.
    least = (NOISE * rounding).square().clamp(min=NOISE * products.shape[1] * EPS64)

    def solved(layers: list[int]) -> tuple[list[int], Tensor, bool]:
        together = products[layers].sum(0)
        weights = _mixture(together, fair)
        square = float(weights @ together @ weights)
        cancels = square <= float(least[layers].amax() * together.diagonal().amax())
        return layers, weights, cancels

    parts = [solved([q]) for q in range(len(products))]
    while len(parts) > 1 and any(cancels for _, _, cancels in parts):
        first = next(i for i, (_, _, cancels) in enumerate(parts) if cancels)
        first = min(first, len(parts) - 2)
        parts[first : first + 2] = [solved(parts[first][0] + parts[first + 1][0])]
    return [(layers, torch.zeros_like(w) if cancels else w) for layers, w, cancels in parts]


def _harmless(rate: float, least: float) -> float:
    """The published code's guard: ``least`` is the smallest inner product with d, unscaled."""
    while rate * least < _OPPOSED:
        if rate <= 2.0:
            return 1.0
        rate /= 2.0
    return rate


@hookimpl
def craft_register_aggregators(register: Callable[[str, object], None]) -> None:
    """Offer the rule under its name."""
    register(FedLF.name, FedLF)
