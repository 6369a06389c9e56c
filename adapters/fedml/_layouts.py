"""Handing the rule an exact layout where FedML has the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from craft_adapters import Aggregator
from craft_adapters._layout import Layout
from craft_adapters.aggregators import GramRule

__all__ = ["give_layout"]


def give_layout(rule: Aggregator, model: Any, state: Mapping[str, Any]) -> None:
    """Tell the rule which entries are buffers, norm layers and tied weights.

    Names and shapes alone do not show a tied weight once FedML has copied the model, or a float
    buffer of an unusual name. Rules of other kinds, and rules given a layout, are left alone, and
    so are servers whose global model is not the whole state of their module (adapters of a large
    model, wrapped models).

    Args:
        rule: The rule, before its first round.
        model: The server's module, if it has one.
        state: The global model, as the rule will see it.
    """
    if (
        isinstance(rule, GramRule)
        and rule.layout is None
        and isinstance(model, nn.Module)
        and model.state_dict().keys() == state.keys()
    ):
        rule.layout = Layout.from_model(model, rule.granularity)
