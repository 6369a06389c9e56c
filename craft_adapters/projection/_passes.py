"""The two passes over the rows: products of all pairs, and one combination."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._plan import Pack, Piece, Run
from ._rows import Rows, batch


def gram(rows: Rows, out: Tensor | None = None) -> Tensor:
    """G = D D^T of each group, (groups, rows, rows), float64 on the rows' device.

    Args:
        rows: D of each group.
        out: Where to put G, float64 on the rows' device; a new tensor if None.

    Products are computed in the rows' dtype over some thousand columns at a time, and added up in
    float64. With float64 rows from float32 values, differences are exact and products have at
    most 48 bits, so G is good to about 1e-15 of |d_i| |d_j|; with float32 rows, to about 1e-7:
    enough where :func:`sound` says so and :func:`combine` corrects what is left.

    The Gram matrix of a whole is the sum of those of its column shards.

    >>> values = torch.zeros(2), torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])
    >>> rows = Rows(
    ...     [[2]], lambda *_: values, states=0, directions=2,
    ...     device=torch.device("cpu"), dtype=torch.float64,
    ... )
    >>> gram(rows)
    tensor([[[25.,  3.],
             [ 3.,  1.]]], dtype=torch.float64)
    """
    shape = len(rows.plan.spans), rows.count, rows.count
    total = torch.empty(shape, dtype=torch.float64, device=rows.device) if out is None else out
    total.zero_()
    for pack in rows.plan.packs:
        for block, matrix in rows.blocks(pack):
            for run in block.runs:
                part = batch(matrix, run)
                total[run.members] += _over_chunks(torch.bmm(part, part.mT), run)
    return total


Correction = Callable[[slice, Tensor], Tensor | None]
Turn = Callable[[Piece, Tensor], None]


def combine(
    rows: Rows,
    weights: Tensor,
    correct: Correction | None = None,
    *,
    dtype: torch.dtype | None = None,
    turn: Turn | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The steps g = sum_i weights[i] D[i] of all groups, and their inner products with the rows.

    Args:
        rows: D of each group.
        weights: (groups, rows), float64, on the rows' device.
        correct: Given positions of groups and the inner products D g, (positions, rows) float64,
            of their steps so far, returns weights to add, or None if they are good. This is
            iterative refinement: weights that came from float32 products are corrected by the
            true residual, once.
        dtype: Of the steps; the rows' if None.
        turn: Changes a finished step in place, given which numbers of which entry these are; not
            with ``correct``.

    Returns:
        The steps, laid out as ``rows.plan`` says; and D g, (groups, rows)
        float64, measured on them, or None without ``correct`` and ``turn``.

    >>> values = torch.zeros(2), torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])
    >>> rows = Rows(
    ...     [[2]], lambda *_: values, states=0, directions=2,
    ...     device=torch.device("cpu"), dtype=torch.float64,
    ... )
    >>> combine(rows, torch.tensor([[1.0, 2.0]], dtype=torch.float64))
    (tensor([5., 4.], dtype=torch.float64), None)
    """
    steps = torch.empty(rows.plan.length, dtype=dtype or rows.dtype, device=rows.device)
    inner = None if correct is None and turn is None else torch.zeros_like(weights)
    rounded = weights.to(rows.dtype)
    for pack in reversed(rows.plan.packs):  # the last one may still be there from the first pass
        _put(steps, rows, pack, rounded, inner, turn)
        if correct is not None and inner is not None:
            members = slice(pack.first, pack.last)
            more = correct(members, inner[members])
            if more is not None:
                every = torch.zeros_like(rounded)
                every[members] = more
                inner[members] = 0.0
                _put(steps, rows, pack, every, inner, add=True)
    return steps, inner


def _put(
    steps: Tensor,
    rows: Rows,
    pack: Pack,
    weights: Tensor,
    inner: Tensor | None,
    turn: Turn | None = None,
    *,
    add: bool = False,
) -> None:
    """Set the steps of a pack, or add to them; add the products of rows and steps to ``inner``."""
    for block, matrix in rows.blocks(pack):
        step = steps[block.start : block.stop]
        for run in block.runs:
            part, place = batch(matrix, run), step[run.columns].view(-1, 1, run.width)
            each = weights[run.members]
            if run.chunks > 1:
                each = each.repeat_interleave(run.chunks, 0)
            if not add and steps.dtype == rows.dtype:
                torch.bmm(each.unsqueeze(1), part, out=place)
            else:
                change = torch.bmm(each.unsqueeze(1), part)
                place.copy_(place + change if add else change)
        if turn is not None:
            for piece in block.pieces:
                turn(piece, step[piece.column : piece.column + piece.stop - piece.start])
        if inner is not None:
            for run in block.runs:
                part, place = batch(matrix, run), step[run.columns].view(-1, 1, run.width)
                products = torch.bmm(part, place.mT.to(part.dtype))
                inner[run.members] += _over_chunks(products, run).squeeze(-1)


def _over_chunks(products: Tensor, run: Run) -> Tensor:
    """Sums over the chunks of each group, in float64."""
    if run.chunks == 1:
        return products
    return products.view(-1, run.chunks, *products.shape[1:]).sum(1, dtype=torch.float64)
