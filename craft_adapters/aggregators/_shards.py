"""A server model that is spread over processes: each rank holds a part of every entry."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._contract import ClientUpdate, State
from ..errors import IncompatibleUpdate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Exact when squared and summed over a million ranks.
_CHECKSUM = 1 << 16


class Shards:
    """Sums over the ranks of a process group, and the parts that this rank holds.

    Args:
        group: The ranks among which the model is spread.
        device: Where the arithmetic is done; NCCL adds up there, Gloo on the CPU.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        from torch import distributed

        self._group = group
        self._device = device if "nccl" in distributed.get_backend(group) else torch.device("cpu")

    def sum(self, *tensors: Tensor) -> list[Tensor]:
        """Sums of float64 CPU tensors over all ranks, in one all-reduce; the same on every rank."""
        from torch import distributed

        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(self._device)
        distributed.all_reduce(flat, group=self._group)
        parts = torch.split(flat.cpu(), [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def add_up(self, *tensors: Tensor) -> None:
        """The same in place."""
        for ours, total in zip(tensors, self.sum(*tensors), strict=True):
            ours.copy_(total)

    def agree(self, what: str, value: object) -> None:
        """Raise IncompatibleUpdate unless all ranks call this with equal values."""
        check = float(zlib.crc32(repr(value).encode()) % _CHECKSUM)
        ours = torch.tensor([1.0, check, check * check], dtype=torch.float64)
        ranks, total, squares = self.sum(ours)[0].tolist()
        if total != ranks * check or squares != ranks * check * check:
            raise IncompatibleUpdate(
                f"the ranks of the process group do not agree on {what}; give every rank the same "
                "clients, counts, entry names and options, and a layout if entries share storage"
            )

    def first(self, position: int | None) -> int | None:
        """The smallest position that any rank found."""
        from torch import distributed

        none = torch.iinfo(torch.int64).max
        found = torch.tensor(none if position is None else position, device=self._device)
        distributed.all_reduce(found, distributed.ReduceOp.MIN, group=self._group)
        least = int(found)
        return None if least == none else least


def local_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of each DTensor; other entries as they are.

    Raises:
        IncompatibleUpdate: a DTensor of which ranks hold copies, by entry.
    """
    from torch.distributed.tensor import DTensor

    local = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            if not all(placement.is_shard() for placement in value.placements):
                raise IncompatibleUpdate(
                    f"entry {name!r}: a DTensor placed {value.placements}; each number must be on "
                    "exactly one rank of the process group, so only Shard placements can be used "
                    "(with copies in one mesh dimension, give the group of the other dimension)"
                )
            value = value.to_local()
        local[name] = value
    return local


def local_updates(updates: Iterable[ClientUpdate]) -> list[ClientUpdate]:
    """The same for the clients' values that are in memory; lazy ones give this rank's part."""
    return [
        dataclasses.replace(update, values=local_state(update.values))
        if isinstance(update.values, dict)
        else update
        for update in updates
    ]


def whole_state(local: State, like: Mapping[str, Any]) -> State:
    """Each rank's parts put together again as the DTensors that were given."""
    from torch.distributed.tensor import DTensor

    return {
        name: DTensor.from_local(
            value,
            like[name].device_mesh,
            like[name].placements,
            run_check=False,
            shape=like[name].shape,
            stride=like[name].stride(),
        )
        if isinstance(like[name], DTensor)
        else value
        for name, value in local.items()
    }
