"""The clients' last updates: the memory of FedFV and FedLF, in memory or in files."""

from __future__ import annotations

import dataclasses
import hashlib
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from .._contract import ClientId, ClientUpdate, State
from .._files import write_atomically
from .._intake import Intake, real
from ..errors import CheckpointError, OptionError
from ..lazy import LazyValues, SafetensorsValues
from ._entries import client_of, cloned, key_of, read_count, read_entries, read_round
from ._gram_rule import GramRule
from ._grams import Combination, Grams

__all__ = ["HistoryRule"]


class HistoryRule(GramRule):
    """A rule that also looks at the last updates of clients that are not in the round.

    Last updates are kept as differences, in float32 (float64 where values are float64), on the
    CPU: one model per client. The values that clients sent are read once more for that, client by
    client, when a round has succeeded.

    Args:
        history_limit: Number of clients to remember, the latest ones; None: all that matter.
        history_folder: Where to keep last updates, one file a client; they are then read from
            there when a pass comes to them. None: in memory. A saved state names the files, so
            they belong to it: those of the last two states taken or loaded are not removed. With
            a process group, every rank needs a folder of its own.
        **options: See :class:`GramRule`.
    """

    def __init__(
        self,
        *,
        history_limit: int | None = None,
        history_folder: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if history_limit is not None and history_limit < 0:
            raise OptionError(f"history_limit must be None or >= 0, got {history_limit}")
        self.history_limit = history_limit
        self._files = None if history_folder is None else _Files(Path(history_folder))
        self._rounds = 0
        self._last: dict[ClientId, int] = {}
        self._updates: dict[ClientId, Mapping[str, Tensor]] = {}

    @abstractmethod
    def window(self, present: int) -> int:
        """How many rounds back last updates matter, in a round with so many clients."""

    def matters(self, age: int) -> bool:
        """Whether an update of so many rounds ago may still be asked for."""
        return True

    def past(self, intake: Intake) -> list[ClientUpdate]:
        """Last updates within the window, of clients that are away, in the order of their ids."""
        present = {client.client_id for client in intake.clients}
        oldest = self._rounds - self.window(len(present))
        return [
            ClientUpdate(client, 1, _fitted(client, self._updates[client], intake), "update")
            for client in sorted(self._updates, key=_order)
            if client not in present and self._last[client] >= oldest
        ]

    def ages(self, grams: Grams) -> Tensor:
        """(m + k,) How many rounds ago each row came: 0 for this round's clients."""
        ages = [0] * len(grams.clients)
        ages += [self._rounds - self._last[client.client_id] for client in grams.past]
        return torch.tensor(ages)

    def commit(self, grams: Grams, combination: Combination, steps: Mapping[str, Tensor]) -> None:
        """Remember this round's updates."""
        if self._files is not None:  # not what this round replaces: it may yet be undone
            self._files.keep(self._updates.values())
        last = {**self._last, **{client.client_id: self._rounds for client in grams.clients}}
        wanted = [
            client
            for client in sorted(last, key=lambda client: (-last[client], _order(client)))
            if self.matters(self._rounds + 1 - last[client])
            and (client in self._updates or last[client] == self._rounds)
        ][: self.history_limit]
        new = {c.client_id: c for c in grams.clients}
        entries = [entry for group in grams.groups for entry in group.entries]
        updates: dict[ClientId, Mapping[str, Tensor]] = {}
        for client in wanted:
            if client not in new:
                updates[client] = self._updates[client]
                continue
            values = {e: _difference(grams.intake, new[client], e) for e in entries}
            if self._files is None:
                updates[client] = values
            else:
                updates[client] = self._files.write(client, self._rounds, values)
        self._last, self._updates = last, updates
        self._rounds += 1

    def state_dict(self) -> State:
        """Round counters, when each client was last seen, and last updates or their files."""
        state: State = {
            "round": self._round,
            "rounds": self._rounds,
            "last": {key_of(client): number for client, number in self._last.items()},
        }
        if self._files is None:
            state["updates"] = {key_of(c): cloned(values) for c, values in self._updates.items()}
        else:
            state["files"] = {key_of(c): values.digest for c, values in self._spilled()}
            self._files.pin(values for _, values in self._spilled())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`craft_adapters.Aggregator.load_state_dict`."""
        number = read_round(self.name, state, {"round", "rounds", "last", "updates", "files"})
        rounds = read_count(self.name, state, "rounds")
        table = {key: _mapping(self.name, state, key) for key in ("last", "updates", "files")}
        last = {
            client_of(self.name, key): read_count(self.name, table["last"], key)
            for key in table["last"]
        }
        updates: dict[ClientId, Mapping[str, Tensor]] = {}
        for key in (*table["updates"], *table["files"]):
            client = client_of(self.name, key)
            if last.get(client, rounds) >= rounds or client in updates:
                raise CheckpointError(
                    f"not a state of rule {self.name!r}: client {client!r} has an update and no "
                    "round in which it came"
                )
            if key in table["files"]:
                if self._files is None:
                    raise CheckpointError(
                        f"the state of rule {self.name!r} keeps last updates in files; give "
                        "history_folder, the folder in which they are"
                    )
                updates[client] = self._files.read(client, last[client], table["files"][key])
                continue
            shapes = _mapping(self.name, table["updates"], key)
            flat = read_entries(self.name, table["updates"], key, {}, device=torch.device("cpu"))
            values = {name: flat[name].view(shapes[name].shape) for name in flat}
            if self._files is not None:
                updates[client] = self._files.write(client, last[client], values)
            else:
                updates[client] = values
        self._round, self._rounds, self._last, self._updates = number, rounds, last, updates
        if self._files is not None:
            self._files.pin(values for _, values in self._spilled())

    def _spilled(self) -> list[tuple[ClientId, _Spilled]]:
        return [(c, values) for c, values in self._updates.items() if isinstance(values, _Spilled)]


class _Spilled(SafetensorsValues):
    """A client's last update in a file, with the digest of its contents."""

    def __init__(self, path: Path, digest: str) -> None:
        super().__init__(path)
        self.path = path
        self.digest = digest


class _Files:
    """Last updates in files, one for each client and round."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder  # made when something is kept: a rule that is only looked at has none
        # Those that a state names, of the last two states: a crash may go back to either.
        self._pinned: deque[frozenset[Path]] = deque(maxlen=2)
        self._written: set[Path] = set()

    def path(self, client: ClientId, number: int) -> Path:
        """Ids may hold any character, and 7 and "7" are two clients."""
        name = hashlib.sha1(key_of(client).encode(), usedforsecurity=False).hexdigest()
        return self._folder / f"{name}-{number}.safetensors"

    def write(self, client: ClientId, number: int, values: Mapping[str, Tensor]) -> _Spilled:
        """Put an update into its file."""
        path = self.path(client, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = save({name: value.contiguous() for name, value in values.items()})
        write_atomically(path, data)
        self._written.add(path)
        return _Spilled(path, hashlib.sha256(data).hexdigest())

    def read(self, client: ClientId, number: int, digest: object) -> _Spilled:
        """The update of a state.

        Raises:
            CheckpointError: its file is missing or holds something else.
        """
        path = self.path(client, number)
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise CheckpointError(f"the last update of client {client!r}: {error}") from error
        if found != digest:
            raise CheckpointError(
                f"{path}: not the last update of client {client!r} that the state was saved with"
            )
        self._written.add(path)
        return _Spilled(path, found)

    def pin(self, values: Iterable[_Spilled]) -> None:
        """A state names these."""
        self._pinned.append(frozenset(each.path for each in values))

    def keep(self, values: Iterable[Mapping[str, Tensor]]) -> None:
        """Remove what is neither among these nor pinned."""
        needed = {each.path for each in values if isinstance(each, _Spilled)}
        for path in self._written - needed.union(*self._pinned):
            path.unlink(missing_ok=True)
            self._written.discard(path)


class _Fitted(LazyValues):
    """A last update in a file, for the entries of this round; what it lacks counts as zero."""

    def __init__(self, client: ClientId, values: LazyValues, intake: Intake) -> None:
        self._client, self._values, self._intake = client, values, intake

    def describe(self, name: str) -> tuple[torch.Size, torch.dtype]:
        like = self._intake.state[name]
        if name not in self._values:
            return like.shape, like.dtype
        shape, dtype = self._values.describe(name)
        _check_shape(self._client, name, shape, real(like).shape)
        return (like.shape, dtype.to_complex()) if like.is_complex() else (shape, dtype)

    def part(self, name: str, start: int, stop: int) -> Tensor:
        _, dtype = self.describe(name)
        if name not in self._values:
            return torch.zeros(stop - start, dtype=dtype)
        if dtype.is_complex:
            pairs = self._values.part(name, 2 * start, 2 * stop)
            return torch.view_as_complex(pairs.view(-1, 2))
        return self._values.part(name, start, stop)

    def __iter__(self) -> Any:
        return iter(self._intake.payload)

    def __len__(self) -> int:
        return len(self._intake.payload)


def _fitted(client: ClientId, values: Mapping[str, Tensor], intake: Intake) -> Mapping[str, Tensor]:
    """The same for one in memory, as a dict: it can be read at no cost."""
    for name in values:
        if name not in intake.state:
            _check_shape(client, name, values[name].shape, None)
    if isinstance(values, LazyValues):
        return _Fitted(client, values, intake)
    fitted = {}
    for name in intake.payload:
        like = intake.state[name]
        if name not in values:
            fitted[name] = torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)
            continue
        value = values[name]
        _check_shape(client, name, value.shape, real(like).shape)
        fitted[name] = torch.view_as_complex(value) if like.is_complex() else value
    return fitted


def _check_shape(client: ClientId, name: str, shape: torch.Size, wanted: torch.Size | None) -> None:
    if shape != wanted:
        raise CheckpointError(
            f"the rule's saved state is of another model: the last update of client {client!r} has "
            f"entry {name!r} with shape {tuple(shape)}, which the global model does not have; "
            "start with a new rule (delete its state file, if it has one), or load the state that "
            "belongs to this model"
        )


def _difference(intake: Intake, client: ClientUpdate, entry: str) -> Tensor:
    """theta_t - theta_i of an entry, in a type that holds it, on the CPU; shares nothing."""
    ((value,),) = dataclasses.replace(intake, clients=(client,)).read([entry])
    base = real(intake.state[entry])
    value = value.to(
        torch.promote_types(torch.promote_types(value.dtype, base.dtype), torch.float32)
    )
    if client.kind == "state":
        return (base.to(value) - value).cpu()
    return value.to("cpu", copy=True)


def _mapping(rule: str, state: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = state.get(key, {})
    if not isinstance(value, Mapping):
        raise CheckpointError(f"not a state of rule {rule!r}: {key} must be a dict, got {value!r}")
    return value


def _order(client: ClientId) -> tuple[bool, ClientId]:
    return isinstance(client, str), client
