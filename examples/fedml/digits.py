"""scikit-learn's digits as FedML wants a data set, and a model: the user's own part."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def load(args: Any) -> tuple[list[Any], int]:
    """FedML's list of eight, and the number of classes. Each client holds few digits."""
    x, y = load_digits(return_X_y=True)
    order = np.argsort(y, kind="stable")  # a run of neighbours holds one or two digits
    features = torch.tensor(x[order] / 16, dtype=torch.float32)
    labels = torch.tensor(y[order])

    def loader(indices: torch.Tensor) -> DataLoader:
        return DataLoader(TensorDataset(features[indices], labels[indices]), args.batch_size)

    parts = torch.arange(len(labels)).tensor_split(args.client_num_in_total)
    train = {k: loader(part[part % 5 != 0]) for k, part in enumerate(parts)}
    test = {k: loader(part[part % 5 == 0]) for k, part in enumerate(parts)}
    counts = {k: int((part % 5 != 0).sum()) for k, part in enumerate(parts)}
    everything = torch.arange(len(labels))
    all_train, all_test = everything[everything % 5 != 0], everything[everything % 5 == 0]
    data = [
        len(all_train),
        len(all_test),
        loader(all_train),
        loader(all_test),
        counts,
        train,
        test,
        10,
    ]
    return data, 10


def new_model(classes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes))
