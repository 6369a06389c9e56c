"""FedFV: conflicts taken out of the updates before the mean (Wang 2021, arXiv 2104.14937)."""

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
from ._common import Common, cancelled, plain_step, shows_common_options, within
from ._grams import Combination, Grams
from ._history import HistoryRule
from ._requirements import losses

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FedFV"]


@shows_common_options
class FedFV(HistoryRule):
    """The mean of the updates after conflicts are taken out, at the length of the plain mean.

    1. Clients are put in the order of their losses, smallest first. Each update is projected in
       that order on the plane orthogonal to every other's original update that it points against;
       so the client with the largest loss is respected best. The share ``alpha`` of the clients
       with the largest losses keep their updates.
    2. u is the unweighted mean of what came out.
    3. For each of the ``tau`` rounds before, oldest first: the last updates of the clients that
       were then seen last, and that u points against, are added up; if u points against the sum,
       it is projected on the plane orthogonal to it. Not before round ``tau``.
    4. theta <- theta - u |mean of the g_i| / |u|, with g_i = theta - theta_i.

    Needs ``ClientUpdate.loss``. A sum that cancels leaves the model as it is.

    Args:
        alpha: Share of clients that keep their updates, 0 <= alpha <= 1: all but
            ceil((m - 1) (1 - alpha)) of m, as in the authors' code.
        tau: Number of rounds back, >= 0.
        variant: ``"paper"``: step 3 goes from ``tau`` rounds ago to the round before, where only
            clients that are away now were seen last. ``"code"``: from ``tau`` - 1 rounds ago to
            this round, so that with ``tau`` 1 absent clients do not count.
        history_limit: Number of clients whose last updates are kept, the latest; None: all that
            matter.
        history_folder: A folder for last updates; None keeps them in memory.
        granularity: What is one vector: ``"model"`` (the paper), ``"layer"``, ... As for the other
            options, see :class:`GramRule`.
        **common: ``layout``, ``on_nonfinite``, ...: see :class:`GramRule`.

    Raises:
        OptionError: an option has a value that it does not take.

    Example:
        >>> from craft_adapters import ClientUpdate
        >>> theta = {"w": torch.zeros(2)}
        >>> clients = [
        ...     ClientUpdate(i, 10, {"w": torch.tensor(row)}, "update", loss=loss)
        ...     for i, (row, loss) in enumerate(
        ...         [([1.0, 0.0], 0.5), ([-1.0, 1.0], 2.0), ([0.0, -2.0], 1.0)]
        ...     )
        ... ]
        >>> FedFV().aggregate(theta, clients).state
        {'w': tensor([ 0.3162, -0.1054])}
    """

    name = "fedfv"
    separable = True
    requires = frozenset({"loss"})

    def __init__(
        self,
        *,
        alpha: float = 0.1,
        tau: int = 1,
        variant: Literal["paper", "code"] = "paper",
        history_limit: int | None = None,
        history_folder: str | None = None,
        granularity: Granularity = "model",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            history_limit=history_limit,
            history_folder=history_folder,
            granularity=granularity,
            **common,
        )
        within("alpha", alpha, 0, 1)
        within("tau", tau, 0, math.inf, ends="[)")
        if variant not in ("paper", "code"):
            raise OptionError(f"variant must be 'paper' or 'code', got {variant!r}")
        self.alpha = alpha
        self.tau = tau
        # Rounds back, oldest first.
        self._looks = range(tau, 0, -1) if variant == "paper" else range(tau - 1, -1, -1)

    def window(self, present: int) -> int:
        """The same in every round."""
        return max(self._looks, default=0)

    def matters(self, age: int) -> bool:
        """Whether an update is within the window."""
        return age <= self.window(0)

    def combine(self, grams: Grams) -> Combination:
        """All projections, on coefficients."""
        count = len(grams.clients)
        order = losses(grams.clients).argsort(stable=True)
        kept = order[count - kept_clients(count, self.alpha) :]
        projected = _without_conflicts(grams.products, order, kept)
        step = torch.nn.functional.pad(projected.mean(1), (0, len(grams.past)))
        if self._rounds >= self.tau:
            ages = self.ages(grams)
            for age in self._looks:
                step = _away_from(grams.all_products, step, ages == age)
        combination = plain_step(grams, step[:, :count], noise=cancelled(grams, step))
        mean_norms = grams.products.sum((-2, -1)).clamp(min=0.0).sqrt() / count
        return dataclasses.replace(combination, past_weights=step[:, count:], lengths=mean_norms)


def kept_clients(clients: int, alpha: float) -> int:
    """How many of the clients keep their updates.

    >>> [kept_clients(m, 0.1) for m in (1, 10, 11, 100)]
    [1, 1, 2, 10]
    """
    return clients - math.ceil((clients - 1) * (1 - alpha)) if alpha > 0 else 0


def _without_conflicts(products: Tensor, order: Tensor, kept: Tensor) -> Tensor:
    """(q, m, m) Each client's update after step 1, as coefficients on the originals."""
    groups, count, _ = products.shape
    vectors = torch.eye(count, dtype=torch.float64).repeat(groups, 1, 1)
    for other in order.tolist():
        inner = (vectors @ products[:, :, other : other + 1]).squeeze(-1)
        inner = inner.clamp(max=0.0)
        inner[:, kept] = 0.0
        inner[:, other] = 0.0
        # Where somebody conflicts with it, its length is not zero.
        squares = products[:, other, other].unsqueeze(-1)
        vectors[:, :, other] -= torch.where(inner < 0, inner / squares, 0.0)
    return vectors


def _away_from(products: Tensor, step: Tensor, rows: Tensor) -> Tensor:
    """(q, m + k) The step after step 3 for some rows (m + k,) bool."""
    inner = (products @ step.unsqueeze(-1)).squeeze(-1)
    against = (rows & (inner < 0)).to(torch.float64)
    along = (against * inner).sum(-1, keepdim=True)
    squares = (against * (products @ against.unsqueeze(-1)).squeeze(-1)).sum(-1, keepdim=True)
    return step - against * torch.where(along < 0, along / squares, 0.0)


@hookimpl
def craft_register_aggregators(register: Callable[[str, object], None]) -> None:
    """Offer the rule under its name."""
    register(FedFV.name, FedFV)
