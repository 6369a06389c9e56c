"""Between tinyfl and a rule."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from craft_adapters import ClientUpdate, NoUsableUpdates, get_aggregator


def new_strategy(
    rule: str = "craft", *, state_path: str | os.PathLike[str] | None = None, **options: Any
) -> Any:
    """A ``tinyfl.Strategy`` that combines by a rule.

    Args:
        rule: A registered rule's name.
        state_path: Where the rule's state is saved each round, and resumed from.
        **options: The rule's.
    """
    import tinyfl

    aggregator = get_aggregator(rule, **options)
    path = None if state_path is None else Path(state_path)
    if path is not None and path.exists():
        aggregator.load(path)
    arrived: list[ClientUpdate] = []

    class CraftStrategy(tinyfl.Strategy):
        def accept(self, update: tinyfl.Update) -> None:
            # tinyfl sends trained minus global, a rule wants global minus trained.
            values = {name: -torch.as_tensor(change) for name, change in update.change.items()}
            arrived.append(ClientUpdate(update.site, update.examples, values, kind="update"))

        def combine(self, model: tinyfl.Arrays) -> tinyfl.Arrays:
            updates = arrived.copy()
            arrived.clear()  # also if the rule fails: the next round has clients of its own
            state = {name: torch.as_tensor(array) for name, array in model.items()}
            try:
                result = aggregator.aggregate(state, updates)
            except NoUsableUpdates:
                return model
            if path is not None:
                aggregator.save(path)
            return {name: tensor.numpy() for name, tensor in result.state.items()}

    return CraftStrategy()
