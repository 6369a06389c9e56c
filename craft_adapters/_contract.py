"""The contract between a host framework, an adapter and an aggregation rule.

An adapter turns what its host has into :class:`ClientUpdate` objects, calls
:meth:`Aggregator.aggregate`, and puts :attr:`AggregationResult.state` where the host expects the
new global model. Nothing else passes between the two.
"""

from __future__ import annotations

import math
import numbers
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from . import _checkpoint
from .errors import CheckpointError, IncompatibleUpdate
from .lazy import SafetensorsValues

__all__ = [
    "AggregationReport",
    "AggregationResult",
    "Aggregator",
    "ClientId",
    "ClientUpdate",
    "DroppedClient",
    "GroupReport",
    "State",
]

ClientId = int | str
State = dict[str, Any]
"""Entry name -> tensor (or, rarely, a non-tensor entry such as ``_extra_state``)."""


@dataclass(frozen=True, slots=True, eq=False)
class ClientUpdate:
    """What one client sends to the server in one round.

    Attributes:
        client_id: Stable identity, an int or a str. Clients are put in this order before any
            arithmetic, so that the order of replies cannot change the result.
        num_examples: Number of training examples used, finite and >= 0. Zero leaves the client
            out (and the report says so). Numpy and 0-d torch scalars are read as numbers.
        values: Entry name -> tensor or numpy array, any dtype and device. May be lazy: an entry is
            asked for once or twice per call (once more by fedfv and fedlf, which keep the clients'
            updates; all again where somebody is left out for NaN); of a
            :class:`craft_adapters.LazyValues`, in parts if it is wide.
        kind: ``"state"``: the client's model after training, theta_i. ``"update"``: the difference
            theta_t - theta_i (global minus client, the sign of a gradient).
        loss: Loss of the *broadcast* model on the client's training data, for rules that need it.
        local_steps: Number of local optimiser steps, for rules that need it.

    Raises:
        TypeError: ``client_id``, ``num_examples`` or ``loss`` is not of its type.
        ValueError: a count that is negative, NaN or infinite, or an unknown ``kind``.
        IncompatibleUpdate: ``values`` is not a mapping.

    Example:
        >>> ClientUpdate("site-a", 120, {"w": torch.ones(2)}).num_examples
        120.0
    """

    client_id: ClientId
    num_examples: float
    values: Mapping[str, Any]
    kind: Literal["state", "update"] = "state"
    loss: float | None = None
    local_steps: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.client_id, bool) or not isinstance(
            self.client_id, int | str | np.integer
        ):
            raise TypeError(f"client_id must be an int or a str, got {self.client_id!r}")
        if isinstance(self.client_id, np.integer):
            object.__setattr__(self, "client_id", int(self.client_id))
        who = f"client {self.client_id!r}"
        count = _real(self.num_examples, f"{who}: num_examples")
        if not math.isfinite(count) or count < 0:
            raise ValueError(f"{who}: num_examples must be finite and >= 0, got {count}")
        object.__setattr__(self, "num_examples", count)
        if self.kind not in ("state", "update"):
            raise ValueError(f"{who}: kind must be 'state' or 'update', got {self.kind!r}")
        if self.loss is not None:
            object.__setattr__(self, "loss", _real(self.loss, f"{who}: loss"))
        if not isinstance(self.values, Mapping):
            raise IncompatibleUpdate(
                f"{who}: values must map entry names to tensors, got {type(self.values).__name__}"
            )

    @classmethod
    def from_safetensors(
        cls,
        path: str | os.PathLike[str],
        *,
        client_id: ClientId,
        num_examples: float,
        kind: Literal["state", "update"] = "state",
        loss: float | None = None,
        local_steps: int | None = None,
    ) -> ClientUpdate:
        """A client whose values stay in a safetensors file until a pass comes to them.

        Args:
            path: The file; it must stay as it is until the round is over.
            client_id: As in :class:`ClientUpdate`, like the others.
            num_examples: Number of training examples.
            kind: What the values are.
            loss: Loss of the broadcast model.
            local_steps: Number of local optimiser steps.

        Raises:
            IncompatibleUpdate: the file is missing, cut, or no safetensors file.
        """
        values = SafetensorsValues(path)
        return cls(client_id, num_examples, values, kind, loss, local_steps)

    @classmethod
    def join(
        cls,
        values: Mapping[Any, Mapping[str, Any]] | Sequence[Mapping[str, Any]],
        num_examples: Mapping[Any, Any] | Sequence[Any],
        *,
        kind: Literal["state", "update"] = "state",
    ) -> list[ClientUpdate]:
        """Pair models with counts: two mappings by client id, or two sequences by position.

        Args:
            values: Each client's entries.
            num_examples: Each client's number of examples.
            kind: As in :class:`ClientUpdate`, the same for all.

        Raises:
            ValueError: an id (or position) is in one of the two only.

        Example:
            >>> a, b = {"w": torch.ones(1)}, {"w": torch.zeros(1)}
            >>> [u.num_examples for u in ClientUpdate.join({"a": a, "b": b}, {"b": 2, "a": 1})]
            [1.0, 2.0]
        """
        if isinstance(values, Mapping) != isinstance(num_examples, Mapping):
            raise TypeError(
                "give two mappings (joined by client id) or two sequences (by position)"
            )
        by_id = values if isinstance(values, Mapping) else dict(enumerate(values))
        counts = (
            num_examples if isinstance(num_examples, Mapping) else dict(enumerate(num_examples))
        )
        if lonely := sorted(map(repr, by_id.keys() ^ counts.keys())):
            raise ValueError(
                f"{len(by_id)} clients have values and {len(counts)} have num_examples; "
                f"in one of the two only: {', '.join(lonely)}"
            )
        return [cls(client, counts[client], entries, kind) for client, entries in by_id.items()]


def _real(value: Any, what: str) -> float:
    """A number as a float; strings, booleans, None and arrays are refused."""
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what} must be a number, got {value!r} ({type(value).__name__})")
    return float(value)


@dataclass(frozen=True, slots=True)
class DroppedClient:
    """A client that was left out of a round whole, and why."""

    client_id: ClientId
    reason: str
    entry: str | None = None


@dataclass(frozen=True, slots=True)
class GroupReport:
    """What happened in one layer group.

    Cosines and inner products are between a client's unit update u_i and the step g, both as
    directions of descent (theta_t - theta_i).

    Attributes:
        name: The group's name.
        width: Number of coordinates.
        clients: Active clients.
        inactive: Clients whose update of this group is shorter than the rule's threshold.
        conflicts_before: Pairs of active clients whose updates have a negative cosine.
        conflicts_after: Active clients with a negative inner product with the step.
        residual: max |U g - rho| over the active clients, or None if the rule sets no targets.
        cosine_to_reference: Cosine between the step and the reference, or None without one.
        step_norm: Length of the step direction g, before the server's step length.
        eigenvalue_min: Smallest eigenvalue of the active clients' cosine matrix that was used.
        eigenvalue_max: Largest one.
        rank: Number of eigenvalues used. Below ``len(clients)`` the targets cannot all be met:
            alignment is not guaranteed and ``conflicts_after`` lists who lost.
        consensus: Largest cosine that one direction can have with all active clients at once.
        note: Anything out of the ordinary, in words; empty otherwise.
    """

    name: str
    width: int
    clients: tuple[ClientId, ...]
    inactive: tuple[ClientId, ...]
    conflicts_before: int
    conflicts_after: tuple[ClientId, ...]
    residual: float | None
    cosine_to_reference: float | None
    step_norm: float
    eigenvalue_min: float | None
    eigenvalue_max: float | None
    rank: int
    consensus: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class AggregationReport:
    """What happened in one round.

    Attributes:
        rule: Name of the rule.
        round: The round's number, from the host or counted from 0.
        clients: Clients that were used, in the order of the arithmetic.
        dropped: Clients that were left out whole.
        groups: One report per layer group, in the order of the model.
        seconds: Time of the call.
    """

    rule: str
    round: int
    clients: tuple[ClientId, ...]
    dropped: tuple[DroppedClient, ...]
    groups: tuple[GroupReport, ...]
    seconds: float

    @property
    def conflicts_before(self) -> int:
        """Pairs of clients with negative cosine, summed over groups."""
        return sum(group.conflicts_before for group in self.groups)

    @property
    def conflicts_after(self) -> int:
        """Clients that the step points against, summed over groups."""
        return sum(len(group.conflicts_after) for group in self.groups)

    def messages(self) -> tuple[str, ...]:
        """The round in words, for a host's log: what was done, then each client left out.

        Example:
            >>> dropped = (DroppedClient("b", "NaN or infinity", "fc.weight"),)
            >>> for message in AggregationReport("craft", 3, ("a",), dropped, (), 0.25).messages():
            ...     print(message)
            craft: round 3: 1 clients, conflicts 0 before and 0 after, 0.250 s
            craft: round 3: client b left out: NaN or infinity (entry fc.weight)
        """
        where = f"{self.rule}: round {self.round}"
        done = (
            f"{where}: {len(self.clients)} clients, conflicts {self.conflicts_before} before and "
            f"{self.conflicts_after} after, {self.seconds:.3f} s"
        )
        left_out = (
            f"{where}: client {one.client_id} left out: {one.reason}"
            + (f" (entry {one.entry})" if one.entry else "")
            for one in self.dropped
        )
        return (done, *left_out)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, ready for JSON."""
        return {
            **asdict(self),
            "conflicts_before": self.conflicts_before,
            "conflicts_after": self.conflicts_after,
        }


@dataclass(frozen=True, slots=True, eq=False)
class AggregationResult:
    """The new global model and the report of how it came about.

    Attributes:
        state: Same names, order, shapes, dtypes and devices as the ``global_state`` given. Shares
            no storage with anything that was given.
        report: See :class:`AggregationReport`.
    """

    state: State
    report: AggregationReport


class Aggregator(ABC):
    """A server rule: global model and client updates in, new global model out.

    One object serves one training run: it may carry state from round to round. A subclass sets
    ``name`` and ``requires``, implements :meth:`aggregate`, and, if it has state, ``state_dict``
    and ``load_state_dict``. Rules whose step is a combination of the clients' updates should
    derive from ``craft_adapters.aggregators.GramRule``, which does the work.

    Attributes:
        name: The name in the registry (class attribute).
        requires: What a rule needs from clients beyond values and counts, out of
            ``{"loss", "local_steps"}`` (class attribute).
        observers: Functions that :meth:`aggregate` calls with the report of each round that
            succeeded. ``get_aggregator`` puts the plug-ins' observers here.

    A rule may also have ``mu`` (of the clients' proximal term) and ``client_momentum``, which local
    training follows, ``client_lr``, which a host sets each round, and ``averaged_model(state)``,
    the model to evaluate.
    """

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        self.observers: list[Callable[[AggregationReport], None]] = []

    @abstractmethod
    def aggregate(
        self,
        global_state: Mapping[str, Any],
        updates: Iterable[ClientUpdate],
        *,
        round: int | None = None,
    ) -> AggregationResult:
        """Combine the clients' updates into the next global model.

        Args:
            global_state: The model that the clients started this round from. Differences are
                taken from it, never from a cached copy. Any dtypes and devices.
            updates: One per client, in any order.
            round: The round's number for the report; counted from 0 if None.

        Returns:
            The new state, entry by entry on the dtype and device of ``global_state``.

        Raises:
            NoUsableUpdates: no client with examples and finite values is left.
            IncompatibleUpdate: names, shapes or types do not fit, or a client did not report what
                the rule requires; names client and entry.
            NonFiniteUpdate: with ``on_nonfinite="raise"``, or the global model is not finite.
            CheckpointError: the loaded state belongs to another model.

        A call that raises leaves the aggregator as it was. Nothing given is changed.
        """

    def state_dict(self) -> State:
        """Everything that must survive a restart: nested dicts of tensors, numbers, strings."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a :meth:`state_dict`.

        Raises:
            CheckpointError: it is not one of this rule's; the aggregator stays as it was.
        """
        if state:
            raise CheckpointError(f"rule {self.name!r} keeps no state, got {sorted(state)}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`state_dict` as one safetensors file, atomically.

        A crash at any moment leaves the old file or the new one, never a mixture.
        """
        _checkpoint.write(Path(path), self.name, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read what :meth:`save` wrote; going on then gives bit for bit what not stopping gives.

        Raises:
            CheckpointError: the file is missing, cut, foreign, or of another rule; the aggregator
                stays as it was. A file of another *model* is refused here if this aggregator has
                seen its model, else by the first :meth:`aggregate`.
        """
        state = _checkpoint.read(Path(path), self.name)
        try:
            self.load_state_dict(state)
        except CheckpointError as error:
            raise CheckpointError(f"{os.fspath(path)}: {error}") from error
