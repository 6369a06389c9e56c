"""The models of the paper's experiments: an MLP, a CNN and three CIFAR ResNets.

>>> from craft_adapters.models import available_models, get_model
>>> available_models()
('mlp', 'cnn', 'resnet20', 'resnet56', 'resnet110')
>>> sum(p.numel() for p in get_model("resnet20").parameters())
269722
"""

from __future__ import annotations

from ._cnn import CNN
from ._mlp import MLP
from ._registry import available_models, get_model
from ._resnet import ResNet

__all__ = ["CNN", "MLP", "ResNet", "available_models", "get_model"]
