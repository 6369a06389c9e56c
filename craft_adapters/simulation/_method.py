"""What clients and server do in a round."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .._contract import AggregationResult, Aggregator, ClientUpdate
from ..errors import NoUsableUpdates, OptionError
from ..metrics import ClientScores
from ..plugins import get_aggregator
from ._engines import Trained
from ._federation import Federation, Job

__all__ = ["Method"]


class Method:
    """Federated training of one shared model; personalised methods derive from it.

    A round: every client trains the model it received; the aggregator makes the next one of
    theirs. Nothing else depends on the rule.

    Args:
        aggregator: The server's rule: a registered name or an object.

    Attributes:
        aggregator: The rule.

    Raises:
        OptionError: no rule has this name.

    Example:
        >>> Method("craft").aggregator.name
        'craft'
    """

    def __init__(self, aggregator: str | Aggregator = "fedavg") -> None:
        if isinstance(aggregator, str):
            aggregator = get_aggregator(aggregator)
        if not isinstance(aggregator, Aggregator):
            raise OptionError(
                f"aggregator must be the name of a rule or an Aggregator, got {aggregator!r}"
            )
        self.aggregator = aggregator

    def round(
        self,
        federation: Federation,
        state: Mapping[str, Tensor],
        clients: Sequence[int],
        number: int,
    ) -> AggregationResult | None:
        """Play one round.

        Args:
            federation: Trains.
            state: The global model that is sent; not changed.
            clients: Who takes part.
            number: The round's number.

        Returns:
            The new global model and the rule's report; None if no client's update was usable:
            then a warning says so, and the model stays as it is.
        """
        losses: dict[int, float] = {}
        if "loss" in self.aggregator.requires:
            busy = [client for client in clients if federation.num_examples(client)]
            losses = federation.losses(lambda client: self.received(state, client), busy)
        trained = self.train(federation, state, clients, number)
        updates = [
            ClientUpdate(
                t.client,
                t.examples,
                t.state,
                loss=losses.get(t.client),
                local_steps=t.steps,
            )
            for t in trained
        ]
        try:
            return self.aggregator.aggregate(state, updates, round=number)
        except NoUsableUpdates as error:
            warnings.warn(
                f"round {number}: {error}; the global model stays as it is",
                RuntimeWarning,
                stacklevel=2,
            )
            return None

    def train(
        self,
        federation: Federation,
        state: Mapping[str, Tensor],
        clients: Sequence[int],
        number: int,
    ) -> list[Trained]:
        """The clients' part of a round: what each of them sends."""
        return federation.train([Job(client, state) for client in clients], round=number)

    def received(self, state: Mapping[str, Tensor], client: int) -> Mapping[str, Tensor]:
        """The model that a client has when it has received the global one."""
        return state

    def evaluate(
        self, federation: Federation, state: Mapping[str, Tensor]
    ) -> dict[str, ClientScores]:
        """Per-client scores by the kind of model: "global", and "personal" if there is one."""
        return {"global": federation.evaluate(state)}

    def keep_in(self, folder: Path) -> None:
        """Use this folder for what clients keep between rounds; called before the first round."""

    def commit(self) -> dict[str, Any]:
        """Make what clients keep safe on disk; return what :meth:`restore` needs (JSON)."""
        return {}

    def prune(self) -> None:
        """Delete what no checkpoint needs any more."""

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go back to a :meth:`commit`."""
