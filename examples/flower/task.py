"""What both apps train: digits, spread over the clients with a strong skew."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from flwr.app import Context
from torch import Tensor, nn

from craft_adapters.simulation import dirichlet_partition, load_digits

LEARNING_RATE = 0.1
BATCH = 20
EPOCHS = 3


class Examples(NamedTuple):
    images: Tensor
    labels: Tensor


def new_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def own_examples(context: Context) -> tuple[Examples, Examples]:
    """What this client trains on, and what it tests on."""
    clients = int(context.node_config["num-partitions"])
    x, y, parts = _spread(clients)
    part = parts[int(context.node_config["partition-id"])]
    cut = len(part) // 5
    return Examples(x[part[cut:]], y[part[cut:]]), Examples(x[part[:cut]], y[part[:cut]])


def batches(examples: Examples) -> list[Examples]:
    pairs = zip(examples.images.split(BATCH), examples.labels.split(BATCH), strict=True)
    return [Examples(*pair) for pair in pairs] * EPOCHS


def step(
    model: nn.Module, batch: Examples, pull: float = 0.0, anchor: dict[str, Tensor] | None = None
) -> None:
    """One step of gradient descent, with a pull towards an anchor if there is one."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    loss = nn.functional.cross_entropy(model(batch.images), batch.labels)
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
            if anchor is not None:
                gradient = gradient + pull * (parameter - anchor[name])
            parameter -= LEARNING_RATE * gradient


def accuracy(model: nn.Module, examples: Examples) -> float:
    with torch.no_grad():
        guess = model(examples.images).argmax(1)
    return float((guess == examples.labels).float().mean())


@functools.cache
def _spread(clients: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    digits = load_digits()
    parts = dirichlet_partition(digits.y.numpy(), num_clients=clients, alpha=0.5, seed=0)
    return digits.x, digits.y, [torch.from_numpy(part) for part in parts]
