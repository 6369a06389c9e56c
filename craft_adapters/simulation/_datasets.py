"""Data sets, in memory, as two tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from ..errors import CraftError

__all__ = ["Dataset", "DatasetNotFound", "load_digits", "optional_import"]


class DatasetNotFound(CraftError, FileNotFoundError):
    """A data set's files are missing; says where they were looked for and how to get them."""


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """A labelled data set. Clients are index arrays into it, see ``dirichlet_partition``.

    Attributes:
        name: What it is called in reports.
        x: Examples, shape (n, ...), images as (n, channels, height, width): float32 with values
            as they are used, or uint8 pixels 0..255, a quarter of the memory. On any device.
        y: Labels, int64, shape (n,), values in 0..num_classes-1.
        num_classes: Number of classes.
        writers: Who made each example, int64, shape (n,); None if that is not known.
        mean: Per channel, what :meth:`inputs` subtracts from values in [0, 1]; empty: nothing.
        std: Per channel, what :meth:`inputs` divides by; empty: nothing.

    Raises:
        ValueError: ``x`` and ``y``, or ``writers``, differ in length.

    Example:
        >>> pixels = torch.tensor([[0, 255], [255, 0]], dtype=torch.uint8)
        >>> Dataset("two", pixels, torch.tensor([0, 1]), 2).inputs(torch.tensor([0]))
        tensor([[0., 1.]])
    """

    name: str
    x: torch.Tensor
    y: torch.Tensor
    num_classes: int
    writers: torch.Tensor | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(
                f"data set {self.name!r}: {len(self.x)} examples in x but {len(self.y)} labels in y"
            )
        if self.writers is not None and len(self.writers) != len(self.y):
            raise ValueError(
                f"data set {self.name!r}: {len(self.y)} labels in y but "
                f"{len(self.writers)} entries in writers"
            )

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of one example, without the batch."""
        return tuple(self.x.shape[1:])

    def to(self, device: torch.device | str) -> Dataset:
        """The same data set on another device."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    def inputs(self, indices: torch.Tensor) -> torch.Tensor:
        """A batch of examples as a model takes them, on the device of ``x``.

        Args:
            indices: int64, any shape (b,), on the device of ``x``.

        Returns:
            Shape (b, ...). Floats as they are; pixels as float32 in [0, 1]. Then standardised if
            the data set has a ``mean`` and ``std``.
        """
        batch = self.x[indices]
        if batch.dtype == torch.uint8:
            batch = batch.float().div_(255)
        if self.mean:
            shape = (-1, *[1] * (batch.ndim - 2))
            batch = batch - batch.new_tensor(self.mean).view(shape)
            batch = batch / batch.new_tensor(self.std).view(shape)
        return batch

    def standardised(self) -> Dataset:
        """The same data set with ``mean`` and ``std`` of each channel over all its examples.

        Example:
            >>> digits = load_digits().standardised()
            >>> abs(digits.inputs(torch.arange(len(digits))).mean()) < 1e-6
            tensor(True)
        """
        scale = 255.0 if self.x.dtype == torch.uint8 else 1.0
        dims = [d for d in range(self.x.ndim) if d != 1]
        count = self.x[:, 0].numel()
        total = torch.zeros(self.x.shape[1], dtype=torch.float64)
        square = total.clone()
        for part in torch.split(self.x, 4096):  # a float64 copy of all of it may not fit
            values = part.double()
            total += values.sum(dims).cpu()
            square += values.square().sum(dims).cpu()
        mean = total / count
        std = (square / count - mean.square()).clamp_min(0).sqrt()
        std[std == 0] = 1.0  # a channel that is constant becomes zero, not infinite
        return replace(self, mean=tuple((mean / scale).tolist()), std=tuple((std / scale).tolist()))


def load_digits() -> Dataset:
    """The 1797 handwritten digits, 8 x 8 pixels, that come with scikit-learn. No download.

    Returns:
        Shapes (1797, 1, 8, 8) and (1797,), 10 classes, in scikit-learn's order, values in [0, 1].

    Raises:
        ImportError: scikit-learn is missing.

    Example:
        >>> load_digits().x.shape
        torch.Size([1797, 1, 8, 8])
    """
    bunch = optional_import("sklearn.datasets", "scikit-learn", "data").load_digits()
    x = torch.from_numpy(bunch.images).to(torch.float32).div_(16.0).unsqueeze(1)
    return Dataset("digits", x, torch.from_numpy(bunch.target).to(torch.int64), num_classes=10)


def optional_import(module: str, package: str, extra: str) -> Any:
    """A module of an optional package, by name: such packages may have no type information.

    Raises:
        ImportError: names the package and the extra that installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this needs {package} ({error}): pip install 'craft-adapters[{extra}]'"
        ) from error
