"""AFL: agnostic federated learning (Mohri, Sivek, Suresh 2019, arXiv 1902.00146)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._contract import AggregationResult, ClientId, ClientUpdate, State
from .._intake import real, shaped
from .._layout import Granularity
from ..errors import CheckpointError
from ..plugins import hookimpl
from ._common import Common, plain_step, shows_common_options, within
from ._convex import simplex_projection
from ._entries import client_of, cloned, key_of, read_count, read_entries, read_round
from ._gram_rule import GramRule
from ._grams import Combination, Grams
from ._requirements import losses
from ._shards import local_state, whole_state

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AFL"]


@shows_common_options
class AFL(GramRule):
    """min over theta, max over lambda, of sum_k lambda_k F_k, lambda >= 0 with sum 1.

        theta <- theta - sum_k lambda_k g_k, with g_k = theta - theta_k
        lambda <- nearest weights to lambda + lambda_lr F, with F_k the loss before training

    Both steps start from the same (theta, lambda). lambda is uniform at first and belongs to
    clients by id. The paper has all clients in every round. Where some are away, those present
    are weighted by their lambda, renormalised, and only theirs is changed before the projection;
    a client seen for the first time gets an equal share.

    Needs ``ClientUpdate.loss``. Losses that differ by more than 1 / ``lambda_lr`` put all weight
    on one client in one round.

    Args:
        lambda_lr: Step length of lambda, > 0. Tuned in the paper; 0.1 is a usual value.
        average: Keep the mean of the models of all rounds, which the paper returns:
            :meth:`averaged_model`. Costs one model's memory.
        granularity: As for the other options, see :class:`GramRule`.
        **common: ``layout``, ``on_nonfinite``, ...: see :class:`GramRule`.

    Raises:
        OptionError: an option has a value that it does not take.

    Example:
        >>> from craft_adapters import ClientUpdate
        >>> rule = AFL(lambda_lr=0.1)
        >>> theta = {"w": torch.zeros(2)}
        >>> rows = torch.tensor([[0.5, 0.0], [0.0, 0.5]])
        >>> clients = [
        ...     ClientUpdate(0, 10, {"w": rows[0]}, "update", loss=1.0),
        ...     ClientUpdate(1, 10, {"w": rows[1]}, "update", loss=3.0),
        ... ]
        >>> rule.aggregate(theta, clients).state
        {'w': tensor([-0.2500, -0.2500])}
        >>> {client: round(weight, 3) for client, weight in rule.weights.items()}
        {0: 0.4, 1: 0.6}
    """

    name = "afl"
    separable = True
    requires = frozenset({"loss"})

    def __init__(
        self,
        *,
        lambda_lr: float = 0.1,
        average: bool = True,
        granularity: Granularity = "layer",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(granularity=granularity, **common)
        within("lambda_lr", lambda_lr, 0, math.inf, ends="()")
        self.lambda_lr = lambda_lr
        self.average = average
        self._weights: dict[ClientId, float] = {}
        self._mean: dict[str, Tensor] = {}
        self._models = 0

    @property
    def weights(self) -> Mapping[ClientId, float]:
        """Lambda of every client seen so far; they sum to 1."""
        return dict(self._weights)

    def averaged_model(self, global_state: Mapping[str, Any]) -> State:
        """The mean of the models after each round, with ``average``: what the paper returns.

        Args:
            global_state: The current model, for entries that have no mean: integers, booleans.

        Returns:
            Same names, shapes, dtypes and devices as ``global_state``; nothing is shared.
        """
        local = global_state if self._shards is None else local_state(global_state)
        mean: State = {}
        for name, value in local.items():
            if name in self._mean:
                mean[name] = shaped(self._mean[name], value)
            else:
                mean[name] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        return mean if self._shards is None else whole_state(mean, global_state)

    def combine(self, grams: Grams) -> Combination:
        """Lambda of those present, renormalised; equal if all of it is zero."""
        everyone = self._with(grams.clients)
        present = torch.tensor([everyone[c.client_id] for c in grams.clients], dtype=torch.float64)
        if not bool(present.any()):
            present = torch.ones_like(present)
        return plain_step(grams, present / present.sum())

    def commit(self, grams: Grams, combination: Combination, steps: Mapping[str, Tensor]) -> None:
        """The step of lambda."""
        everyone = self._with(grams.clients)
        for client, loss in zip(grams.clients, losses(grams.clients).tolist(), strict=True):
            everyone[client.client_id] += self.lambda_lr * loss
        point = torch.tensor(list(everyone.values()), dtype=torch.float64)
        self._weights = dict(zip(everyone, simplex_projection(point).tolist(), strict=True))

    def aggregate(
        self,
        global_state: Mapping[str, Any],
        updates: Iterable[ClientUpdate],
        *,
        round: int | None = None,
    ) -> AggregationResult:
        """See :meth:`craft_adapters.Aggregator.aggregate`."""
        result = super().aggregate(global_state, updates, round=round)
        if self.average:
            count = self._models + 1
            state = result.state if self._shards is None else local_state(result.state)
            self._mean = {
                name: _towards(self._mean.get(name), value, count)
                for name, value in state.items()
                if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
            }
            self._models = count
        return result

    def state_dict(self) -> State:
        """Round counter, lambda per client, the mean model and what it is the mean of."""
        return {
            "round": self._round,
            "weights": {key_of(client): value for client, value in self._weights.items()},
            "mean": cloned(self._mean),
            "models": self._models,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`craft_adapters.Aggregator.load_state_dict`."""
        number = read_round(self.name, state, {"round", "weights", "mean", "models"})
        models = read_count(self.name, state, "models")
        mean = read_entries(self.name, state, "mean", self._mean, device=self.device)
        weights = state.get("weights", {})
        values = list(weights.values()) if isinstance(weights, Mapping) else [math.nan]
        if not all(isinstance(value, float) and 0 <= value <= 1 for value in values) or (
            values and abs(math.fsum(values) - 1.0) > 1e-6
        ):
            raise CheckpointError(
                "not a state of rule 'afl': weights must be numbers >= 0 that sum to 1, one a "
                f"client, got {weights!r}"
            )
        self._weights = {client_of(self.name, key): value for key, value in weights.items()}
        self._mean, self._models, self._round = mean, models, number

    def _with(self, clients: Iterable[ClientUpdate]) -> dict[ClientId, float]:
        """Lambda with newcomers, who get the share that each of all would have."""
        new = [c.client_id for c in clients if c.client_id not in self._weights]
        count = len(self._weights) + len(new)
        kept = len(self._weights) / count
        return {
            **{client: kept * value for client, value in self._weights.items()},
            **{client: 1.0 / count for client in new},
        }


def _towards(mean: Tensor | None, value: Tensor, count: int) -> Tensor:
    """The mean of ``count`` values, flat, after one more; half types are added up in float32."""
    numbers = real(value.detach()).reshape(-1)
    numbers = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
    if mean is None:
        return numbers.clone()
    return mean.to(numbers) + (numbers - mean.to(numbers)) / count


@hookimpl
def craft_register_aggregators(register: Callable[[str, object], None]) -> None:
    """Offer the rule under its name."""
    register(AFL.name, AFL)
