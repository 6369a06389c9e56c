"""Data sets, in memory, as two tensors."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import torch

__all__ = ["Dataset", "load_digits"]


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """A labelled data set. Clients are index arrays into it, see ``dirichlet_partition``.

    Attributes:
        name: What it is called in reports.
        x: Examples, float32, shape (n, channels, height, width), values in [0, 1].
        y: Labels, int64, shape (n,), values in 0..num_classes-1.
        num_classes: Number of classes.

    Raises:
        ValueError: ``x`` and ``y`` differ in length.
    """

    name: str
    x: torch.Tensor
    y: torch.Tensor
    num_classes: int

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(
                f"data set {self.name!r}: {len(self.x)} examples in x but {len(self.y)} labels in y"
            )

    def __len__(self) -> int:
        return len(self.y)


def load_digits() -> Dataset:
    """The 1797 handwritten digits, 8 x 8 pixels, that come with scikit-learn. No download.

    Returns:
        Shapes (1797, 1, 8, 8) and (1797,), 10 classes, in scikit-learn's order.

    Raises:
        ImportError: scikit-learn is missing.

    Example:
        >>> load_digits().x.shape
        torch.Size([1797, 1, 8, 8])
    """
    try:
        # By name: scikit-learn has no type information for a plain import to be checked against.
        bunch = import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise ImportError(
            f"load_digits needs scikit-learn ({error}): pip install 'craft-adapters[data]'"
        ) from error
    x = torch.from_numpy(bunch.images).to(torch.float32).div_(16.0).unsqueeze(1)
    return Dataset("digits", x, torch.from_numpy(bunch.target).to(torch.int64), num_classes=10)
