"""A rule that notes down what an adapter gives it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .._contract import AggregationResult, ClientUpdate, State
from ..aggregators.fedavg import FedAvg
from ..errors import CheckpointError
from ..plugins import get_plugin_manager
from ..plugins._registry import Origin

__all__ = ["NAME", "Call", "Probe", "ProbeError", "Record", "registered"]

NAME = "craft-kit-probe"
_ORIGIN = Origin("testing", "craft-adapters")


class ProbeError(RuntimeError):
    """What the probe raises when a check asks it to fail."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of the rule: copies of what it was given and of what it returned."""

    rule: int
    count: int
    global_state: State
    updates: tuple[ClientUpdate, ...]
    result: State | None
    round: int | None


@dataclass(slots=True)
class Record:
    """All that the probes of one check see.

    Attributes:
        calls: Every call, in order.
        rules: How many probes were made.
        error: Raised by the next call instead of an answer, once.
        requires: What the probes require from clients.
    """

    calls: list[Call] = field(default_factory=list)
    rules: int = 0
    error: Exception | None = None
    requires: frozenset[str] = frozenset()

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        return self  # a copied probe is seen too

    def new_rule(self) -> Probe:
        """A factory for the registry."""
        made = type("Probe", (Probe,), {"requires": self.requires})
        rule: Probe = made(self)
        return rule


class Probe(FedAvg):
    """FedAvg that notes each call down, and counts its rounds as state."""

    name = NAME

    def __init__(self, record: Record) -> None:
        super().__init__(device="cpu")
        self._record = record
        self._number = record.rules
        self._count = 0
        record.rules += 1

    def aggregate(
        self,
        global_state: Mapping[str, Any],
        updates: Iterable[ClientUpdate],
        *,
        round: int | None = None,
    ) -> AggregationResult:
        """As FedAvg, on copies of what is given."""
        given = tuple(
            dataclasses.replace(update, values=copied(update.values)) for update in updates
        )
        state = copied(global_state)
        result: AggregationResult | None = None
        number = self._count
        try:
            if self._record.error is not None:
                error, self._record.error = self._record.error, None
                raise error
            result = super().aggregate(global_state, given, round=round)
            self._count += 1
            return result
        finally:
            answer = None if result is None else copied(result.state)
            self._record.calls.append(Call(self._number, number, state, given, answer, round))

    def state_dict(self) -> State:
        """The number of rounds."""
        return {"count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a :meth:`state_dict`."""
        if state.keys() != {"count"}:
            raise CheckpointError(f"not a state of {NAME}: {sorted(state)}")
        self._count = int(state["count"])


@contextmanager
def registered(make: Callable[[], Probe]) -> Iterator[None]:
    """The probe as a rule of this process, for as long as this lasts."""
    manager = get_plugin_manager()
    before = manager.aggregators
    manager.aggregators = before.copy()
    try:
        manager.aggregators.add(NAME, make, _ORIGIN)
        yield
    finally:
        manager.aggregators = before


def copied(values: Mapping[str, Any]) -> State:
    """Copies of all entries; arrays of other libraries become CPU tensors."""
    return {name: tensor(values[name]) for name in values}


def tensor(value: Any) -> Any:
    """A copy as a tensor if it is an array of numbers, else the value."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    try:
        return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return value
