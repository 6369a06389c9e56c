"""Clients' values that are not in memory: read from files, a part at a time."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import IncompatibleUpdate

if TYPE_CHECKING:
    from ._contract import ClientUpdate

__all__ = ["LazyValues", "SafetensorsValues", "Spill"]


class LazyValues(Mapping[str, Tensor]):
    """Entries that are read when they are asked for.

    Any mapping may be lazy; one of this class can also give a part of an entry, so that not even
    one entry of all clients has to be in memory at once. A subclass implements :meth:`describe`,
    :meth:`part`, ``__iter__`` and ``__len__``.
    """

    @abstractmethod
    def describe(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Shape and dtype of an entry, without reading it."""

    @abstractmethod
    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Numbers start:stop of an entry in index order: 1-d, on the CPU, of the entry's dtype."""

    def __getitem__(self, name: str) -> Tensor:
        shape, _ = self.describe(name)
        return self.part(name, 0, math.prod(shape)).view(shape)


class SafetensorsValues(LazyValues):
    """The tensors of a safetensors file.

    Nothing is mapped or held open between reads, so that the memory of a process does not grow
    with the number of files. The file must stay as it is until the round is over.

    Args:
        path: The file.

    Raises:
        IncompatibleUpdate: it is missing, cut, or no safetensors file; also from a read, if it
            changed.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     save_file({"w": torch.arange(6.0).view(2, 3)}, f"{folder}/client.safetensors")
        ...     values = SafetensorsValues(f"{folder}/client.safetensors")
        ...     values.describe("w"), values.part("w", 2, 4)
        ((torch.Size([2, 3]), torch.float32), tensor([2., 3.]))
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        try:
            with safe_open(
                self._path, framework="pt"
            ) as file:  # checks the header against the file
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                self._kinds = {name: (t.shape, t.dtype) for name, t in tensors.items()}
            with self._path.open("rb") as raw:
                length = int.from_bytes(raw.read(8), "little")
                header = json.loads(raw.read(length))
        except (SafetensorError, OSError, ValueError) as error:
            raise IncompatibleUpdate(
                f"{self._path}: cannot be read as a safetensors file: {error}"
            ) from error
        self._places = {name: 8 + length + header[name]["data_offsets"][0] for name in self._kinds}

    def describe(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """See :meth:`LazyValues.describe`."""
        return self._kinds[name]

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """See :meth:`LazyValues.part`."""
        _, dtype = self._kinds[name]
        values = torch.empty((stop - start) * dtype.itemsize, dtype=torch.uint8)
        try:
            with self._path.open("rb") as raw:
                raw.seek(self._places[name] + start * dtype.itemsize)
                got = raw.readinto(values.numpy().data)
        except OSError as error:
            raise IncompatibleUpdate(f"{self._path}: entry {name!r}: {error}") from error
        if got != len(values):
            raise IncompatibleUpdate(f"{self._path}: cut off within entry {name!r}")
        return values.view(dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


class Spill:
    """Clients' values on disk instead of in memory, from when a client reports to the round's end.

    Args:
        folder: Where the files go, one a client; it must exist. A temporary folder if None.

    Example:
        >>> from craft_adapters import ClientUpdate, get_aggregator
        >>> theta = {"w": torch.zeros(2)}
        >>> with Spill() as spill:
        ...     a = spill.keep(ClientUpdate("a", 10, {"w": torch.tensor([1.0, 0.0])}))
        ...     b = spill.keep(ClientUpdate("b", 10, {"w": torch.tensor([0.0, 1.0])}))
        ...     get_aggregator("craft", server_lr=1.0).aggregate(theta, [a, b]).state["w"]
        tensor([0.5000, 0.5000])
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="craft-spill-", dir=folder)
        self._count = 0

    def keep(self, update: ClientUpdate) -> ClientUpdate:
        """The same update, with its values in a file.

        Raises:
            IncompatibleUpdate: a value is not a tensor, by client and entry.
        """
        path = Path(self._folder.name) / f"{self._count}.safetensors"
        tensors = {}
        for name, value in update.values.items():
            if not isinstance(value, Tensor):
                raise IncompatibleUpdate(
                    f"client {update.client_id!r}, entry {name!r}: only tensors can be written to "
                    f"disk, got {type(value).__name__}"
                )
            # A copy: entries that share memory are refused by the file format.
            tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        save_file(tensors, path)
        self._count += 1
        return dataclasses.replace(update, values=SafetensorsValues(path))

    def close(self) -> None:
        """Remove the files; what :meth:`keep` returned can no longer be read."""
        self._folder.cleanup()

    def __enter__(self) -> Spill:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
