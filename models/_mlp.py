"""The multilayer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from ._checks import check_num_classes, check_shape


class MLP(nn.Module):
    """A multilayer perceptron: flatten, hidden layers with ReLU, a linear output.

    The two hidden layers of 200 are the "2NN" of McMahan et al., "Communication-efficient
    learning of deep networks from decentralized data", AISTATS 2017
    (https://arxiv.org/abs/1602.05629); the paper's FEMNIST experiment uses it.

    Args:
        num_classes: Number of outputs.
        input_shape: Sizes of one example, without the batch; any number of dimensions.
        hidden: Widths of the hidden layers. An empty sequence gives multinomial logistic
            regression.

    Shape:
        (N, *input_shape) in the parameters' floating dtype -> logits (N, num_classes) in the
        same dtype.

    Raises:
        ValueError: A size, a width or the number of classes is below 1.

    Example:
        >>> import torch
        >>> MLP(input_shape=(1, 28, 28), hidden=(32,))(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        input_shape: Sequence[int] = (3, 32, 32),
        hidden: Sequence[int] = (200, 200),
    ) -> None:
        super().__init__()
        check_num_classes("mlp", num_classes)
        shape = check_shape("mlp", input_shape)
        if any(width < 1 for width in hidden):
            raise ValueError(f"mlp: hidden widths must be at least 1, got {tuple(hidden)}")
        widths = (math.prod(shape), *hidden)
        self.hidden = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (N, num_classes), of a batch (N, *input_shape)."""
        x = x.flatten(1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        logits: Tensor = self.head(x)
        return logits
