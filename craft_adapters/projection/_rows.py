"""The clients' updates of one group as a matrix that is never held whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Bytes of a block: on a CPU about half of a last-level cache, so that the difference is still
# there when it is multiplied; a GPU wants few large launches instead.
_BLOCK_CPU = 1 << 24
_BLOCK_GPU = 1 << 29
# Columns of one float32 product: its rounding grows with them, and blocks are added in float64.
_SHORT_SUM = 1 << 16
# Columns from which rows are made one by one: shorter ones are stacked first, in one call for all
# clients, at the price of writing them twice. Measured at 100 rows: 2 times faster at 36,864
# columns, 1.5 times slower at 9,216.
_LONG = 1 << 15

Piece = tuple[int, int, int]
"""Columns start:stop of entry number i."""


class Workspace:
    """Memory for blocks that is used for one group after another.

    Fresh pages cost as much as the arithmetic on them.
    """

    def __init__(self) -> None:
        self._held: dict[torch.dtype, Tensor] = {}

    def take(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised matrix; the last one taken of the same dtype is lost."""
        held = self._held.get(dtype)
        if held is None or held.numel() < rows * columns or held.device != device:
            held = torch.empty(rows * columns, dtype=dtype, device=device)
            self._held[dtype] = held
        return held[: rows * columns].view(rows, columns)


class Rows:
    """The matrix whose rows are ``base - state`` for each state, then each direction.

    Args:
        base: The group's k entries, of any shape, real dtype and device. Laid end to end, each in
            index order, they make a row.
        states: For each of the k entries, the first rows' values, on one device: as many as there
            are states.
        directions: For each of the k entries, the other rows' values.
        device: Where blocks are made.
        dtype: float32 or float64: of the differences and of all that is computed from them. Half
            types are widened before the difference is taken.
        block_bytes: Bytes of one block; chosen from the device if None.
        workspace: Memory to work in. Two matrices may not be worked on at once in the same.

    Example:
        >>> base, client, past = torch.zeros(2), torch.tensor([1.0, 2.0]), torch.ones(2)
        >>> cpu = torch.device("cpu")
        >>> rows = Rows([base], [[client]], [[past]], device=cpu, dtype=torch.float32)
        >>> list(rows.blocks())
        [tensor([[-1., -2.],
                [ 1.,  1.]])]
    """

    def __init__(
        self,
        base: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        directions: Sequence[Sequence[Tensor]],
        *,
        device: torch.device,
        dtype: torch.dtype,
        block_bytes: int | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        self._workspace = workspace or Workspace()
        self.device = device
        self.dtype = dtype
        self.sizes = [entry.numel() for entry in base]
        self.width = sum(self.sizes)
        self.heads = len(states[0]) if states else 0
        self.count = self.heads + (len(directions[0]) if directions else 0)
        if block_bytes is None:
            block_bytes = _BLOCK_CPU if device.type == "cpu" else _BLOCK_GPU
        self._columns = max(1, block_bytes // (dtype.itemsize * max(1, self.count)))
        if dtype == torch.float32:
            self._columns = min(self._columns, _SHORT_SUM)
        self._base = base
        self._states = states
        self._directions = directions
        self._only: Tensor | None = None  # the block of a matrix that fits in one

    def blocks(self) -> Iterator[Tensor]:
        """Column blocks (rows, columns), covering all columns once, in order.

        The memory is used again for the next block: finish with one before asking for another.
        """
        if self._only is not None:
            yield self._only
            return
        whole = self.width <= self._columns
        columns = min(self.width, self._columns)
        memory = self._workspace.take(self.count, columns, self.dtype, self.device)
        for pieces in self._plan():
            filled = 0
            for index, start, stop in pieces:
                end = filled + stop - start
                self._fill(memory[:, filled:end], index, start, stop)
                filled = end
            if whole:
                self._only = memory
            yield memory[:, :filled]

    def _fill(self, target: Tensor, index: int, start: int, stop: int) -> None:
        """Put columns start:stop of an entry into ``target``."""
        heads, tails = target[: self.heads], target[self.heads :]
        if self.heads:
            # In the block's dtype, not the clients': half types overflow and lose digits.
            origin = self._base[index].reshape(-1)[start:stop].to(self.device, self.dtype)
            if stop - start < _LONG:
                torch.sub(origin, self._stack(self._states[index], index, start, stop), out=heads)
            else:
                for row, value in zip(heads.unbind(), self._states[index], strict=True):
                    torch.sub(origin, self._piece(value, start, stop), out=row)
        if self.heads < self.count:
            for row, value in zip(tails.unbind(), self._directions[index], strict=True):
                row.copy_(self._piece(value, start, stop))

    def _piece(self, value: Tensor, start: int, stop: int) -> Tensor:
        return value.reshape(-1)[start:stop].to(self.device)

    def _stack(self, values: Sequence[Tensor], index: int, start: int, stop: int) -> Tensor:
        """Columns start:stop of an entry's values, (values, stop - start), in their own dtype."""
        if stop - start < self.sizes[index]:
            values = [value.reshape(-1)[start:stop] for value in values]
        return torch.stack(list(values)).view(len(values), -1).to(self.device)

    def _plan(self) -> Iterator[list[Piece]]:
        """Cut the entries, laid end to end, into runs that fill one block each."""
        pieces: list[Piece] = []
        room = self._columns
        for index, size in enumerate(self.sizes):
            start = 0
            while start < size:
                stop = min(size, start + room)
                pieces.append((index, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    yield pieces
                    pieces, room = [], self._columns
        if pieces:
            yield pieces
