"""The least that a step can cost on this machine, from plain torch operations.

A step has to read the updates once to form the differences, multiply them, and read them again
for the new model. Each of the three is measured alone, as fast as any of a few ways of writing it:
flat contiguous clients, blocks that stay in the cache, no layers, no checks, no solve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from federations import Federation
from oracle import flat
from timing import timed
from torch import Tensor

# Bytes of a block of differences.
_BLOCKS = {"cpu": (1 << 22, 1 << 24), "cuda": (1 << 25, 1 << 28, 1 << 31)}
# Columns of one product of a batch.
_CHUNKS = (1 << 11, 1 << 12, 1 << 13)
# Bytes of one copy to the card.
_UPLOAD = 1 << 28
# Of the fastest way of a part, at the first try.
_FAR_BEHIND = 2.0

Parts = list[tuple[Tensor, ...]]
Ways = dict[str, list[Callable[[], object]]]


class Floor:
    """The floor of one federation, better with each :meth:`measure`.

    Args:
        federation: Clients on the device that is measured.

    Attributes:
        parts: Seconds of "read", "multiply" and "apply"; the least so far.
    """

    def __init__(self, federation: Federation) -> None:
        entries = list(federation.state)
        base = flat(federation.state, entries)
        clients = [flat(u.values, entries) for u in federation.updates]
        self._device = base.device
        self._ways: Ways = {"read": [], "multiply": [], "apply": []}
        rows, most = len(clients), base.numel()
        sizes = _BLOCKS.get(base.device.type, _BLOCKS["cpu"])
        for columns in sorted({min(most, max(1, size // (4 * rows))) for size in sizes}):
            block = torch.randn(rows, columns, device=base.device)
            bases = torch.split(base, columns)
            parts = list(zip(*(torch.split(c, columns) for c in clients), strict=True))
            weights = torch.full((rows,), 1.0 / rows, device=base.device)
            self._ways["read"] += [
                partial(_subtract_one_by_one, bases, parts, block),
                partial(_subtract_stacked, bases, parts, block),
            ]
            self._ways["multiply"] += [partial(_multiply, block, most, None)]
            self._ways["multiply"] += [
                partial(_multiply, block, most, chunk) for chunk in _CHUNKS if chunk < columns
            ]
            self._ways["apply"] += [
                partial(_add_one_by_one, bases, parts, block),
                partial(_add_stacked, bases, parts, block, weights),
            ]
        self.parts = dict.fromkeys(self._ways, float("inf"))

    @property
    def seconds(self) -> float:
        """The sum of the parts."""
        return sum(self.parts.values())

    def measure(self) -> None:
        """Time every way of every part once; those that are far behind do not run again."""
        for part, ways in self._ways.items():
            seconds = [timed(way, self._device)[0] for way in ways]
            self.parts[part] = min(self.parts[part], *seconds)
            self._ways[part] = [
                way
                for way, taken in zip(ways, seconds, strict=True)
                if taken < _FAR_BEHIND * min(seconds)
            ]


def upload(size: int, device: torch.device) -> float:
    """Seconds to bring so many bytes from page-locked memory to a card."""
    source = torch.empty(min(size, _UPLOAD), dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    tries = [timed(lambda: target.copy_(source, non_blocking=True), device)[0] for _ in range(5)]
    return min(tries) * size / len(source)


def _subtract_one_by_one(bases: tuple[Tensor, ...], parts: Parts, block: Tensor) -> None:
    for base, clients in zip(bases, parts, strict=True):
        for row, client in zip(_narrow(block, len(base)), clients, strict=True):
            torch.sub(base, client, out=row)


def _subtract_stacked(bases: tuple[Tensor, ...], parts: Parts, block: Tensor) -> None:
    for base, clients in zip(bases, parts, strict=True):
        rows = _narrow(block, len(base))
        torch.stack(clients, out=rows)
        torch.sub(base, rows, out=rows)


def _multiply(block: Tensor, most: int, chunk: int | None) -> None:
    """Products of as many columns as the model has: whole blocks, or batches of short products."""
    rows, columns = block.shape
    for width in _steps(most, columns):
        part = _narrow(block, width)
        if chunk is None or width < chunk:
            torch.mm(part, part.mT)
        else:
            whole = width - width % chunk
            batch = part[:, :whole].view(rows, -1, chunk).transpose(0, 1)
            torch.bmm(batch, batch.mT)
            torch.mm(part[:, whole:], part[:, whole:].mT)


def _add_one_by_one(bases: tuple[Tensor, ...], parts: Parts, block: Tensor) -> None:
    weight = 1.0 / len(block)
    for base, clients in zip(bases, parts, strict=True):
        moved = base.clone()
        for client in clients:
            moved.add_(client, alpha=weight)


def _add_stacked(bases: tuple[Tensor, ...], parts: Parts, block: Tensor, weights: Tensor) -> None:
    for base, clients in zip(bases, parts, strict=True):
        rows = _narrow(block, len(base))
        torch.stack(clients, out=rows)
        torch.addmv(base, rows.mT, weights)


def _narrow(block: Tensor, columns: int) -> Tensor:
    """A contiguous block of so many columns, in the same memory."""
    return block.view(-1)[: len(block) * columns].view(len(block), columns)


def _steps(most: int, columns: int) -> Iterator[int]:
    return (min(columns, most - start) for start in range(0, most, columns))
