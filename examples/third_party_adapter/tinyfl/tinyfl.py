"""A federated-learning framework in forty lines: numpy arrays, one update at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

Arrays = dict[str, np.ndarray]


class RunFailed(Exception):
    """How this framework ends a run."""


@dataclass
class Update:
    """What a site changed: trained minus global. Boolean arrays are not sent."""

    site: str
    examples: int
    change: Arrays


class Strategy:
    """How the server combines updates. Derive from it."""

    def accept(self, update: Update) -> None:
        """Called for each update of a round, as it arrives."""
        raise NotImplementedError

    def combine(self, model: Arrays) -> Arrays:
        """Called when all have arrived: the next model."""
        raise NotImplementedError


class Server:
    """Keeps the model."""

    def __init__(self, model: Arrays, strategy: Strategy) -> None:
        self.model = model
        self.strategy = strategy
        self.round = 0

    def run_round(self, updates: Iterable[Update]) -> Arrays:
        try:
            for update in updates:
                self.strategy.accept(update)
            self.model = self.strategy.combine(self.model)
        except Exception as error:
            raise RunFailed(f"round {self.round}: {error}") from error
        finally:
            self.round += 1
        return self.model
