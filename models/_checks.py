"""Checks of arguments that all models share."""

from __future__ import annotations

from collections.abc import Sequence


def check_num_classes(model: str, num_classes: int) -> None:
    """Raise ValueError unless there is at least one class."""
    if num_classes < 1:
        raise ValueError(f"{model}: num_classes must be at least 1, got {num_classes}")


def check_shape(model: str, input_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape as a tuple; raise ValueError if it is empty or has a size below 1."""
    shape = tuple(input_shape)
    if not shape or min(shape) < 1:
        raise ValueError(
            f"{model}: input_shape must be the sizes of one example, without the batch, "
            f"each at least 1; got {shape}"
        )
    return shape


def check_image_shape(model: str, input_shape: Sequence[int]) -> tuple[int, int, int]:
    """Return (channels, height, width); raise ValueError if the shape is not of that form."""
    shape = check_shape(model, input_shape)
    if len(shape) != 3:
        raise ValueError(
            f"{model}: input_shape must be (channels, height, width), got {shape}; "
            "a grayscale image has 1 channel, e.g. (1, 28, 28)"
        )
    channels, height, width = shape
    return channels, height, width
