"""Small convex problems over weights that sum to one: float64, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["min_norm_in_box", "min_norm_point", "require", "simplex_projection"]

_EXTRA = "install it with: pip install 'craft-adapters[rules]'"


def simplex_projection(point: Tensor) -> Tensor:
    """The nearest weights, x >= 0 with sum 1, to a point (n,).

    With u the point in falling order and c its running sums, x = max(point + shift, 0) for
    shift = (1 - c_k) / k at the last k with u_k + (1 - c_k) / k > 0.

    >>> simplex_projection(torch.tensor([0.9, 0.8, 0.25], dtype=torch.float64))
    tensor([0.5500, 0.4500, 0.0000], dtype=torch.float64)
    """
    falling = point.sort(descending=True).values
    shifts = (1.0 - falling.cumsum(0)) / torch.arange(1, len(point) + 1, dtype=point.dtype)
    last = int((falling + shifts > 0).nonzero().amax())
    return (point + shifts[last]).clamp(min=0.0)


def min_norm_point(products: Tensor) -> Tensor:
    """Weights x >= 0 with sum 1 of the shortest combination of m vectors, by their Gram matrix.

    With P = R^T R, solves min |R y / s|^2 + (1 - sum y)^2 over y >= 0 and returns y / sum y: along
    each ray y = t x the cost is t^2 |R x|^2 / s^2 + (t - 1)^2, smallest on the ray of the solution.
    P may be singular; then the weights need not be unique, but the combination is.

    Args:
        products: P, (m, m), float64, not zero.

    >>> P = torch.tensor([[1.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    >>> min_norm_point(P)
    tensor([0.8000, 0.2000], dtype=torch.float64)
    """
    from scipy.optimize import nnls

    values, vectors = torch.linalg.eigh(products / products.diagonal().mean())
    root = values.clamp(min=0.0).sqrt().unsqueeze(-1) * vectors.mT
    size = len(products)
    matrix = torch.cat([root, torch.ones(1, size, dtype=torch.float64)])
    target = torch.zeros(size + 1, dtype=torch.float64)
    target[-1] = 1.0
    solution, _ = nnls(matrix.numpy(), target.numpy(), maxiter=30 * size + 100)
    weights = torch.from_numpy(solution)
    return weights / weights.sum()


def min_norm_in_box(products: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The same with low <= x <= high, (m,), of which sum low <= 1 <= sum high.

    >>> P = torch.tensor([[1.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    >>> min_norm_in_box(P, torch.tensor([0.0, 0.3]).double(), torch.tensor([1.0, 1.0]).double())
    tensor([0.7000, 0.3000], dtype=torch.float64)
    """
    import daqp
    import numpy as np

    size = len(low)
    one = np.ones(1)
    solution, _, flag, _ = daqp.solve(
        (products / products.diagonal().mean()).numpy(),
        np.zeros(size),
        np.ones((1, size)),
        np.concatenate([high.numpy(), one]),
        np.concatenate([low.numpy(), one]),
        np.array([0] * size + [5], dtype=np.int32),  # the sum is an equality
        primal_tol=1e-12,
    )
    if flag < 0:
        raise ArithmeticError(f"daqp found no weights for {size} vectors (exit flag {flag})")
    weights = torch.from_numpy(np.array(solution)).clamp(low, high)
    return weights / weights.sum()


def require(package: str) -> None:
    """Raise ImportError, naming the extra, unless a solver can be imported.

    Rules call this when they are made, so that nobody finds out after the first round.
    """
    try:
        __import__(package)
    except ImportError as error:
        raise ImportError(f"this rule needs {package}; {_EXTRA}") from error
