"""The convolutional network with two convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from ._checks import check_image_shape, check_num_classes

_KERNEL = 5
_CHANNELS = 64


def _side_after_one_stage(side: int) -> int:
    """Side of the image after an unpadded convolution and 2x2 pooling."""
    return (side - _KERNEL + 1) // 2


class CNN(nn.Module):
    """Two 5x5 convolutions with 64 channels and pooling, then linear layers 384-192-classes.

    The CNN of CRAFT's CIFAR-10 experiments, after the two-convolution network of McMahan et al.,
    "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017
    (https://arxiv.org/abs/1602.05629). The convolutions are not padded: for 3x32x32 inputs and
    10 classes the layers have 4,864; 102,464; 614,784; 73,920 and 1,930 parameters.

    Args:
        num_classes: Number of outputs.
        input_shape: (channels, height, width) of one image, at least 16 x 16.
        dropout: Rates on the convolutional features, ahead of ``fc1``, and on the outputs of
            ``fc1``. CRAFT's authors state the two rates; the places are this package's choice.

    Shape:
        (N, C, H, W) in the parameters' floating dtype -> logits (N, num_classes) in the same
        dtype.

    Raises:
        ValueError: ``input_shape`` is not (C, H, W) or too small for two convolutions, a dropout
            rate is not in [0, 1], or there is no class.

    Example:
        >>> import torch
        >>> CNN(input_shape=(1, 28, 28))(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        input_shape: Sequence[int] = (3, 32, 32),
        dropout: tuple[float, float] = (0.2, 0.5),
    ) -> None:
        super().__init__()
        check_num_classes("cnn", num_classes)
        channels, *sides = check_image_shape("cnn", input_shape)
        height, width = (_side_after_one_stage(_side_after_one_stage(side)) for side in sides)
        if min(height, width) < 1:
            raise ValueError(
                f"cnn: images must be at least 16 x 16 for two 5x5 convolutions with 2x2 pooling, "
                f"got {sides[0]} x {sides[1]} (height x width)"
            )
        self.conv1 = nn.Conv2d(channels, _CHANNELS, _KERNEL)
        self.conv2 = nn.Conv2d(_CHANNELS, _CHANNELS, _KERNEL)
        self.dropout1 = nn.Dropout(dropout[0])
        self.fc1 = nn.Linear(_CHANNELS * height * width, 384)
        self.dropout2 = nn.Dropout(dropout[1])
        self.fc2 = nn.Linear(384, 192)
        self.fc3 = nn.Linear(192, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (N, num_classes), of a batch of images (N, C, H, W)."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout1(x.flatten(1))
        x = self.dropout2(F.relu(self.fc1(x)))
        x = F.relu(self.fc2(x))
        logits: Tensor = self.fc3(x)
        return logits
