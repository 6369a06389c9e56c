"""What clients keep between rounds, out of the way of the device."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from .. import _checkpoint
from ..errors import CheckpointError

__all__ = ["ClientStore"]

_KIND = "a client's own model"


class ClientStore:
    """One state per client, in main memory or in files: never on the device, one version each.

    Files are versioned, so that a run that is killed at any moment finds those of its last
    checkpoint: :meth:`commit` says which they are, and only :meth:`prune` deletes older ones.

    Args:
        keep: "cpu" holds the states in main memory and writes files at each commit only; "disk"
            holds nothing.
        folder: Where the files go; None: a temporary folder, deleted with the store.

    Example:
        >>> import torch
        >>> store = ClientStore("cpu")
        >>> store.put(7, {"w": torch.ones(1)})
        >>> list(store), store.get(7), store.get(8)
        ([7], {'w': tensor([1.])}, None)
    """

    def __init__(self, keep: Literal["cpu", "disk"] = "cpu", folder: Path | None = None) -> None:
        self.keep = keep
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="craft-clients-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.folder = folder
        self._files: dict[int, str] = {}
        self._held: dict[int, dict[str, Tensor]] = {}
        self._unwritten: set[int] = set()
        self._generation = 0

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._files.keys() | self._held.keys()))

    def get(self, client: int) -> dict[str, Tensor] | None:
        """The client's state, on the CPU; None if it has none."""
        if client not in self._held and client in self._files:
            state = self._read(client)
            if self.keep == "disk":
                return state
            self._held[client] = state
        found = self._held.get(client)
        return None if found is None else dict(found)

    def put(self, client: int, state: Mapping[str, Tensor]) -> None:
        """Replace the client's state by a copy of this one."""
        copied = {name: value.detach().cpu().clone() for name, value in state.items()}
        if self.keep == "cpu":
            self._held[client] = copied
            self._unwritten.add(client)
        else:
            self._write(client, copied)

    def commit(self) -> dict[str, Any]:
        """Write what is not written; return what :meth:`restore` needs (JSON)."""
        for client in sorted(self._unwritten):
            self._write(client, self._held[client])
        self._unwritten.clear()
        index = {"generation": self._generation, "files": {str(c): self._files[c] for c in self}}
        self._generation += 1
        return index

    def prune(self) -> None:
        """Delete the files of earlier versions; to be called once the index is safe."""
        current = set(self._files.values())
        for path in self.folder.glob("*.safetensors"):
            if path.name not in current:
                path.unlink()

    def restore(self, index: Mapping[str, Any]) -> None:
        """Go back to a :meth:`commit`.

        Raises:
            CheckpointError: a file of it is missing.
        """
        files = {int(client): str(name) for client, name in index["files"].items()}
        for name in files.values():
            if not (self.folder / name).is_file():
                raise CheckpointError(f"{self.folder / name}: a client's model is missing")
        self._files, self._held, self._unwritten = files, {}, set()
        self._generation = int(index["generation"]) + 1

    def _write(self, client: int, state: Mapping[str, Tensor]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"client-{client:06d}-{self._generation}.safetensors"
        _checkpoint.write(self.folder / name, _KIND, state)
        self._files[client] = name

    def _read(self, client: int) -> dict[str, Tensor]:
        return _checkpoint.read(self.folder / self._files[client], _KIND)
