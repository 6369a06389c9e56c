"""Strategies of Flower's current API, whose training results are aggregated by a rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from craft_adapters import Aggregator, ClientUpdate
from craft_adapters._contract import State
from craft_adapters.errors import IncompatibleUpdate, OptionError, UnsupportedSetup

from ._arrays import Decoded, are_positions, under_names
from ._front import is_flowers
from ._step import LOG, ServerStep, number, options_and_step

__all__ = ["CraftStrategy", "Ruled"]


class Ruled(Strategy):  # type: ignore[misc]  # without Flower its types are unknown
    """Stands in front of a strategy's own class, and aggregates by the rule."""

    aggregation: ClassVar[str] = "aggregate_train"

    def use(self, step: ServerStep) -> None:
        """Aggregate by this."""
        self._step = step
        self._sent: ArrayRecord | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy does it; the model that is sent is what differences are taken from."""
        self._check_names(arrays)
        self._sent = arrays
        messages: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The rule's model, and the strategy's metrics."""
        if self._sent is None:
            raise UnsupportedSetup(
                "aggregate_train was called before configure_train, so the model that the clients "
                "started from is not known; call start()"
            )
        answers = []
        for reply in replies:
            if reply.has_error():
                self._step.failed(server_round, reply.metadata.src_node_id, reply.error.reason)
            else:
                answers.append(reply)
        names = self._step.names or tuple(self._sent)
        arrays = zip(names, self._sent.values(), strict=True)
        state: State = dict(Decoded(dict(arrays), Array.numpy))
        updates = [self._update(reply, state) for reply in answers]
        self._check_metrics(answers)
        new = self._step.aggregate(server_round, state, updates)
        if new is None:
            return None, None
        record = dict(zip(self._sent, new.values(), strict=True))
        return ArrayRecord(torch_state_dict=record), self._metrics(server_round, answers)

    def summary(self) -> None:
        """The strategy's, and the rule."""
        super().summary()
        LOG.info("\t└──> Aggregation: rule %r of craft-adapters", self._step.rule.name)

    def _check_names(self, arrays: ArrayRecord) -> None:
        names, listed = self._step.names, are_positions(arrays)
        if names is None and listed:
            raise UnsupportedSetup(
                f"the model's {len(arrays)} arrays have no names, only positions, so layers and "
                "buffers cannot be told apart; make it by ArrayRecord(torch_state_dict=...) or "
                "give names=, the arrays' names in their order (such as model.state_dict())"
            )
        if names is not None and not listed:
            raise OptionError(
                f"names= is for arrays without names, and the model's have some: {[*arrays][:3]}"
            )
        if names is not None and len(names) != len(arrays):
            raise OptionError(f"names= has {len(names)} names for the model's {len(arrays)} arrays")

    def _update(self, reply: Message, state: State) -> ClientUpdate:
        node, content = reply.metadata.src_node_id, reply.content
        arrays = list(content.array_records.values())
        if len(arrays) != 1 or len(content.metric_records) != 1:
            raise IncompatibleUpdate(
                f"client {node}: its reply has {len(arrays)} ArrayRecords and "
                f"{len(content.metric_records)} MetricRecords; send one of each"
            )
        metrics = _metrics_of(reply)
        values: Mapping[str, Any] = arrays[0]
        if (names := self._step.names) is not None:
            if not are_positions(values):
                raise IncompatibleUpdate(
                    f"client {node}: its arrays have names ({[*values][:3]}), the model's have not"
                )
            values = under_names(names, [*values.values()], Array.numpy, state, node)
        weight = number(metrics, getattr(self, "weighted_by_key", "num-examples"), node)
        return self._step.update(node, weight, Decoded(values, Array.numpy), metrics)

    def _check_metrics(self, answers: Sequence[Message]) -> None:
        """As Flower's strategies do: their means leave out what only some clients report."""
        for reply in answers:
            if _metrics_of(reply).keys() != _metrics_of(answers[0]).keys():
                raise IncompatibleUpdate(
                    f"client {reply.metadata.src_node_id}: its metrics are "
                    f"{sorted(_metrics_of(reply))}, those of client "
                    f"{answers[0].metadata.src_node_id} are {sorted(_metrics_of(answers[0]))}; "
                    "report the same from all"
                )

    def _metrics(self, server_round: int, answers: Sequence[Message]) -> MetricRecord | None:
        """Flower's own strategies would average the models once more; yours is asked."""
        own = super().aggregate_train
        if is_flowers(own):
            return self.train_metrics_aggr_fn([a.content for a in answers], self.weighted_by_key)
        metrics: MetricRecord | None = own(server_round, answers)[1]
        return metrics


def _metrics_of(reply: Message) -> MetricRecord:
    return next(iter(reply.content.metric_records.values()))


class CraftStrategy(Ruled, FedAvg):  # type: ignore[misc]
    """Flower's FedAvg with the averaging replaced by a rule, for an app of Flower's current API.

    Args:
        rule: A registered rule's name, or a rule for this strategy alone.
        **options: What ``flwr.serverapp.strategy.FedAvg`` takes (``fraction_train`` and so on),
            what :func:`wrap` takes (``state_path`` and so on), and the rule's options.

    Raises:
        UnsupportedSetup: the rule needs what no key is given for.
        OptionError: an unknown rule or option, or a value that it does not take.
        CheckpointError: the file of the rule's state is not this rule's.

    Example:
        >>> strategy = CraftStrategy(fraction_train=0.5, server_lr=0.1)
        >>> strategy.fraction_train
        0.5
    """

    def __init__(self, rule: str | Aggregator = "craft", **options: Any) -> None:
        flowers, step = options_and_step(rule, options, FedAvg)
        super().__init__(**flowers)
        self.use(step)
