"""What arrives at the server, checked and put in order before any arithmetic."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._contract import ClientUpdate, DroppedClient
from .errors import IncompatibleUpdate, NonFiniteUpdate, NoUsableUpdates
from .lazy import LazyValues

_TENSORS = {Tensor, torch.nn.Parameter}
# Numbers of an entry that are searched for NaN at a time.
_PART = 1 << 24
# Left in front of every entry name by DataParallel/DDP, torch.compile and Opacus.
_WRAPPERS = ("module.", "_orig_mod.", "_module.")


@dataclass(frozen=True, slots=True)
class Intake:
    """One round's global model and usable clients.

    Attributes:
        state: The global model as given.
        clients: Usable clients: those that sent states first, then those that sent differences,
            each by client id. This is the order of all arithmetic.
        dropped: Clients left out so far.
        payload: Names of the entries that the clients sent, in the global model's order.
        prefixes: Client id -> what its entry names have in front of the global model's.
        prefix: What the global model's own names have in front.
    """

    state: Mapping[str, Any]
    clients: tuple[ClientUpdate, ...]
    dropped: tuple[DroppedClient, ...]
    payload: tuple[str, ...]
    prefixes: Mapping[int | str, str]
    prefix: str

    @classmethod
    def of(cls, state: Mapping[str, Any], updates: Iterable[ClientUpdate]) -> Intake:
        """Check ids, counts and entry names.

        Raises:
            TypeError: the global model is no state dict, or an update no ClientUpdate.
            ValueError: a client id occurs twice.
            NoUsableUpdates: nobody reported, or nobody has examples.
            IncompatibleUpdate: entry names do not fit, by client and entry.
        """
        if not isinstance(state, Mapping):
            raise TypeError(
                f"global_state must be a state dict, got a {type(state).__name__}; "
                "pass model.state_dict()"
            )
        everyone = list(updates)
        for position, update in enumerate(everyone):
            if not isinstance(update, ClientUpdate):
                raise TypeError(
                    f"updates[{position}] is a {type(update).__name__}, not a ClientUpdate; "
                    "wrap it: ClientUpdate(client_id, num_examples, values)"
                )
        everyone.sort(key=_order)
        for first, second in itertools.pairwise(everyone):
            if first.client_id == second.client_id:
                raise ValueError(f"client {first.client_id!r} reported twice in one round")
        if not everyone:
            raise NoUsableUpdates("no client reported; there is nothing to aggregate")
        clients = [update for update in everyone if update.num_examples > 0]
        dropped = [
            DroppedClient(update.client_id, "zero examples")
            for update in everyone
            if update.num_examples == 0
        ]
        if not clients:
            raise NoUsableUpdates(
                f"the sample counts of all {len(everyone)} clients are zero; "
                "nobody's update can be given a weight"
            )
        clients.sort(key=lambda update: update.kind == "update")  # stable: by id within
        prefix = _wrapping(state)
        prefixes = {update.client_id: _wrapping(update.values) for update in clients}
        payload = _payload(state, prefix, clients, prefixes)
        return cls(state, tuple(clients), tuple(dropped), payload, prefixes, prefix)

    def read(self, entries: Sequence[str]) -> list[list[Tensor]]:
        """Each client's values of some entries; complex numbers as pairs of reals.

        Raises:
            IncompatibleUpdate: not a dense tensor, or not of the global entry's shape.
        """
        shapes = [self.state[entry].shape for entry in entries]
        plain = not any(self.state[entry].is_complex() for entry in entries)
        table = []
        for client in self.clients:
            names = entries
            if self.prefixes[client.client_id] != self.prefix:
                names = [self._name(client, entry) for entry in entries]
            values = [client.values[name] for name in names]
            # What nearly every client sends passes at a fraction of the time of a check each.
            if not (
                plain
                and _TENSORS.issuperset(map(type, values))
                and [value.shape for value in values] == shapes
                and {value.layout for value in values} <= {torch.strided}
                and not any(dtype.is_complex for dtype in {value.dtype for value in values})
            ):
                values = [
                    self._checked(client, entry, value)
                    for entry, value in zip(entries, values, strict=True)
                ]
            table.append(values)
        return table

    def read_part(self, entry: str, start: int, stop: int) -> list[Tensor] | None:
        """The same for numbers start:stop of one entry, flat; None if a client cannot."""
        expected: Tensor = self.state[entry]
        if expected.is_complex():
            return None
        parts = []
        for client in self.clients:
            name = self._name(client, entry)
            if isinstance(client.values, LazyValues):
                shape, dtype = client.values.describe(name)
                if shape != expected.shape or dtype.is_complex:
                    stand_in = torch.empty(shape, dtype=dtype, device="meta")
                    raise _misfit(client, entry, stand_in, expected)
                parts.append(client.values.part(name, start, stop))
            elif isinstance(client.values, dict):
                value = self._checked(client, entry, client.values[name])
                parts.append(value.reshape(-1)[start:stop])
            else:
                return None
        return parts

    def _name(self, client: ClientUpdate, entry: str) -> str:
        return self.prefixes[client.client_id] + entry[len(self.prefix) :]

    def _checked(self, client: ClientUpdate, entry: str, value: Any) -> Tensor:
        expected: Tensor = self.state[entry]
        if isinstance(value, np.ndarray):
            value = _from_numpy(value)
        if (
            not isinstance(value, Tensor)
            or value.shape != expected.shape
            or value.layout is not torch.strided
            or value.dtype.is_complex is not expected.dtype.is_complex
        ):
            raise _misfit(client, entry, value, expected)
        return real(value)

    def check_global(self, entries: Iterable[str]) -> None:
        """Check entries of the global model.

        Raises:
            NonFiniteUpdate: one holds NaN or infinity, by entry.
        """
        entry = first_nonfinite({entry: self.state[entry] for entry in entries})
        if entry is not None:
            raise NonFiniteUpdate(
                f"the global model holds NaN or infinity in entry {entry!r}; "
                "go back to a sound checkpoint"
            )

    def without(
        self,
        bad: Iterable[int],
        entries: Sequence[str],
        on_nonfinite: str,
        first: Callable[[int | None], int | None] | None = None,
    ) -> Intake:
        """Leave out the clients at the given positions, whose values are not finite.

        Their values are read once more to name the entry; they will not be read again.

        Args:
            bad: Positions.
            entries: Where to look, in order.
            on_nonfinite: "raise" raises NonFiniteUpdate instead.
            first: Of the positions of entries that processes found, each in its part, the first.
        """
        positions = set(bad)
        dropped = []
        for position in sorted(positions):
            client = self.clients[position]
            # None: finite values whose squares are not, as of float64 beyond 1e154.
            found = next((i for i, e in enumerate(entries) if not self._is_finite(client, e)), None)
            found = found if first is None else first(found)
            entry = None if found is None else entries[found]
            if on_nonfinite == "raise":
                raise NonFiniteUpdate(
                    f"client {client.client_id!r}: NaN or infinity in entry {entry!r}; "
                    'mend the client, or set on_nonfinite="drop" to go on without it'
                )
            dropped.append(DroppedClient(client.client_id, "NaN or infinity", entry))
        clients = tuple(c for i, c in enumerate(self.clients) if i not in positions)
        if not clients:
            names = ", ".join(f"{drop.client_id!r} ({drop.entry})" for drop in dropped)
            raise NoUsableUpdates(f"every client's update holds NaN or infinity: {names}")
        return dataclasses.replace(self, clients=clients, dropped=(*self.dropped, *dropped))

    def _is_finite(self, client: ClientUpdate, entry: str) -> bool:
        size = self.state[entry].numel()
        alone = dataclasses.replace(self, clients=(client,))
        if size <= _PART or (first := alone.read_part(entry, 0, _PART)) is None:
            return bool(torch.isfinite(alone.read([entry])[0][0]).all())
        if not bool(torch.isfinite(first[0]).all()):
            return False
        for start in range(_PART, size, _PART):
            part = alone.read_part(entry, start, min(start + _PART, size))
            if part is not None and not bool(torch.isfinite(part[0]).all()):
                return False
        return True


def first_nonfinite(state: Mapping[str, Any]) -> str | None:
    """The first entry that holds NaN or infinity: one pass, and one wait for each device.

    >>> first_nonfinite({"a": torch.ones(2), "b": torch.tensor([1.0, torch.nan])})
    'b'
    """
    floats = {}
    for entry, value in state.items():
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            floats[entry] = value.detach()
    by_device: dict[torch.device, list[Tensor]] = {}
    for value in floats.values():
        # Of one dtype, to be stacked; a sum that overflows only costs the search below.
        by_device.setdefault(value.device, []).append(value.sum().abs().to(torch.float64))
    if all(bool(torch.stack(sums).isfinite().all()) for sums in by_device.values()):
        return None
    entries = floats.items()
    return next((entry for entry, v in entries if not bool(torch.isfinite(v).all())), None)


def _from_numpy(value: np.ndarray[Any, Any]) -> Any:
    """A tensor of an array of any memory layout; the array itself if torch has no such type."""
    try:
        return torch.from_numpy(np.array(value))  # a copy: read-only and reversed ones exist
    except TypeError:
        return value


def real(value: Tensor) -> Tensor:
    """A complex tensor as pairs of reals; any other as it is."""
    return torch.view_as_real(value.resolve_conj()) if value.dtype.is_complex else value


def shaped(value: Tensor, like: Tensor) -> Tensor:
    """Numbers in index order as a new tensor of the shape, dtype and device of ``like``.

    Undoes :func:`real`.
    """
    if like.dtype.is_complex:
        pairs = value.view(*like.shape, 2).to(like.device, like.real.dtype)
        return torch.view_as_complex(pairs.contiguous())
    return value.view(like.shape).to(like.device, like.dtype)


def _order(update: ClientUpdate) -> tuple[bool, int | str]:
    return isinstance(update.client_id, str), update.client_id


def _wrapping(values: Mapping[str, Any]) -> str:
    """The wrapper prefixes that all names share; a name that happens to start so is left alone."""
    prefix = ""
    names = [name for name in values if isinstance(name, str)]
    while names:
        for wrapper in _WRAPPERS:
            if all(name.startswith(prefix + wrapper) for name in names):
                prefix += wrapper
                break
        else:
            break
    return prefix


def _payload(
    state: Mapping[str, Any],
    prefix: str,
    clients: Iterable[ClientUpdate],
    prefixes: Mapping[int | str, str],
) -> tuple[str, ...]:
    known = {name[len(prefix) :]: name for name in state}
    sent: dict[int | str, set[str]] = {}
    before: ClientUpdate | None = None
    for client in clients:
        if (
            before is not None
            and prefixes[client.client_id] == prefixes[before.client_id]
            and list(client.values) == list(before.values)  # keys() of a lazy mapping would read
        ):
            sent[client.client_id] = sent[before.client_id]
            continue
        before = client
        cut = len(prefixes[client.client_id])
        names = {name[cut:] if isinstance(name, str) else name for name in client.values}
        for name in client.values:
            if not isinstance(name, str) or name[cut:] not in known:
                raise IncompatibleUpdate(
                    f"client {client.client_id!r}: entry {name!r} is not in the global model "
                    f"(whose entries look like {next(iter(state), None)!r}); send the names of "
                    "its state_dict"
                )
        sent[client.client_id] = names
    union = set().union(*sent.values())
    for client_id, names in sent.items():
        if missing := union - names:
            first = next(known[name] for name in known if name in missing)
            raise IncompatibleUpdate(
                f"client {client_id!r}: entry {first!r} is missing, which other clients sent; "
                "a payload may hold part of the model only if all clients agree on the part"
            )
    if not union:
        raise IncompatibleUpdate("the clients' updates hold no entries")
    return tuple(known[name] for name in known if name in union)


def _misfit(client: ClientUpdate, entry: str, value: Any, expected: Tensor) -> IncompatibleUpdate:
    def describe(tensor: Tensor) -> str:
        layout = "" if tensor.layout == torch.strided else f" {tensor.layout}"
        return f"{tuple(tensor.shape)} {tensor.dtype}{layout}"

    got = describe(value) if isinstance(value, Tensor) else type(value).__name__
    return IncompatibleUpdate(
        f"client {client.client_id!r}, entry {entry!r}: expected a dense tensor "
        f"{describe(expected)}, got {got}"
    )
