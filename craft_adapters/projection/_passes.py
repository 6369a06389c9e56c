"""The two passes over the rows: products of all pairs, and one combination."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._rows import Rows

# Rows per product: the upper triangle is left out panel by panel. Measured on two Zen 4 cores at
# 100 rows, Gflop/s of the full product: float64 80 (one panel), 91 (of 33 rows), 101 (of 20);
# float32 141 (one panel), 167 (of 50).
_PANEL_CPU = {torch.float64: 20, torch.float32: 50}
# Squares of lengths outside of this lose digits in float32 (or are zero, or not finite).
_SOUND_RANGE = (1e-24, 1e30)
# Smallest square of a Cholesky pivot of the cosines: the part of a unit update that the ones
# before it leave over. Float32 products are good to about 1e-7 of a unit, and one correction
# divides their error by about this / 1e-7.
_SOUND_PIVOT = 1e-3


def gram(rows: Rows) -> Tensor:
    """G = D D^T, (rows, rows), float64 on the rows' device; zero for no columns.

    Products are computed in the rows' dtype and added up over blocks in float64. With float64
    rows from float32 values, differences are exact and products have at most 48 bits, so G is
    good to about 1e-15 of |d_i| |d_j|; with float32 rows, to about 1e-7: enough where
    :func:`is_sound` says so and :func:`combine` corrects what is left.

    The Gram matrix of a whole is the sum of those of its column shards.

    >>> D = [torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])]
    >>> cpu = torch.device("cpu")
    >>> gram(Rows([torch.zeros(2)], [[]], [D], device=cpu, dtype=torch.float64))
    tensor([[25.,  3.],
            [ 3.,  1.]], dtype=torch.float64)
    """
    total = torch.zeros(rows.count, rows.count, dtype=torch.float64, device=rows.device)
    panel = rows.count
    if rows.device.type == "cpu":
        panel = -(-panel // max(1, panel // _PANEL_CPU[rows.dtype]))  # equal ones
    for block in rows.blocks():
        for start in range(0, rows.count, max(1, panel)):
            stop = min(rows.count, start + panel)
            total[start:stop, :stop] += block[start:stop] @ block[:stop].T
    return total.tril() + total.tril(-1).T


def is_sound(product: Tensor) -> bool:
    """Whether float32 products served: all lengths in range, and no row nearly dependent.

    Args:
        product: (m, m) A Gram matrix from float32 rows.
    """
    squares = product.diagonal()
    low, high = _SOUND_RANGE
    if not bool(((squares >= low) & (squares <= high)).all()):
        return False
    lengths = squares.sqrt()
    factor, info = torch.linalg.cholesky_ex(product / lengths / lengths.unsqueeze(-1))
    return bool((info == 0) & (factor.diagonal().square().amin() >= _SOUND_PIVOT))


def squares(rows: Rows) -> Tensor:
    """The diagonal of :func:`gram` alone, (rows,)."""
    total = torch.zeros(rows.count, dtype=torch.float64, device=rows.device)
    for block in rows.blocks():
        total += torch.linalg.vecdot(block, block)
    return total


def combine(
    rows: Rows,
    weights: Tensor,
    correct: Callable[[Tensor], Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The step sum_i weights[i] D[i], and its inner products with the rows.

    Args:
        rows: D.
        weights: (rows,), float64, on the rows' device.
        correct: Given the inner products D g, (rows,) float64, of the step so far, returns weights
            to add, or None if it is good. This is iterative refinement: weights that came from
            float32 products are corrected by the true residual, once.

    Returns:
        The step, (columns,), in the rows' dtype; and D g, (rows,) float64, measured on it, or None
        without ``correct``.

    >>> D = [torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])]
    >>> cpu = torch.device("cpu")
    >>> rows = Rows([torch.zeros(2)], [[]], [D], device=cpu, dtype=torch.float64)
    >>> combine(rows, torch.tensor([1.0, 2.0], dtype=torch.float64))
    (tensor([5., 4.], dtype=torch.float64), None)
    """
    step = torch.zeros(rows.width, dtype=rows.dtype, device=rows.device)
    inner = _add(step, rows, weights, measure=correct is not None)
    if correct is not None and inner is not None:
        more = correct(inner)
        if more is not None:
            inner = _add(step, rows, more, measure=True)
    return step, inner


def _add(step: Tensor, rows: Rows, weights: Tensor, *, measure: bool) -> Tensor | None:
    """Add a combination of the rows to the step, and measure its inner products with them."""
    inner = torch.zeros(rows.count, dtype=torch.float64, device=rows.device) if measure else None
    rounded = weights.to(rows.dtype)
    start = 0
    for block in rows.blocks():
        part = step[start : start + block.shape[1]]
        part.addmv_(block.T, rounded)
        if inner is not None:
            inner += block @ part
        start += block.shape[1]
    return inner
