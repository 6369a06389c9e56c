"""Random crop and flip of a whole batch at once, on the device that holds it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["PADDING", "crop_flip"]

PADDING = 4


def crop_flip(images: Tensor, shifts: Tensor, flips: Tensor) -> Tensor:
    """Shift each image and mirror some: the usual augmentation of CIFAR.

    The same as padding by 4 zeros, cropping to the old size at ``shifts`` and then flipping left
    and right. The caller draws the numbers, so that they do not depend on the device.

    Args:
        images: Shape (b, channels, height, width), floating.
        shifts: int64, shape (b, 2), corner of the crop, 0..8 for each axis; 4 is the middle.
        flips: bool, shape (b,).

    Returns:
        A new tensor like ``images``.

    Example:
        >>> image = torch.arange(4.0).view(1, 1, 2, 2)
        >>> crop_flip(image, torch.tensor([[4, 5]]), torch.tensor([True])).flatten().tolist()
        [0.0, 1.0, 0.0, 3.0]
    """
    count, _, height, width = images.shape
    padded = F.pad(images, (PADDING,) * 4)
    across = torch.arange(width, device=images.device).expand(count, -1)
    across = torch.where(flips[:, None], across.flip(1), across)
    rows = shifts[:, 0, None] + torch.arange(height, device=images.device)
    columns = shifts[:, 1, None] + across
    image = torch.arange(count, device=images.device)
    # Index arrays around a slice put their axes first.
    cropped = padded[image[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2).contiguous()
