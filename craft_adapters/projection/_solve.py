"""Minimum-norm solution of many small symmetric systems, on the CPU in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Numbers of the matrices that are formed at a time: 2 MB. All of 110 groups of 100 clients would
# be as much as the largest group's updates.
_TOGETHER = 1 << 18
# Cholesky serves while the condition number is below this: its answer is then good to
# 1e6 * 2.2e-16, and no eigenvalue is near the cut-off.
_WELL_CONDITIONED = 1e6
_ITERATIONS = 6
# Squares of lengths outside of this lose digits in float32 (or are zero, or not finite).
_SOUND_RANGE = (1e-24, 1e30)
# Smallest square of a Cholesky pivot of the cosines: the part of a unit update that the ones
# before it leave over. Float32 products are good to about 1e-7 of a unit, and one correction
# divides their error by about this / 1e-7.
_SOUND_PIVOT = 1e-3


@dataclass(frozen=True, slots=True)
class Cosines:
    """The matrices K of cosines between rows, formed a few at a time from Gram matrices.

    Attributes:
        products: (q, m, m) Gram matrices, float64, on the CPU.
        scale: (q, m) 1 / length of each row; zero for a row that is left out.

    Example:
        >>> G = torch.tensor([[[4.0, 1.0], [1.0, 1.0]]], dtype=torch.float64)
        >>> Cosines(G, torch.tensor([[0.5, 1.0]])).of(slice(1))
        tensor([[[1.0000, 0.5000],
                 [0.5000, 1.0000]]], dtype=torch.float64)
    """

    products: Tensor
    scale: Tensor

    @property
    def active(self) -> Tensor:
        """(q, m) bool. Rows that are not left out."""
        return self.scale > 0

    def of(self, groups: slice | Tensor) -> Tensor:
        """K of some groups; rows and columns of what is left out are zero."""
        scale = self.scale[groups]
        matrices = self.products[groups] * scale.unsqueeze(-1) * scale.unsqueeze(-2)
        # A row that is left out may be infinite, and rounding may give 1 a last digit.
        matrices.masked_fill_(~((scale > 0).unsqueeze(-1) & (scale > 0).unsqueeze(-2)), 0.0)
        matrices.diagonal(dim1=-2, dim2=-1).copy_(scale > 0)
        return matrices

    def parts(self) -> Iterator[slice]:
        """The groups, as many at a time as take little memory."""
        groups, size = self.scale.shape
        step = max(1, _TOGETHER // max(1, size * size))
        return (slice(start, start + step) for start in range(0, groups, step))


@dataclass(frozen=True, slots=True)
class Solution:
    """What :func:`solve` found, for q systems of size m with k right-hand sides.

    Attributes:
        x: (q, m, k), float64: K^+ rhs.
        rank: (q,) Number of eigenvalues used.
        eigenvalue_min: (q,) The smallest eigenvalue used; NaN for rank 0.
        eigenvalue_max: (q,) The largest one; NaN for rank 0. Where Cholesky served, the two are
            estimates by power iteration, from inside the spectrum.
        regular: (q,) bool. Where Cholesky served.
        cosines: K.
    """

    x: Tensor
    rank: Tensor
    eigenvalue_min: Tensor
    eigenvalue_max: Tensor
    regular: Tensor
    cosines: Cosines

    def again(self, systems: Tensor, rhs: Tensor) -> Tensor:
        """K^+ rhs, (k, m), for one more right-hand side of k systems, all regular."""
        factor = torch.linalg.cholesky(_padded(self.cosines.of(systems)))
        return torch.cholesky_solve(rhs.unsqueeze(-1), factor).squeeze(-1)


def sound(products: Tensor) -> Tensor:
    """Where float32 products served: all lengths in range, and no row nearly dependent.

    Args:
        products: (q, m, m), float64, CPU: Gram matrices of float32 rows.

    Returns:
        (q,) bool.
    """
    squares = products.diagonal(dim1=-2, dim2=-1)
    low, high = _SOUND_RANGE
    result = ((squares >= low) & (squares <= high)).all(-1)
    cosines = Cosines(products, squares.rsqrt().where(result.unsqueeze(-1), 0.0))
    for part in cosines.parts():
        factor, info = torch.linalg.cholesky_ex(_padded(cosines.of(part)))
        pivots = factor.diagonal(dim1=-2, dim2=-1).square().amin(-1)
        result[part] &= (info == 0) & (pivots >= _SOUND_PIVOT)
    return result


def solve(cosines: Cosines, rhs: Tensor, *, rtol: Tensor) -> Solution:
    """K^+ rhs for each K, restricted to its active rows and columns.

    Args:
        cosines: (q, m, m) K; x is zero for the rows that it leaves out.
        rhs: (q, m, k), float64.
        rtol: (q,) Eigenvalues <= rtol * m_active * (largest eigenvalue) count as zero. What a
            Gram matrix of m rows cannot tell from zero grows with m and with the rounding of its
            entries, not with the number of columns they were summed over.

    Returns:
        The minimum-norm least-squares solution: exact where K is regular.

    Example:
        >>> G = torch.ones(1, 2, 2, dtype=torch.float64)
        >>> rhs = torch.tensor([[[0.25], [0.75]]], dtype=torch.float64)
        >>> found = solve(Cosines(G, torch.ones(1, 2)), rhs, rtol=torch.tensor([1e-15]))
        >>> found.x.flatten(), found.rank
        (tensor([0.2500, 0.2500], dtype=torch.float64), tensor([1]))
    """
    active = cosines.active
    rank = active.sum(-1)
    x = torch.zeros_like(rhs)
    low, high = torch.full((2, len(rank)), torch.nan, dtype=torch.float64)
    regular = torch.zeros_like(rank, dtype=torch.bool)
    rhs = rhs.where(active.unsqueeze(-1), 0.0)
    for part in cosines.parts():
        matrices = cosines.of(part)
        found = _by_cholesky(matrices, active[part], rhs[part])
        x[part], low[part], high[part], regular[part] = found
        rest = (~regular[part] & (rank[part] > 0)).nonzero().flatten()
        if len(rest):
            q = rest + part.start
            x[q], rank[q], low[q], high[q] = _by_eigenvalues(
                matrices[rest], rhs[q], rtol[q] * rank[q]
            )
    empty = active.sum(-1) == 0
    low[empty] = high[empty] = torch.nan
    return Solution(x, rank, low, high, regular, cosines)


def _padded(matrices: Tensor) -> Tensor:
    """With ones on the diagonal for what is left out."""
    matrices.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return matrices


def _by_cholesky(
    matrices: Tensor, active: Tensor, rhs: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    factor, info = torch.linalg.cholesky_ex(_padded(matrices.clone()))
    regular = (info == 0) & active.any(-1)
    identity = torch.eye(active.shape[1], dtype=torch.float64)
    factor = factor.where(regular[:, None, None], identity)
    low, high = _extremes(matrices, factor, active)
    regular &= low * _WELL_CONDITIONED > high
    x = torch.cholesky_solve(rhs, factor).where(regular[:, None, None], 0.0)
    return x, low, high, regular


def _extremes(matrices: Tensor, factor: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """Estimates of the smallest and largest eigenvalue, by (inverse) power iteration."""
    # A fixed start that is orthogonal to nothing in particular; zero stays zero outside.
    start = torch.linspace(1.0, 2.0, active.shape[1], dtype=torch.float64)
    start[1::2] *= -1.0
    down = (active * start).unsqueeze(-1)
    up = (active * start.abs()).unsqueeze(-1)
    for _ in range(_ITERATIONS):  # from 1e-16 to 1e4 to this power fits: no need to normalise
        down = torch.cholesky_solve(down, factor)
        up = matrices @ up
    return _rayleigh(matrices, down), _rayleigh(matrices, up)


def _rayleigh(matrices: Tensor, vectors: Tensor) -> Tensor:
    along = (vectors * (matrices @ vectors)).sum(dim=(-2, -1))
    return along / vectors.square().sum(dim=(-2, -1))


def _by_eigenvalues(
    matrices: Tensor, rhs: Tensor, cutoff: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrices)
    high = values[:, -1]
    used = values > (cutoff * high).unsqueeze(-1)
    inverse = used / values.where(used, 1.0)
    x = vectors @ (inverse.unsqueeze(-1) * (vectors.mT @ rhs))
    low = values.where(used, torch.inf).amin(-1)
    return x, used.sum(-1), low, high
