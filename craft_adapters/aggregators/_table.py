"""The values of a round, entry by entry, as the operator reads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .._intake import Intake, real
from .._layout import Group, Layout
from ..projection import Rows, Workspace

Column = tuple[Tensor, ...]
"""One entry of the global model, of each client in order, of the memory if there is one."""


class Table:
    """What the rows of a round are made of.

    Args:
        intake: The global model and its clients.
        layout: Which of the payload's entries are groups, which are averaged.
        memory: Entry -> the rule's remembered direction, flat; one it lacks counts as zero.
        device: Where the arithmetic is done.
        block_bytes: Memory to work in; see :class:`Rows`.

    Attributes:
        in_memory: Whether the clients' values are in memory anyway. Others are read when a pass
            comes to them, and let go.
        remembers: Whether there is a row for the memory, the last one.
    """

    def __init__(
        self,
        intake: Intake,
        layout: Layout,
        memory: Mapping[str, Tensor],
        device: torch.device,
        block_bytes: int | None,
    ) -> None:
        self._intake = intake
        self._device = device
        self._block_bytes = block_bytes
        self._columns = _Columns(intake, memory, device)
        self._workspace = Workspace(device)
        self._rows: dict[tuple[torch.dtype, tuple[Group, ...]], Rows] = {}
        self.remembers = bool(memory)
        self.in_memory = all(isinstance(client.values, dict) for client in intake.clients)
        if self.in_memory:
            entries = [entry for group in layout.groups for entry in group.entries]
            self._columns.read([*entries, *layout.averaged])

    def double(self, group: Group) -> bool:
        """Whether any value is float64; known once the group has been read."""
        return not self._columns.double.isdisjoint(group.entries)

    def rows(self, groups: Sequence[Group], dtype: torch.dtype) -> Rows:
        """The matrices of some groups. Asked for again, the same, with what they still hold."""
        key = (dtype, tuple(groups))
        if key not in self._rows:
            self._rows[key] = self._make_rows(groups, dtype)
        return self._rows[key]

    def parts(self, groups: Sequence[Group], dtype: torch.dtype) -> list[slice]:
        """Neighbours among the groups that fit into one block, or one that does not."""
        starts = [pack.first for pack in self.rows(groups, dtype).plan.packs] or [0]
        # Groups without columns are in no pack of their own.
        stops = [*starts[1:], len(groups)]
        return [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]

    def release(self) -> None:
        """Give the memory of the blocks back."""
        self._workspace.release()

    def _make_rows(self, groups: Sequence[Group], dtype: torch.dtype) -> Rows:
        state = self._intake.state
        sizes = [[real(state[entry]).numel() for entry in group.entries] for group in groups]
        names = [entry for group in groups for entry in group.entries]
        numbers = list(itertools.chain.from_iterable(sizes))
        columns = self._columns  # not self: a cycle would keep the round's tensors for a while

        def read(number: int, start: int, stop: int) -> Column:
            name = names[number]
            if stop - start == numbers[number]:
                return columns[name]
            return columns.part(name, start, stop)

        clients = self._intake.clients
        states = sum(client.kind == "state" for client in clients)
        return Rows(
            sizes,
            read,
            states=states,
            directions=len(clients) - states + self.remembers,
            device=self._device,
            dtype=dtype,
            block_bytes=self._block_bytes,
            workspace=self._workspace,
        )


class _Columns:
    """Entry -> its values: those read last."""

    def __init__(self, intake: Intake, memory: Mapping[str, Tensor], device: torch.device) -> None:
        self._intake = intake
        self._memory = memory
        self._nothing = torch.zeros((), device=device)
        self._held: dict[str, Column] = {}
        self.double: set[str] = set()

    def __getitem__(self, name: str) -> Column:
        if name not in self._held:
            self.read([name])
        return self._held[name]

    def read(self, names: Sequence[str]) -> None:
        """Let go of what is held, and hold these."""
        self._held = {}
        base = [real(self._intake.state[name]) for name in names]
        parts = [base, *self._intake.read(names)]
        if self._memory:
            parts.append([self._remembered(n, b) for n, b in zip(names, base, strict=True)])
        self._held = dict(zip(names, zip(*parts, strict=True), strict=True))
        if any(torch.float64 in {value.dtype for value in part} for part in parts):
            for name, column in self._held.items():
                self._note(name, column)

    def part(self, name: str, start: int, stop: int) -> Column:
        """Numbers start:stop of an entry, flat; without the rest, if the clients can."""
        if name not in self._held:
            parts = self._intake.read_part(name, start, stop)
            if parts is not None:
                base = real(self._intake.state[name])
                column = [base.reshape(-1)[start:stop], *parts]
                if self._memory:
                    column.append(self._remembered(name, base).reshape(-1)[start:stop])
                self._note(name, column)
                return tuple(column)
        return tuple(value.reshape(-1)[start:stop] for value in self[name])

    def _note(self, name: str, column: Iterable[Tensor]) -> None:
        if any(value.dtype == torch.float64 for value in column):
            self.double.add(name)

    def _remembered(self, name: str, base: Tensor) -> Tensor:
        known = self._memory.get(name)
        return self._nothing.expand(base.shape) if known is None else known.view(base.shape)
