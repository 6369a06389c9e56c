"""The oracle itself, by the definition of the step and not by its formula."""

from __future__ import annotations

import numpy as np
import pytest

from .oracle import after, step


@pytest.mark.parametrize(("count", "width"), [(1, 4), (3, 8), (6, 6)])
def test_the_step_meets_the_targets_and_is_the_closest_that_does(count: int, width: int) -> None:
    generator = np.random.default_rng(count)
    rows = generator.normal(size=(count, width))
    shares = generator.uniform(1, 5, size=count)
    previous = generator.normal(size=width)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    g = step(rows, shares, previous)
    assert np.allclose(units @ g, shares / shares.sum(), atol=1e-12)
    # Closest: g - r has no part in the null space of U.
    away = g - previous / np.linalg.norm(previous)
    _, _, right = np.linalg.svd(units)
    assert np.abs(right[count:] @ away).max(initial=0.0) < 1e-12


def test_the_model_moves_towards_the_clients() -> None:
    assert np.allclose(after([0.0, 0.0], [[1.0, 0.0], [0.0, 3.0]], [1, 3]), [0.25, 0.75])
