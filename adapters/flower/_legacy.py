"""Strategies of Flower's legacy API: lists of arrays without names, in ``FitRes``."""

from __future__ import annotations

from typing import Any, ClassVar

from flwr.common import (
    FitIns,
    FitRes,
    Parameters,
    Scalar,
    bytes_to_ndarray,
    ndarrays_to_parameters,
)
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg, Strategy

from craft_adapters import Aggregator
from craft_adapters._contract import State
from craft_adapters.errors import OptionError, UnsupportedSetup

from ._arrays import Decoded, under_names
from ._front import is_flowers
from ._step import LOG, ServerStep, options_and_step

__all__ = ["LegacyCraftStrategy", "LegacyRuled"]

Results = list[tuple[ClientProxy, FitRes]]
Failures = list[tuple[ClientProxy, FitRes] | BaseException]


class LegacyRuled(Strategy):  # type: ignore[misc]  # without Flower its types are unknown
    """Stands in front of a strategy's own class, and aggregates by the rule."""

    aggregation: ClassVar[str] = "aggregate_fit"

    def use(self, step: ServerStep) -> None:
        """Aggregate by this.

        Raises:
            UnsupportedSetup: no names are given.
        """
        if step.names is None:
            raise UnsupportedSetup(
                "Flower's legacy strategies get lists of arrays without names, so layers and "
                "buffers cannot be told apart; give names=, the arrays' names in the order in "
                "which get_parameters() sends them: names=model.state_dict(), if it sends those"
            )
        self._step, self._names = step, step.names
        self._sent: Parameters | None = None

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """As the strategy does it; the model that is sent is what differences are taken from."""
        if len(parameters.tensors) != len(self._names):
            raise OptionError(
                f"names= has {len(self._names)} names for the model's {len(parameters.tensors)} "
                "arrays; name all that get_parameters() sends, in its order"
            )
        self._sent = parameters
        chosen: list[tuple[ClientProxy, FitIns]] = super().configure_fit(
            server_round, parameters, client_manager
        )
        return chosen

    def aggregate_fit(
        self, server_round: int, results: Results, failures: Failures
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """The rule's model, and the strategy's metrics."""
        if self._sent is None:
            raise UnsupportedSetup(
                "aggregate_fit was called before configure_fit, so the model that the clients "
                "started from is not known"
            )
        if len(results) > 1 and len({id(answer.parameters) for _, answer in results}) == 1:
            raise UnsupportedSetup(
                "all replies hold one and the same Parameters, as SecAgg+ makes them: the server "
                "sees a sum there and no client's model; use the default workflow"
            )
        for failure in failures:
            if isinstance(failure, BaseException):
                self._step.failed(server_round, None, str(failure) or repr(failure))
            else:
                proxy, answer = failure
                self._step.failed(server_round, proxy.cid, answer.status.message)
        if self._turns_down(len(results), len(failures)):
            LOG.warning(
                "%s: round %d: %d failures, which the strategy does not accept; the model stays "
                "as it is",
                self._step.rule.name,
                server_round,
                len(failures),
            )
            return None, {}
        sent = zip(self._names, self._sent.tensors, strict=True)
        state: State = dict(Decoded(dict(sent), bytes_to_ndarray))
        updates = [
            self._step.update(
                proxy.cid,
                answer.num_examples,
                Decoded(
                    under_names(
                        self._names, answer.parameters.tensors, bytes_to_ndarray, state, proxy.cid
                    ),
                    bytes_to_ndarray,
                ),
                answer.metrics,
            )
            for proxy, answer in results
        ]
        new = self._step.aggregate(server_round, state, updates)
        if new is None:
            return None, {}
        arrays = [value.cpu().numpy() for value in new.values()]
        return ndarrays_to_parameters(arrays), self._metrics(server_round, results, failures)

    def _turns_down(self, results: int, failures: int) -> bool:
        """As Flower's FedAvg and FaultTolerantFedAvg; nobody at all is left to the rule."""
        if not failures or not results:
            return False
        least: float = getattr(self, "completion_rate_fit", 0.0)
        return not getattr(self, "accept_failures", True) or results < least * (results + failures)

    def _metrics(
        self, server_round: int, results: Results, failures: Failures
    ) -> dict[str, Scalar]:
        """Flower's own strategies would average the models once more; yours is asked."""
        own = super().aggregate_fit
        metrics: dict[str, Scalar] = {}
        if not is_flowers(own):
            metrics = own(server_round, results, failures)[1]
        elif (mean := getattr(self, "fit_metrics_aggregation_fn", None)) is not None:
            metrics = mean([(answer.num_examples, answer.metrics) for _, answer in results])
        return metrics


class LegacyCraftStrategy(LegacyRuled, FedAvg):  # type: ignore[misc]
    """Flower's legacy FedAvg with the averaging replaced by a rule.

    Args:
        rule: A registered rule's name, or a rule for this strategy alone.
        **options: What ``flwr.server.strategy.FedAvg`` takes (``fraction_fit`` and so on), what
            :func:`wrap` takes (``names``, which must be given, ``state_path`` and so on), and the
            rule's options.

    Raises:
        UnsupportedSetup: no names, or the rule needs what no key is given for.
        OptionError: an unknown rule or option, or a value that it does not take.
        CheckpointError: the file of the rule's state is not this rule's.

    Example:
        >>> strategy = LegacyCraftStrategy(names=["weight", "bias"], fraction_fit=0.5)
        >>> strategy.fraction_fit
        0.5
    """

    def __init__(self, rule: str | Aggregator = "craft", **options: Any) -> None:
        flowers, step = options_and_step(rule, options, FedAvg)
        super().__init__(**flowers)
        self.use(step)
