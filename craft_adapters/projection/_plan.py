"""Where the columns of each group stand, and which of them are worked on together.

Groups stand side by side on one axis, each on a multiple of its own chunk, so that a run of equal
groups in a block is a batch of equal matrices: many small layers cost few products, and a wide one
is many short sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

# Columns of one product, at most twice as many. Float32 sums stay short (they are added up in
# float64), and a batch of short products keeps all cores busy where one of few rows does not:
# 11 x 36,992 float32 ran at 31 Gflop/s as one product and at 167 in eight, on two cores.
CHUNK = 1 << 12


@dataclass(frozen=True, slots=True)
class Piece:
    """Numbers start:stop of an entry, from column ``column`` of a block on."""

    entry: int
    start: int
    stop: int
    column: int


@dataclass(frozen=True, slots=True)
class Run:
    """Equal groups side by side in a block: ``groups * chunks`` matrices of ``width`` columns.

    Attributes:
        groups: Number of groups.
        chunks: Matrices per group.
        width: Columns of each.
        members: Positions of the groups.
        columns: Their place in the block.
    """

    groups: int
    chunks: int
    width: int
    members: slice
    columns: slice


@dataclass(frozen=True, slots=True)
class Block:
    """Columns start:stop of the axis, and what stands there; the gaps are zero."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]
    gaps: tuple[tuple[int, int], ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Pack:
    """Groups first:last, whole: several in one block, or one in as many as it takes."""

    first: int
    last: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The axis.

    Attributes:
        packs: All groups that have columns, in order.
        spans: Per group, its first column on the axis and the one after its last, gaps included.
        entries: Per entry, its first column; entries are numbered through all groups.
        columns: Columns of the largest block.
    """

    packs: tuple[Pack, ...]
    spans: tuple[tuple[int, int], ...]
    entries: tuple[int, ...]
    columns: int

    @property
    def length(self) -> int:
        """Columns of the axis."""
        return self.spans[-1][1] if self.spans else 0


@dataclass(frozen=True, slots=True)
class _Place:
    """A group on the axis: start:end is filled, end:stop zero."""

    start: int
    end: int
    stop: int
    chunks: int
    width: int
    pieces: tuple[Piece, ...]


# A round asks for one per part of the model, the next round for the same ones again.
@lru_cache(maxsize=4096)
def plan(groups: tuple[tuple[int, ...], ...], columns: int) -> Plan:
    """Lay groups out.

    Args:
        groups: Sizes of the entries of each group.
        columns: Columns of a block, at most (and at least one).

    Example:
        >>> two = plan(((3, 1), (4,)), columns=100)
        >>> two.spans
        ((0, 4), (4, 8))
        >>> [run.columns for run in two.packs[0].blocks[0].runs]
        [slice(0, 8, None)]
    """
    places: list[_Place] = []
    numbers = itertools.count()
    stop = 0
    for sizes in groups:
        start = end = stop
        pieces = []
        for size in sizes:
            pieces.append(Piece(next(numbers), 0, size, end))
            end += size
        chunks, width = _cut(end - start, columns)
        stop = start + chunks * width
        places.append(_Place(start, end, stop, chunks, width, tuple(pieces)))
    packs = tuple(
        Pack(first, last, tuple(_blocks(places, first, last, columns)))
        for first, last in _packs(places, columns)
    )
    return Plan(
        packs,
        spans=tuple((place.start, place.stop) for place in places),
        entries=tuple(piece.column for place in places for piece in place.pieces),
        columns=max((b.stop - b.start for pack in packs for b in pack.blocks), default=0),
    )


def _cut(width: int, columns: int) -> tuple[int, int]:
    """Number and width of a group's chunks, with as few columns of zeros as can be."""
    if width == 0:
        return 0, 0
    longest = min(CHUNK, columns)
    least = -(-width // longest)
    divisors = (n for n in range(least, min(2 * least, width + 1)) if width % n == 0)
    chunks = next(divisors, least)
    shortest = -(-width // chunks)
    if chunks * shortest <= columns:
        return chunks, shortest
    return least, longest  # only the last of several blocks may have zeros


def _packs(places: list[_Place], columns: int) -> Iterator[tuple[int, int]]:
    """Neighbours that fit into one block."""
    first = 0
    for q, place in enumerate(places):
        if place.stop - places[first].start > columns and place.start > places[first].start:
            yield first, q
            first = q
    if places and places[-1].stop > places[first].start:
        yield first, len(places)


def _blocks(places: list[_Place], first: int, last: int, columns: int) -> Iterator[Block]:
    start, stop = places[first].start, places[last - 1].stop
    step = stop - start
    if step > columns:  # a single group
        width = max(place.width for place in places[first:last])
        step = columns // width * width
    for left in range(start, stop, step):
        right = min(left + step, stop)
        pieces, gaps = [], []
        for place in places[first:last]:
            for piece in place.pieces:
                begin, end = max(piece.column, left), min(piece.column + piece.stop, right)
                if begin < end:
                    pieces.append(
                        Piece(piece.entry, begin - piece.column, end - piece.column, begin - left)
                    )
            begin, end = max(place.end, left), min(place.stop, right)
            if begin < end:
                gaps.append((begin - left, end - left))
        runs = tuple(_runs(places, first, last, left, right))
        yield Block(left, right, tuple(pieces), tuple(gaps), runs)


def _runs(places: list[_Place], first: int, last: int, left: int, right: int) -> Iterator[Run]:
    def cut(q: int) -> tuple[int, int]:
        return places[q].chunks, places[q].width

    for (chunks, width), members in itertools.groupby(range(first, last), key=cut):
        if chunks:
            equal = list(members)
            start = max(places[equal[0]].start, left)
            here = (min(places[equal[-1]].stop, right) - start) // (width * len(equal))
            yield Run(
                len(equal),
                here,
                width,
                members=slice(equal[0], equal[-1] + 1),
                columns=slice(start - left, start - left + len(equal) * here * width),
            )
