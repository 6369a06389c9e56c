"""Between the host and the rule: translates, and computes nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from craft_adapters import Aggregator, ClientUpdate, NoUsableUpdates

__all__ = ["Adapter"]


class Adapter:
    """Fits a rule into the host's seam.

    Args:
        rule: The rule of this server alone.
        folder: Where the rule's state is kept; resumed from if it is there.
    """

    def __init__(self, rule: Aggregator, folder: Path) -> None:
        self.rule = rule
        self.path = folder / "rule.safetensors"
        if self.path.exists():
            rule.load(self.path)

    def __call__(
        self, model: Mapping[str, Any], replies: Sequence[Any], round: int
    ) -> Mapping[str, Any]:
        """The host asks for its next global model."""
        updates = [self.translate(model, reply) for reply in replies]
        try:
            result = self.rule.aggregate(model, updates, round=round)
        except NoUsableUpdates as error:
            logging.warning("round %d: %s; the global model stays as it is", round, error)
            return model
        self.rule.save(self.path)
        return result.state

    def translate(self, model: Mapping[str, Any], reply: Any) -> ClientUpdate:
        """One of the host's replies, as a rule wants it."""
        return ClientUpdate(
            reply.client,
            reply.examples,
            reply.model,
            loss=reply.metrics["loss"],
            local_steps=int(reply.metrics["steps"]),
        )
