"""Small federations for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from craft_adapters.simulation import (
    Dataset,
    Federation,
    LocalTraining,
    Split,
    dirichlet_partition,
    load_digits,
    train_test_split,
)


class Point(nn.Module):
    """A model that is one vector: every input gets the same output."""

    def __init__(self, start: Sequence[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), -1)


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().sum(1)


def quadratics(targets: Sequence[Sequence[float]], **training: Any) -> Federation:
    """One client per target a_k, one example each, loss F_k(w) = 1/2 |w - a_k|^2."""
    count = len(targets)
    y = torch.tensor(targets, dtype=torch.float64)
    data = Dataset("quadratics", torch.zeros(count, 1), y, 1)
    own = [np.array([k]) for k in range(count)]
    split = Split(own, [np.array([], dtype=np.int64)] * count)
    model = Point([0.0] * y.shape[1])
    settings = LocalTraining(**{"engine": "loop", **training})
    return Federation(data, split, model, settings, seed=0, loss=half_square)


def digits(
    model: nn.Module, *, device: torch.device | str = "cpu", clients: int = 12, **training: Any
) -> Federation:
    """Some digits in very unequal parts."""
    whole = load_digits()
    data = Dataset("some digits", whole.x[:600], whole.y[:600], 10).to(device)
    parts = dirichlet_partition(data.y, num_clients=clients, alpha=0.2, min_size=3, seed=1)
    split = train_test_split(parts, seed=1)
    return Federation(data, split, model, LocalTraining(**training), seed=5)
