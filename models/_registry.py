"""Models by name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import torch
from torch import nn

from ._cnn import CNN
from ._mlp import MLP
from ._resnet import ResNet, check_norm

_WITHOUT_NORM: dict[str, type[MLP] | type[CNN]] = {"mlp": MLP, "cnn": CNN}
_RESNET_DEPTHS = {"resnet20": 20, "resnet56": 56, "resnet110": 110}


def available_models() -> tuple[str, ...]:
    """Return the names that :func:`get_model` knows.

    Example:
        >>> "cnn" in available_models()
        True
    """
    return (*_WITHOUT_NORM, *_RESNET_DEPTHS)


def get_model(
    name: str,
    *,
    num_classes: int = 10,
    input_shape: Sequence[int] = (3, 32, 32),
    norm: str = "group",
    seed: int | None = None,
) -> nn.Module:
    """Build a model of the paper's experiments, in training mode, on torch's default device.

    Args:
        name: One of :func:`available_models`.
        num_classes: Number of outputs.
        input_shape: Sizes of one example, without the batch: (channels, height, width) for the
            CNN (at least 16 x 16) and the ResNets, anything for the MLP.
        norm: Norm layer of the ResNets, "group" or "batch"; the others have none.
        seed: Seed of the initial weights. The same seed gives the same weights on every device,
            and torch's global generators stay as they are. Without it the weights are drawn
            from the global generator.

    Returns:
        A module that maps (N, *input_shape) to logits (N, num_classes); its parameters have
        torch's default dtype.

    Raises:
        ValueError: The name or the norm is unknown, the model has no norm layers to choose, or
            the model cannot be built for these inputs or this number of classes.

    Example:
        >>> model = get_model("mlp", num_classes=62, input_shape=(1, 28, 28), seed=0)
        >>> [tuple(p.shape) for p in model.parameters() if p.ndim == 2]
        [(200, 784), (200, 200), (62, 200)]
    """
    names = available_models()
    if name not in names:
        nearest = difflib.get_close_matches(name.lower(), names, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"unknown model {name!r}, available are {', '.join(names)}{hint}")
    check_norm(norm)
    if name in _WITHOUT_NORM and norm != "group":
        raise ValueError(f"model {name!r} has no norm layers, so norm={norm!r} cannot be applied")

    def build() -> nn.Module:
        if name in _WITHOUT_NORM:
            return _WITHOUT_NORM[name](num_classes=num_classes, input_shape=input_shape)
        depth = _RESNET_DEPTHS[name]
        return ResNet(depth, num_classes=num_classes, input_shape=input_shape, norm=norm)

    if seed is None:
        return build()
    default_device = torch.empty(0).device
    # Drawn on the CPU from its own generator: torch.manual_seed would also reseed every
    # accelerator, and accelerators draw other numbers from the same seed.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model = build()
    return model.to(default_device)
