"""Residual networks for small images, with GroupNorm or BatchNorm."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from ._checks import check_image_shape, check_num_classes

_WIDTHS = (16, 32, 64)
_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "group": lambda channels: nn.GroupNorm(1, channels),
    "batch": nn.BatchNorm2d,
}


def check_norm(norm: str) -> None:
    """Raise ValueError unless the norm layer is one of those offered."""
    if norm not in _NORMS:
        raise ValueError(f"norm must be one of {', '.join(map(repr, _NORMS))}; got {norm!r}")


def _conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    # The norm layer that follows has a bias, which would absorb the convolution's.
    return nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions around which the input is carried by a shortcut without parameters."""

    # A norm layer is declared right after its convolution: the aggregation's layer groups are
    # read off the order of the state dict.
    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_channels, out_channels, stride)
        self.norm1 = _NORMS[norm](out_channels)
        self.conv2 = _conv3x3(out_channels, out_channels)
        self.norm2 = _NORMS[norm](out_channels)
        self._stride = stride
        self._new_channels = out_channels - in_channels

    def _shortcut(self, x: Tensor) -> Tensor:
        if self._stride == 1 and not self._new_channels:
            return x
        x = x[:, :, :: self._stride, :: self._stride]
        before = self._new_channels // 2
        return F.pad(x, (0, 0, 0, 0, before, self._new_channels - before))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return F.relu(out + self._shortcut(x))


def _stage(in_channels: int, out_channels: int, blocks: int, norm: str) -> nn.Sequential:
    stride = 1 if in_channels == out_channels else 2
    first = _BasicBlock(in_channels, out_channels, stride, norm)
    rest = (_BasicBlock(out_channels, out_channels, 1, norm) for _ in range(blocks - 1))
    return nn.Sequential(first, *rest)


class ResNet(nn.Module):
    """The CIFAR ResNet of depth 6n + 2: three stages of n blocks with 16, 32 and 64 channels.

    After He et al., "Deep residual learning for image recognition", CVPR 2016, section 4.2
    (https://arxiv.org/abs/1512.03385): option-A shortcuts (subsampled, zero-padded channels, no
    parameters), global average pooling, one linear layer. Weights are drawn from He et al.'s
    normal distribution, N(0, 2 / fan_in) (https://arxiv.org/abs/1502.01852), biases are zero.
    With ``norm="group"`` every convolution is followed by ``GroupNorm(1, C)``, as in CRAFT's
    experiments: unlike BatchNorm it keeps no statistics of a client's data.

    Depths 20, 56 and 110 have 269,722, 853,018 and 1,727,962 parameters for 3-channel images and
    10 classes, with either norm.

    Args:
        depth: Number of layers with weights, 6n + 2 with n >= 1.
        num_classes: Number of outputs.
        input_shape: (channels, height, width) of one image; any height and width.
        norm: "group", or "batch" for BatchNorm with its running statistics (buffers).

    Shape:
        (N, C, H, W) in the parameters' floating dtype -> logits (N, num_classes) in the same
        dtype.

    Raises:
        ValueError: The depth is not 6n + 2, ``input_shape`` is not (C, H, W), there is no class,
            or the norm is unknown.

    Example:
        >>> import torch
        >>> ResNet(8, input_shape=(1, 28, 28))(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        depth: int,
        *,
        num_classes: int = 10,
        input_shape: Sequence[int] = (3, 32, 32),
        norm: str = "group",
    ) -> None:
        super().__init__()
        blocks, remainder = divmod(depth - 2, 6)
        if blocks < 1 or remainder:
            raise ValueError(
                f"resnet: depth must be 6n + 2 with n >= 1 (8, 14, 20, ...), got {depth}"
            )
        check_num_classes("resnet", num_classes)
        channels, _, _ = check_image_shape("resnet", input_shape)
        check_norm(norm)
        narrow, middle, wide = _WIDTHS
        self.conv1 = _conv3x3(channels, narrow)
        self.norm1 = _NORMS[norm](narrow)
        self.layer1 = _stage(narrow, narrow, blocks, norm)
        self.layer2 = _stage(narrow, middle, blocks, norm)
        self.layer3 = _stage(middle, wide, blocks, norm)
        self.fc = nn.Linear(wide, num_classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (N, num_classes), of a batch of images (N, C, H, W)."""
        x = F.relu(self.norm1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits
