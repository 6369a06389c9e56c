"""CRAFT on one ServerAggregator object: its ``aggregate`` is replaced, everything else is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from craft_adapters._contract import ClientId

from ._server_step import ServerStep, Upload, identify

__all__ = ["Aggregate", "attach", "step_of"]

Received = Sequence[tuple[ClientId, Mapping[str, Any]]]


class Aggregate:
    """Stands in for ``ServerAggregator.aggregate`` (core/alg_frame/server_aggregator.py).

    FedML's order is kept: a defence that acts in the aggregation is given the rule in the place of
    ``FedMLAggOperator.agg``; without one, NbAFL is told this round's sample counts. What happens
    before and after (``on_before_aggregation``, ``on_after_aggregation``) is not touched.
    ``FedMLAggOperator.agg`` itself stays FedML's: contribution assessment calls it for subsets of
    clients, which would push the rule's state on.

    Attributes:
        step: The rule and its files.
        explicit: Made by ``wrap``, not by a config.
        received: Gives this round's uploads as they came in, once a server is there.
    """

    def __init__(self, server_aggregator: Any, step: ServerStep, *, explicit: bool) -> None:
        self.step = step
        self.explicit = explicit
        self.received: Callable[[], Received] | None = None
        self._server_aggregator = server_aggregator

    def __call__(self, raw_client_model_or_grad_list: list[Upload]) -> Any:
        """One aggregation, as FedML calls it."""
        from fedml.core.dp.fedml_differential_privacy import FedMLDifferentialPrivacy
        from fedml.core.security.fedml_defender import FedMLDefender

        # Once a round: FedLLM's aggregators read it from the disk.
        global_state = self._server_aggregator.get_model_params()

        def base(args: Any, raw_grad_list: Sequence[Upload]) -> Any:
            received = self.received() if self.received else list(enumerate(_values(raw_grad_list)))
            return self.step(
                global_state,
                raw_grad_list,
                identify(raw_grad_list, received),
                getattr(self._server_aggregator.args, "round_idx", None),
            )

        args = self._server_aggregator.args
        defender = FedMLDefender.get_instance()
        if defender.is_defense_enabled():
            return defender.defend_on_aggregation(
                raw_client_grad_list=raw_client_model_or_grad_list,
                base_aggregation_func=base,
                extra_auxiliary_info=global_state,
            )
        privacy = FedMLDifferentialPrivacy.get_instance()
        if privacy.to_compute_params_in_aggregation_enabled():
            privacy.set_params_for_dp(raw_client_model_or_grad_list)
        return base(args, raw_client_model_or_grad_list)


def attach(server_aggregator: Any, step: ServerStep, *, explicit: bool = False) -> Aggregate:
    """Put ``step`` in the place of the object's ``aggregate``."""
    aggregate = Aggregate(server_aggregator, step, explicit=explicit)
    server_aggregator.aggregate = aggregate
    return aggregate


def step_of(server_aggregator: Any) -> ServerStep | None:
    """The step that ``wrap`` gave this object, if it did."""
    aggregate = getattr(server_aggregator, "aggregate", None)
    return aggregate.step if isinstance(aggregate, Aggregate) and aggregate.explicit else None


def _values(uploads: Sequence[Upload]) -> list[Mapping[str, Any]]:
    return [values for _, values in uploads]
