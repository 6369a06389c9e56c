"""The federation that the checks play: a model, clients' replies, servers and what they saw."""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._contract import ClientUpdate, State
from ..plugins import AdapterDescriptor
from ._harness import Harness, Server
from ._probe import NAME, Call, Record, copied, tensor

__all__ = [
    "Driven",
    "KitModel",
    "Played",
    "Scene",
    "differences",
    "floats",
    "is_float",
    "replies",
    "same",
]

_ENTRY = "temperature"  # a float buffer that its name does not give away


class KitModel(nn.Module):
    """A small model with one of everything: a convolution, its norm, buffers of four dtypes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.features = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
            self.head = nn.Linear(8, 4)
            self.low = nn.Linear(4, 2).to(torch.float16)
        self.register_buffer(_ENTRY, torch.ones((), dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([True, False]))
        if dtype != torch.float32:
            self.head.to(dtype)


def replies(state: Mapping[str, Any], clients: Sequence[int], round: int = 0) -> list[ClientUpdate]:
    """What the clients send after training from ``state``: each moves every entry its own way."""
    made = []
    for client in clients:
        generator = torch.Generator().manual_seed(1000 * round + client)
        values = {}
        for name, value in state.items():
            start = tensor(value)
            if not isinstance(start, Tensor) or start.dtype == torch.bool:
                values[name] = start
            elif start.is_floating_point():
                # At least 1/4, so that no entry's own part is lost in rounding.
                step = torch.randn(start.shape, generator=generator, dtype=torch.float64)
                step = step.sign() * (step.abs() + 0.25)
                if "running_var" in name:
                    step = step.abs()
                values[name] = (start.double().cpu() + step).to(start)
            else:
                values[name] = start + 3 * (client + 1)
        made.append(
            ClientUpdate(
                client,
                num_examples=10 + 7 * client,
                values=values,
                loss=0.5 + client,
                local_steps=2 + client,
            )
        )
    return made


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """One round that a server has played.

    Attributes:
        start: The global model that the clients started from.
        sent: Copies of their replies.
        calls: What the probes were given meanwhile.
        state: The new global model.
    """

    start: State
    sent: tuple[ClientUpdate, ...]
    calls: tuple[Call, ...]
    state: State

    @property
    def call(self) -> Call:
        """The first call of the rule.

        Raises:
            AssertionError: there was none.
        """
        if not self.calls:
            raise AssertionError("the rule was not called")
        return self.calls[0]

    def pairs(self) -> list[tuple[ClientUpdate, ClientUpdate]]:
        """(sent, seen) of every client, found by the direction of its update alone.

        Its length and sign do not matter here, so that one defect does not hide another.

        Raises:
            AssertionError: nothing that a client sent reached the rule.
        """
        seen = [(update, differences(update, self.start)) for update in self.call.updates]
        found = []
        for client in self.sent:
            mine = differences(client, self.start)
            likeness = [_likeness(mine, theirs) for _, theirs in seen]
            # Clients of the kit are nearly orthogonal to each other.
            if likeness and (best := max(likeness)) > 0.5:
                found.append((client, seen[likeness.index(best)][0]))
        if not found:
            raise AssertionError(
                f"{len(seen)} updates reached the rule, and none has the direction of a client's"
            )
        return found


class Driven:
    """A server, the global model that its clients have, and the number of rounds played."""

    def __init__(self, server: Server, state: State, record: Record) -> None:
        self.server = server
        self.state = state
        self.record = record
        self.rounds = 0

    def play(self, sent: Sequence[ClientUpdate]) -> Played:
        """One round."""
        start, before = self.state, len(self.record.calls)
        kept = tuple(dataclasses.replace(reply, values=copied(reply.values)) for reply in sent)
        try:
            self.state = copied(self.server.round(sent))
        finally:
            self.rounds += 1
        return Played(start, kept, tuple(self.record.calls[before:]), self.state)

    def round(self, *clients: int) -> Played:
        """One round with ordinary replies of some clients."""
        return self.play(self.replies(*clients))

    def replies(self, *clients: int) -> list[ClientUpdate]:
        """Ordinary replies, from the global model as it is."""
        chosen = clients or range(Harness.clients_per_round)
        return replies(self.state, tuple(chosen), self.rounds)


class Scene:
    """What a check plays on: makes servers whose rule is the probe, or another.

    Args:
        adapter: The adapter under test.
        harness: Its harness.
        folder: For files of this check alone.
        device: Where models and replies are.
    """

    def __init__(
        self, adapter: AdapterDescriptor, harness: Harness, folder: Path, device: str = "cpu"
    ) -> None:
        self.adapter = adapter
        self.harness = harness
        self.record = Record()
        self._folder = folder
        self._device = device

    def folder(self) -> Path:
        """An empty folder."""
        return Path(tempfile.mkdtemp(dir=self._folder))

    def server(
        self,
        rule: str = NAME,
        *,
        model: nn.Module | None = None,
        folder: Path | None = None,
    ) -> Driven:
        """A new server."""
        model = (KitModel() if model is None else model).to(self._device)
        state = copied(model.state_dict())
        folder = self.folder() if folder is None else folder
        return Driven(self.harness.start(rule, copy.deepcopy(model), folder), state, self.record)


def is_float(value: Any) -> bool:
    """Whether it is a tensor of real numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def floats(state: Mapping[str, Any]) -> list[str]:
    """Names of the parameters of the kit's model: float entries that are no buffers."""
    names = (name for name, value in state.items() if is_float(tensor(value)))
    return [name for name in names if "running" not in name and name != _ENTRY]


def differences(update: ClientUpdate, start: Mapping[str, Any]) -> dict[str, Tensor]:
    """Parameter name -> theta_t - theta_i in float64, as far as the client has them."""
    found = {}
    for name in floats(start):
        if name in update.values:
            value = update.values[name].double().cpu()
            found[name] = value if update.kind == "update" else start[name].double().cpu() - value
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two entries hold the same numbers exactly; dtypes may differ, NaN equals NaN."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and bool(one == other)
    return one.shape == other.shape and torch.allclose(
        one.double().cpu(), other.double().cpu(), rtol=0, atol=0, equal_nan=True
    )


def _likeness(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Absolute cosine over the entries that both have in the same shape; 0 if not finite."""
    names = [n for n in one if n in other and one[n].shape == other[n].shape]
    if not names:
        return 0.0
    a = torch.cat([one[name].flatten() for name in names])
    b = torch.cat([other[name].flatten() for name in names])
    cosine = float((a @ b).abs() / (a.norm() * b.norm()).clamp(min=1e-300))
    return cosine if math.isfinite(cosine) else 0.0
