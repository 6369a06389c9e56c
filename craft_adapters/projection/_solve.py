"""Minimum-norm solution of many small symmetric systems, on the CPU in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Cholesky serves while the condition number is below this: its answer is then good to
# 1e6 * 2.2e-16, and no eigenvalue is near the cut-off.
_WELL_CONDITIONED = 1e6
_ITERATIONS = 12


@dataclass(frozen=True, slots=True)
class Solution:
    """What :func:`solve` found, for q systems of size m with k right-hand sides.

    Attributes:
        x: (q, m, k), float64: K^+ rhs.
        rank: (q,) Number of eigenvalues used.
        eigenvalue_min: (q,) The smallest eigenvalue used; NaN for rank 0.
        eigenvalue_max: (q,) The largest one; NaN for rank 0. Where Cholesky served, the two are
            estimates by power iteration, from inside the spectrum.
        factor: (q, m, m) Cholesky factors, of the padded systems; meaningless where they did not
            serve.
        regular: (q,) bool. Where Cholesky served.
    """

    x: Tensor
    rank: Tensor
    eigenvalue_min: Tensor
    eigenvalue_max: Tensor
    factor: Tensor
    regular: Tensor

    def again(self, systems: Tensor, rhs: Tensor) -> Tensor:
        """K^+ rhs, (k, m), for one more right-hand side of k systems that Cholesky solved."""
        return torch.cholesky_solve(rhs.unsqueeze(-1), self.factor[systems]).squeeze(-1)


def solve(matrices: Tensor, active: Tensor, rhs: Tensor, *, rtol: Tensor) -> Solution:
    """K^+ rhs for each K, restricted to its active rows and columns.

    Args:
        matrices: (q, m, m), float64, CPU: symmetric, positive semidefinite, unit diagonal.
        active: (q, m), bool. Other rows and columns are left out; x is zero there.
        rhs: (q, m, k), float64.
        rtol: (q,) Eigenvalues <= rtol * m_active * (largest eigenvalue) count as zero. What a
            Gram matrix of m rows cannot tell from zero grows with m and with the rounding of its
            entries, not with the number of columns they were summed over.

    Returns:
        The minimum-norm least-squares solution: exact where K is regular.

    Example:
        >>> K = torch.tensor([[[1.0, 1.0], [1.0, 1.0]]], dtype=torch.float64)
        >>> rhs = torch.tensor([[[0.25], [0.75]]], dtype=torch.float64)
        >>> two = torch.ones(1, 2, dtype=torch.bool)
        >>> found = solve(K, two, rhs, rtol=torch.tensor([1e-15]))
        >>> found.x.flatten(), found.rank
        (tensor([0.2500, 0.2500], dtype=torch.float64), tensor([1]))
    """
    both = active.unsqueeze(-1) & active.unsqueeze(-2)
    masked = matrices.where(both, 0.0)
    rhs = rhs.where(active.unsqueeze(-1), 0.0)
    count = active.sum(-1)

    padded = masked + torch.diag_embed((~active).to(torch.float64))
    factor, info = torch.linalg.cholesky_ex(padded)
    regular = (info == 0) & (count > 0)
    factor = factor.where(regular[:, None, None], torch.eye(active.shape[1], dtype=torch.float64))
    low, high = _extremes(masked, factor, active)
    regular &= low * _WELL_CONDITIONED > high

    x = torch.cholesky_solve(rhs, factor)
    rank = count.clone()
    rest = (~regular & (count > 0)).nonzero().flatten()
    if len(rest):
        x[rest], rank[rest], low[rest], high[rest] = _by_eigenvalues(
            masked[rest], rhs[rest], rtol[rest] * count[rest]
        )
    empty = count == 0
    x[empty] = 0.0
    low[empty] = high[empty] = torch.nan
    return Solution(x, rank, low, high, factor, regular)


def _extremes(matrices: Tensor, factor: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """Estimates of the smallest and largest eigenvalue, by (inverse) power iteration."""
    # A fixed start that is orthogonal to nothing in particular; zero stays zero outside.
    start = torch.linspace(1.0, 2.0, active.shape[1], dtype=torch.float64)
    start[1::2] *= -1.0
    down = (active * start).unsqueeze(-1)
    up = (active * start.abs()).unsqueeze(-1)
    for _ in range(_ITERATIONS):
        down = torch.nn.functional.normalize(torch.cholesky_solve(down, factor), dim=1)
        up = torch.nn.functional.normalize(matrices @ up, dim=1)
    return _rayleigh(matrices, down), _rayleigh(matrices, up)


def _rayleigh(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (vectors.mT @ matrices @ vectors).flatten()


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
