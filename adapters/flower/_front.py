"""Putting the rule in front of a strategy that someone has."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from flwr.serverapp.strategy import Strategy

from craft_adapters import Aggregator
from craft_adapters.errors import OptionError, UnsupportedSetup

from ._step import LOG, ServerStep

__all__ = ["is_flowers", "wrap"]

AnyStrategy = TypeVar("AnyStrategy")

_NOISE = (
    "it adds noise that is measured for an average, and another rule's result would have lost the "
    "privacy that the noise is for; leave it as it is"
)
_TREES = "what its clients send are trees, no arrays that can be added; leave it as it is"
_REFUSED = {"DifferentialPrivacy": _NOISE, "DPFedAvg": _NOISE, "FedXgb": _TREES}


def wrap(
    strategy: AnyStrategy,
    rule: str | Aggregator = "craft",
    *,
    names: Iterable[str] | None = None,
    state_path: str | os.PathLike[str] | None = None,
    loss_key: str | None = None,
    steps_key: str | None = None,
    on_empty_round: Literal["keep", "raise"] = "keep",
    **options: Any,
) -> AnyStrategy:
    """A strategy that samples, evaluates and reports as the given one, and aggregates by a rule.

    Metrics of training are aggregated by the strategy's own function. Where the strategy has an
    aggregation of your own, that runs too, for the metrics that it returns; its arrays are not
    used. To have such a method see the rule's arrays, derive the class from :class:`CraftStrategy`
    instead of Flower's FedAvg.

    Args:
        strategy: A strategy of ``flwr.serverapp.strategy`` or of the legacy
            ``flwr.server.strategy``; not changed. Use what is returned.
        rule: A registered rule's name, or a rule for this strategy alone.
        names: Names of the arrays in their order, ``model.state_dict()`` for instance: needed
            where the arrays are a plain list, as they always are with a legacy strategy. Which
            arrays are a layer, and which are buffers, is read off the names.
        state_path: Where the rule's state is saved each round, and resumed from if it is there.
            Flower itself saves nothing: start again from the arrays of the last round.
        loss_key: Under which key of its metrics a client reports the loss of the model that it
            received, for rules that need it.
        steps_key: The same for the number of local steps.
        on_empty_round: What a round without a usable reply does: keep the model and warn, or
            raise NoUsableUpdates.
        **options: The rule's.

    Returns:
        A copy of the strategy, of a class derived from its class.

    Raises:
        UnsupportedSetup: the rule needs what no key is given for, a legacy strategy without names,
            or a strategy whose aggregation must not be replaced.
        OptionError: an unknown rule or option, or a value that it does not take.
        CheckpointError: the file of the rule's state is not this rule's.

    Example:
        >>> from flwr.serverapp.strategy import FedAvg
        >>> strategy = wrap(FedAvg(fraction_train=0.5), "craft", server_lr=0.1)
        >>> type(strategy).__name__, strategy.fraction_train
        ('CraftFedAvg', 0.5)
    """
    front = _front_of(strategy)
    step = ServerStep(
        rule,
        names=names,
        state_path=state_path,
        loss_key=loss_key,
        steps_key=steps_key,
        on_empty_round=on_empty_round,
        **options,
    )
    own = type(strategy)
    wrapped = copy.copy(strategy)
    wrapped.__class__ = type(f"Craft{own.__name__}", (front, own), {"__module__": own.__module__})
    wrapped.use(step)  # type: ignore[attr-defined]
    return wrapped


def _front_of(strategy: object) -> Any:
    """The class to put in front, by the API that the strategy is written for."""
    from ._strategy import Ruled

    front: Any = Ruled
    if not isinstance(strategy, Strategy):
        from flwr.server.strategy import Strategy as LegacyStrategy

        from ._legacy import LegacyRuled

        if not isinstance(strategy, LegacyStrategy):
            raise OptionError(
                f"wrap takes a strategy object of flwr.serverapp.strategy or flwr.server.strategy, "
                f"got {strategy!r}"
            )
        front = LegacyRuled
    name = type(strategy).__name__
    if isinstance(strategy, front):
        raise UnsupportedSetup(f"{name} is wrapped already; wrap the strategy that was in it")
    for cls in type(strategy).__mro__:
        for prefix, reason in _REFUSED.items():
            if cls.__name__.startswith(prefix):
                raise UnsupportedSetup(f"{name} cannot be wrapped: {reason}")
    if not is_flowers(own := getattr(strategy, front.aggregation)):
        LOG.warning("%s runs for its metrics only: the arrays are the rule's", own.__qualname__)
    return front


def is_flowers(method: Any) -> bool:
    """Whether a method comes with Flower."""
    return str(method.__module__).partition(".")[0] == "flwr"
