"""Server momentum: the memory of FedAvgM and FedNova."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._contract import State
from ._entries import cloned, read_entries, read_round
from ._gram_rule import GramRule
from ._grams import Combination, Grams

__all__ = ["MomentumRule"]


class MomentumRule(GramRule):
    """A rule whose step is v <- momentum * v + (a combination of the clients' updates).

    A subclass sets :attr:`momentum` and puts it into the combination as ``memory_weight``. v
    starts at zero and is kept per entry, in float32 (float64 where the values are float64).
    """

    momentum: float

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._velocity: dict[str, Tensor] = {}

    def memory(self) -> Mapping[str, Tensor]:
        """V per entry, flat."""
        return self._velocity

    def commit(self, grams: Grams, combination: Combination, steps: Mapping[str, Tensor]) -> None:
        """Remember the step."""
        if self.momentum:
            self._velocity = {**self._velocity, **steps}

    def state_dict(self) -> State:
        """Round counter, v per entry."""
        return {"round": self._round, "velocity": cloned(self._velocity)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`craft_adapters.Aggregator.load_state_dict`."""
        number = read_round(self.name, state, {"round", "velocity"})
        self._velocity = read_entries(
            self.name, state, "velocity", self._velocity, device=self.device
        )
        self._round = number
