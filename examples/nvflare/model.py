"""The model, for the server and the sites."""

import torch
from torch import nn


class Net(nn.Module):
    """Digits of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)  # the server builds the first global model from this class
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)
        )

    def forward(self, x):
        return self.layers(x)
