"""The clients' updates of all groups, as matrices that are never held whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ._plan import Block, Pack, Run, plan

# Bytes of a block. On a CPU, more gains nothing and a cache holds less; with less, copies are short
# and more sets of groups are solved apart, a millisecond or two each. A GPU wants few, large
# launches.
_BLOCK_CPU, _BLOCK_GPU = 1 << 24, 1 << 29
# Of columns of zeros that align the groups, on top of a twentieth of theirs.
_SPARE = 1 << 20
# Up to this size of an entry, stacking aside and copying is faster than stacking in place: for 102
# values of 16 numbers by 6 times.
_SHORT = 1 << 9
# From this size of an entry on, differences are put into the block one by one, and not made there
# of stacked values: less is written. A GPU wants few launches.
_WIDE_CPU, _WIDE_GPU = 1 << 13, 1 << 20

Values = tuple[Tensor, ...] | list[Tensor]


class Workspace:
    """Memory of a device for one block, in which several :class:`Rows` may take turns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Tensor | None = None
        # Who filled it last, and with what: an object that the Rows hold, not the Rows, which hold
        # the workspace.
        self.filled: tuple[object, Block] | None = None

    def take(self, numbers: int, dtype: torch.dtype) -> Tensor:
        """So many numbers; they hold what ``filled`` says."""
        size = numbers * dtype.itemsize
        if self._memory is None or self._memory.numel() < size:
            self.release()
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._memory[:size].view(dtype)

    def release(self) -> None:
        """Give the memory back; whoever needs what it held reads it again."""
        self._memory = self.filled = None


class Rows:
    """Per group, the matrix D whose rows are ``base - state`` for each state, then directions.

    Args:
        groups: Sizes of the entries of each group; a row is a group's entries laid end to end,
            each in index order. Entries are numbered through all groups.
        read: (entry, start, stop) -> numbers start:stop in index order of the entry's base, of
            each state, of each direction: real tensors of one shape, on any devices. Each number
            is asked for once in a pass over the rows.
        states: Number of states.
        directions: Number of directions.
        device: Where blocks are made.
        dtype: float32 or float64: of the differences and of all that is computed from them. Half
            types are widened before the difference is taken.
        block_bytes: Bytes of one block, at most. If None: on a CPU, 16 MB; on a GPU, everything if
            that fits in half of the free memory, else 512 MB. What fits into one block is read
            once for both passes.
        workspace: Where blocks are made, on ``device``; their own if None.

    Attributes:
        count: Rows of each matrix.
        plan: Where each group and entry stands on the axis of columns.

    Example:
        >>> base, client, past = torch.zeros(2), torch.tensor([1.0, 2.0]), torch.ones(2)
        >>> rows = Rows(
        ...     [[2]],
        ...     lambda entry, start, stop: [v[start:stop] for v in (base, client, past)],
        ...     states=1,
        ...     directions=1,
        ...     device=torch.device("cpu"),
        ...     dtype=torch.float32,
        ... )
        >>> [block for pack in rows.plan.packs for _, block in rows.blocks(pack)]
        [tensor([[-1., -2.],
                [ 1.,  1.]])]
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        read: Callable[[int, int, int], Values],
        *,
        states: int,
        directions: int,
        device: torch.device,
        dtype: torch.dtype,
        block_bytes: int | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.count = states + directions
        self._states = states
        self._read = read
        sizes = tuple(map(tuple, groups))
        column = dtype.itemsize * (self.count + 1)  # the base stands above the rows
        if block_bytes is None:
            block_bytes = _block_bytes(column * sum(map(sum, sizes)), device)
        self.plan = plan(sizes, max(1, block_bytes // column))
        self._workspace = Workspace(device) if workspace is None else workspace
        self._mark = object()
        self._wide = _WIDE_CPU if device.type == "cpu" else _WIDE_GPU

    def blocks(self, pack: Pack) -> Iterator[tuple[Block, Tensor]]:
        """Column blocks (count, columns) of the groups of a pack, from one end to the other.

        The memory is used again for the next block: finish with one before asking for another.
        The block that was filled last is not filled again, and comes first if it is at an end;
        unless other rows have used the workspace since.
        """
        space = self._workspace
        whole = space.take((self.count + 1) * self.plan.columns, self.dtype)
        backwards = space.filled == (self._mark, pack.blocks[-1])
        for block in reversed(pack.blocks) if backwards else pack.blocks:
            columns = block.stop - block.start
            memory = whole[: (self.count + 1) * columns].view(-1, columns)
            if space.filled != (self._mark, block):
                space.filled = None
                self._fill(memory, block, backwards=backwards)
                space.filled = self._mark, block
            yield block, memory[1:]

    def lengths(self, steps: Tensor) -> Tensor:
        """Euclidean length of each group's part of ``steps``, (groups,), float64."""
        squares = torch.zeros(len(self.plan.spans), dtype=torch.float64, device=self.device)
        for pack in self.plan.packs:
            for block in pack.blocks:
                for run in block.runs:
                    part = steps[block.start : block.stop][run.columns].view(-1, 1, run.width)
                    products = torch.bmm(part, part.mT).view(run.groups, run.chunks)
                    squares[run.members] += products.sum(1, dtype=torch.float64)
        return squares.sqrt()

    def _fill(self, memory: Tensor, block: Block, *, backwards: bool) -> None:
        subtracted = []  # columns
        # In the order of the pass: an entry that reaches into the next block is read once for both.
        for piece in reversed(block.pieces) if backwards else block.pieces:
            values = self._read(piece.entry, piece.start, piece.stop)
            size, shape = piece.stop - piece.start, values[0].shape
            target = memory[:, piece.column : piece.column + size]
            target = target if len(shape) == 1 else target.view(-1, *shape)
            together = _together(values, target)
            if together and size >= self._wide:
                self._put_differences(values, target)
                subtracted.append((piece.column, piece.column + size))
            else:
                _stack(values, target, together=together)
        for start, stop in block.gaps:
            memory[:, start:stop] = 0.0
        done = 0
        for start, stop in [*sorted(subtracted), (memory.shape[1], 0)]:
            self._subtract(memory[:, done:start])
            done = stop

    def _put_differences(self, values: Values, target: Tensor) -> None:
        base, *rows = target.unbind()
        base.copy_(values[0])
        for i, (row, value) in enumerate(zip(rows, values[1:], strict=True)):
            if i >= self._states:
                row.copy_(value)
                continue
            # Subtraction takes no flags.
            number = row.copy_(value) if value.dtype == torch.bool else value
            torch.sub(base, number, out=row)

    def _subtract(self, memory: Tensor) -> None:
        # In the block's dtype, not the clients': half types overflow and lose digits.
        states = memory[1 : 1 + self._states]
        torch.sub(memory[0], states, out=states)


def _block_bytes(everything: int, device: torch.device) -> int:
    """A block, where all groups together take so many bytes."""
    if device.type == "cpu":
        return _BLOCK_CPU
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        aligned = everything + everything // 20 + _SPARE
        return aligned if aligned < free // 2 else min(_BLOCK_GPU, free // 4)
    return _BLOCK_GPU


def batch(block: Tensor, run: Run) -> Tensor:
    """The equal matrices of a run, (matrices, rows, width): a view of the block."""
    return block[:, run.columns].view(block.shape[0], -1, run.width).transpose(0, 1)


def _stack(values: Values, target: Tensor, *, together: bool) -> None:
    """Put values into the rows of ``target``: one copy for all that are on one device."""
    if not together:
        start = 0
        for device, group in itertools.groupby(values, key=lambda value: value.device):
            some = list(group)
            rows = target[start : start + len(some)]
            start += len(some)
            if device == target.device:
                torch.stack(some, out=rows)
            else:
                rows.copy_(_brought(some, target.device))
    elif values[0].numel() < _SHORT:
        target.copy_(torch.stack(values))
    else:
        torch.stack(values, out=target)


def _together(values: Values, target: Tensor) -> bool:
    if target.is_cpu:  # several times faster than comparing devices
        return all([value.is_cpu for value in values])
    return {value.device for value in values} == {target.device}


def _brought(values: list[Tensor], device: torch.device) -> Tensor:
    """Stacked where they are, and taken to a device as they are: their type is changed there.

    From page-locked memory, the next stack overlaps the copy; the allocator of such memory does not
    hand a piece out again before its copy is done.
    """
    if device.type != "cuda" or values[0].device.type != "cpu":
        return torch.stack(values).to(device)
    dtype = values[0].dtype
    for value in values[1:]:
        dtype = torch.promote_types(dtype, value.dtype)
    stage = torch.empty((len(values), *values[0].shape), dtype=dtype, pin_memory=True)
    return torch.stack(values, out=stage).to(device, non_blocking=True)
