"""A Flower strategy whose training results are aggregated by a rule."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from craft_adapters import Aggregator, ClientUpdate, get_aggregator
from craft_adapters.errors import (
    IncompatibleUpdate,
    NoUsableUpdates,
    OptionError,
    UnsupportedSetup,
)

__all__ = ["CraftStrategy", "wrap"]

_LOG = logging.getLogger("flwr")


class _Ruled(Strategy):  # type: ignore[misc]  # without Flower its types are unknown
    """See :func:`wrap`."""

    def __init__(
        self,
        strategy: Strategy,
        rule: Aggregator,
        state_path: Path | None,
        keys: dict[str, str | None],
        on_empty_round: str,
    ) -> None:
        self.strategy = strategy
        self.rule = rule
        self._state_path = state_path
        self._keys = keys
        self._on_empty_round = on_empty_round
        self._sent: ArrayRecord | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "strategy":  # not set yet: while it is copied
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy does it; the model that is sent is what differences are taken from."""
        self._sent = arrays
        messages: Iterable[Message] = self.strategy.configure_train(
            server_round, arrays, config, grid
        )
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
                _LOG.warning(
                    "%s: round %d: node %d left out: %s",
                    self.rule.name,
                    server_round,
                    reply.metadata.src_node_id,
                    reply.error.reason,
                )
            else:
                answers.append(reply)
        state = self._sent.to_torch_state_dict()
        updates = [self._update(reply) for reply in answers]
        try:
            result = self.rule.aggregate(state, updates, round=server_round)
        except NoUsableUpdates as error:
            if self._on_empty_round == "raise":
                raise
            _LOG.warning(
                "%s: round %d: %s; the model stays as it is", self.rule.name, server_round, error
            )
            return None, None
        if self._state_path is not None:
            self.rule.save(self._state_path)
        for client in result.report.dropped:
            _LOG.warning(
                "%s: round %d: node %s left out: %s",
                self.rule.name,
                server_round,
                client.client_id,
                client.reason,
            )
        metrics = self._metrics(server_round, answers)
        return ArrayRecord(torch_state_dict=result.state), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy does it."""
        messages: Iterable[Message] = self.strategy.configure_evaluate(
            server_round, arrays, config, grid
        )
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """As the strategy does it."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """The strategy's, and the rule."""
        self.strategy.summary()
        _LOG.info("\t└──> Aggregation: rule %r of craft-adapters", self.rule.name)

    def _update(self, reply: Message) -> ClientUpdate:
        node = reply.metadata.src_node_id
        content = reply.content
        arrays = list(content.array_records.values())
        metrics = list(content.metric_records.values())
        if len(arrays) != 1 or len(metrics) != 1:
            raise IncompatibleUpdate(
                f"node {node}: the reply has {len(arrays)} ArrayRecords and {len(metrics)} "
                "MetricRecords; send one of each"
            )
        numbers = {what: _number(metrics[0], key, node) for what, key in self._keys.items() if key}
        steps = numbers.get("local_steps")
        return ClientUpdate(
            node,
            numbers["num_examples"],
            arrays[0].to_torch_state_dict(),
            loss=numbers.get("loss"),
            local_steps=None if steps is None else int(steps),
        )

    def _metrics(self, server_round: int, answers: Sequence[Message]) -> MetricRecord | None:
        """Without having the strategy average the models too, where it can be avoided."""
        if isinstance(self.strategy, FedAvg):
            contents: list[RecordDict] = [reply.content for reply in answers]
            return self.strategy.train_metrics_aggr_fn(contents, self.strategy.weighted_by_key)
        return self.strategy.aggregate_train(server_round, answers)[1]


def _number(metrics: MetricRecord, key: str, node: int) -> float:
    value = metrics.get(key)
    if isinstance(value, list) or value is None:
        raise IncompatibleUpdate(
            f"node {node}: the reply's MetricRecord has {sorted(metrics)}, and {key!r} is needed "
            "as a number"
        )
    return float(value)


def wrap(
    strategy: Strategy,
    rule: str | Aggregator = "craft",
    *,
    state_path: str | os.PathLike[str] | None = None,
    loss_key: str | None = None,
    steps_key: str | None = None,
    on_empty_round: Literal["keep", "raise"] = "keep",
    **options: Any,
) -> Strategy:
    """A strategy that samples, evaluates and reports as the given one, and aggregates by a rule.

    Args:
        strategy: A strategy of ``flwr.serverapp.strategy``; not changed.
        rule: A registered rule's name, or a rule for this strategy alone.
        state_path: Where the rule's state is saved each round, and resumed from if it is there.
            Flower itself saves nothing: start again from the arrays of the round before.
        loss_key: Under which key of its MetricRecord a client reports the loss of the model that
            it received, for rules that need it.
        steps_key: The same for the number of local steps.
        on_empty_round: What a round without a usable reply does.
        **options: The rule's.

    Raises:
        UnsupportedSetup: the rule needs what no key is given for.
        OptionError: an unknown rule or option, or a value that it does not take.
        CheckpointError: the file of the rule's state is not this rule's.
    """
    if on_empty_round not in ("keep", "raise"):
        raise OptionError(f"on_empty_round must be 'keep' or 'raise', got {on_empty_round!r}")
    if isinstance(rule, str):
        rule = get_aggregator(rule, **options)
    elif options:
        raise OptionError(f"the rule is an object that has its options; also given: {options}")
    keys = {
        "num_examples": getattr(strategy, "weighted_by_key", "num-examples"),
        "loss": loss_key,
        "local_steps": steps_key,
    }
    for need, option in (("loss", "loss_key"), ("local_steps", "steps_key")):
        if need in rule.requires and keys[need] is None:
            raise UnsupportedSetup(
                f"rule {rule.name!r} needs {need} from every client; have the clients put it into "
                f"their MetricRecord, and give its key as {option}"
            )
    path = None if state_path is None else Path(state_path)
    if path is not None and path.exists():
        rule.load(path)
    return _Ruled(strategy, rule, path, keys, on_empty_round)


def CraftStrategy(
    rule: str | Aggregator = "craft",
    *,
    state_path: str | os.PathLike[str] | None = None,
    rule_options: dict[str, Any] | None = None,
    **fedavg: Any,
) -> Strategy:
    """Flower's FedAvg with the averaging replaced by a rule.

    Args:
        rule: See :func:`wrap`.
        state_path: See :func:`wrap`.
        rule_options: The rule's options.
        **fedavg: What ``flwr.serverapp.strategy.FedAvg`` takes: ``fraction_train`` and so on.
    """
    return wrap(FedAvg(**fedavg), rule, state_path=state_path, **(rule_options or {}))
