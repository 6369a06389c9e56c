"""The toy host: somebody's federated-learning framework in a few lines.

It knows nothing of rules. Its one seam is a function that combines what clients sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Host", "Reply"]

Model = Mapping[str, Any]


@dataclass
class Reply:
    """What one client sends."""

    client: int
    examples: int
    model: dict[str, Any]
    metrics: dict[str, float]


class Host:
    """A server that keeps the global model and lets ``combine`` make the next one."""

    def __init__(self, model: Model, combine: Callable[[Model, list[Reply], int], Model]) -> None:
        self.model = dict(model)
        self.combine = combine
        self.rounds = 0

    def step(self, replies: list[Reply]) -> None:
        """One server step."""
        self.model = dict(self.combine(self.model, replies, self.rounds))
        self.rounds += 1
