"""What a rule and the clients' training have to agree on, whatever the rule.

A rule may have these attributes; the federation looks for nothing else, and for no name:

=================== ===========================================================================
mu                  weight of the clients' proximal term: training takes it
client_momentum     momentum of the clients' SGD: training takes it
client_lr           the clients' learning rate: set to that of each round before it begins
averaged_model      ``averaged_model(state)``: the model to evaluate in place of the last one
=================== ===========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .._contract import Aggregator
from ..errors import OptionError
from ._settings import LocalTraining

__all__ = ["RATE", "agreed", "evaluated", "tell_rate"]

RATE = "client_lr"
# Attribute of a rule -> setting of the training.
_TAKEN = {"mu": "proximal", "client_momentum": "momentum"}


def agreed(rule: Aggregator, training: LocalTraining) -> LocalTraining:
    """The clients' training, with what the rule asks of it.

    Raises:
        OptionError: both say something, and not the same.

    Example:
        >>> from craft_adapters import get_aggregator
        >>> agreed(get_aggregator("fedprox", mu=0.1), LocalTraining()).proximal
        0.1
    """
    rate = getattr(rule, RATE, None)
    if rate not in (None, training.lr):
        raise OptionError(
            f"lr is {training.lr} and {RATE} of rule {rule.name!r} {rate}, which is the same "
            f"thing: leave {RATE} out"
        )
    changes: dict[str, Any] = {}
    for attribute, setting in _TAKEN.items():
        asked, given = getattr(rule, attribute, None), getattr(training, setting)
        if asked is None or asked == given:
            continue
        if given:
            raise OptionError(
                f"{setting} is {given} and {attribute} of rule {rule.name!r} {asked}, which is the "
                f"same thing: leave {setting} out"
            )
        changes[setting] = asked
    return replace(training, **changes)


def tell_rate(rule: Aggregator, rate: float) -> None:
    """Let the rule know the clients' learning rate of this round."""
    if hasattr(rule, RATE):
        setattr(rule, RATE, rate)


def evaluated(rule: Aggregator, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model that the rule is about: the current one, or a mean that the rule keeps."""
    averaged = getattr(rule, "averaged_model", None)
    found: Mapping[str, Any] = state if averaged is None else averaged(state)
    return found
