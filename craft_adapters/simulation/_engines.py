"""Two ways to train clients, with the same result to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ._augment import crop_flip
from ._batches import Batches
from ._datasets import Dataset
from ._dropout import Masks
from ._settings import LocalTraining

__all__ = ["Loss", "Task", "Trained", "Workshop", "train_loop", "train_many", "why_not_many"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""Outputs (b, ...) and targets (b, ...) -> one loss per example, (b,)."""

_ON_ACCELERATOR = 64
# Measured with the 200-200 MLP, 0.8 MB: about 8 clients at once are the fastest.
_CPU_CACHE = 7_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One model to train.

    Attributes:
        client: The client's position.
        start: The state to start from; not changed.
        batches: What to train it on.
        proximal: Strength of the pull to the anchor.
        seed: Of this training's own random numbers (dropout).
        examples: Number of different examples.
    """

    client: int
    start: Mapping[str, Tensor]
    batches: Batches
    proximal: float
    seed: int
    examples: int


class Trained(NamedTuple):
    """A model after its training.

    Attributes:
        client: The client's position.
        state: The model, on the federation's device.
        steps: Number of steps that it took.
        examples: Number of different examples that it was trained on.
    """

    client: int
    state: dict[str, Tensor]
    steps: int
    examples: int


@dataclass(frozen=True, slots=True, eq=False)
class Workshop:
    """What all tasks of a run share. ``model`` is overwritten by them."""

    model: nn.Module
    dataset: Dataset
    training: LocalTraining
    loss: Loss
    masks: Masks

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def device(self) -> torch.device:
        return self.dataset.x.device

    @property
    def width(self) -> int:
        """How many clients to train at once."""
        if self.training.parallel is not None:
            return self.training.parallel
        if self.device.type != "cpu":
            return _ON_ACCELERATOR
        size = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return max(2, _CPU_CACHE // size)

    def batch(
        self, indices: Tensor, shifts: Tensor | None, flips: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a flat batch of examples."""
        x = self.dataset.inputs(indices)
        if shifts is not None and flips is not None:
            x = crop_flip(x, shifts, flips)
        dtype = next(self.model.parameters()).dtype
        return x.to(dtype) if x.is_floating_point() else x, self.dataset.y[indices]


def train_loop(
    shop: Workshop, tasks: Sequence[Task], anchor: Mapping[str, Tensor], lr: float
) -> list[Trained]:
    """One client after the other, with the model as it is: works for any model."""
    return [_train_one(shop, task, anchor, lr) for task in tasks]


def _train_one(shop: Workshop, task: Task, anchor: Mapping[str, Tensor], lr: float) -> Trained:
    model, batches = shop.model, task.batches
    model.load_state_dict(task.start)
    model.train()
    params = shop.trainable
    pulls = _pulls(params, anchor, task.proximal)
    velocity = _velocity(params, shop.training)
    indices = torch.from_numpy(batches.indices).to(shop.device)
    shifts = None if batches.shifts is None else torch.from_numpy(batches.shifts).to(shop.device)
    flips = None if batches.flips is None else torch.from_numpy(batches.flips).to(shop.device)
    masks = shop.masks.generator(task.seed)
    with _own_random_numbers(task.seed, shop.device):
        for step, count in enumerate(batches.counts.tolist()):
            x, y = shop.batch(
                indices[step, :count],
                None if shifts is None else shifts[step, :count],
                None if flips is None else flips[step, :count],
            )
            for name, mask in shop.masks.draw(indices.shape[1], masks).items():
                layer, _, buffer = name.rpartition(".")
                setattr(model.get_submodule(layer), buffer, mask[:count])
            with _frozen_statistics(model, frozen=count == 1):
                loss = shop.loss(model(x), y).mean()
            grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
            _sgd(params, grads, pulls, velocity, shop.training, lr)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return Trained(task.client, state, len(batches), task.examples)


def train_many(
    shop: Workshop, tasks: Sequence[Task], anchor: Mapping[str, Tensor], lr: float
) -> list[Trained]:
    """Many clients at once: their models side by side in one tensor per entry.

    Clients are ordered by their number of steps, so that those still at work are always the first
    ones; a short batch is filled up with examples of weight zero.
    """
    if not tasks:
        return []
    order = sorted(range(len(tasks)), key=lambda i: -len(tasks[i].batches))
    width = shop.width
    chunks = [order[i : i + width] for i in range(0, len(order), width)]
    trained: dict[int, Trained] = {}
    for chunk in chunks:
        done = _train_chunk(shop, [tasks[i] for i in chunk], anchor, lr)
        trained.update(zip(chunk, done, strict=True))
    return [trained[i] for i in range(len(tasks))]


def _train_chunk(
    shop: Workshop, tasks: Sequence[Task], anchor: Mapping[str, Tensor], lr: float
) -> list[Trained]:
    device = shop.device
    steps = np.array([len(task.batches) for task in tasks])
    size = max(task.batches.indices.shape[1] for task in tasks)
    indices = _stack([task.batches.indices for task in tasks], steps, size, device)
    augmented = tasks[0].batches.shifts is not None
    shifts = flips = None
    if augmented:
        shifts = _stack([task.batches.shifts for task in tasks], steps, size, device)
        flips = _stack([task.batches.flips for task in tasks], steps, size, device)
    weights = _weights(tasks, steps, size, next(shop.model.parameters())).to(device)
    stacked = {name: torch.stack([task.start[name] for task in tasks]) for name in tasks[0].start}
    trainable = {name: stacked[name] for name in shop.trainable}
    proximal = torch.tensor([task.proximal for task in tasks], dtype=torch.float64)
    velocity = _velocity(trainable, shop.training)
    streams = [shop.masks.generator(task.seed) for task in tasks]
    shop.model.train()

    def forward(state: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(shop.model, state, (x,))
        return out

    together = vmap(forward)
    for step in range(int(steps.max(initial=0))):
        active = int((steps > step).sum())
        flat = indices[:active, step].reshape(-1)
        x, y = shop.batch(
            flat,
            None if shifts is None else shifts[:active, step].reshape(-1, 2),
            None if flips is None else flips[:active, step].reshape(-1),
        )
        x = x.view(active, size, *x.shape[1:])
        params = {
            name: value[:active].detach().requires_grad_() for name, value in trainable.items()
        }
        state = {name: value[:active] for name, value in stacked.items()} | params
        if shop.masks:
            state |= _draw_masks(shop.masks, tasks[:active], streams, size)
        out = together(state, x)
        losses = shop.loss(out.flatten(0, 1), y).view(active, size)
        # The clients' losses have nothing in common: the gradient of their sum is all gradients.
        loss = (losses * weights[:active, step]).sum()
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        pulls = _pulls(params, anchor, proximal[:active])
        moving = {name: value[:active] for name, value in velocity.items()}
        _sgd(params, grads, pulls, moving, shop.training, lr)
    return [
        Trained(
            task.client,
            {name: value[i] for name, value in stacked.items()},
            len(task.batches),
            task.examples,
        )
        for i, task in enumerate(tasks)
    ]


def why_not_many(model: nn.Module) -> str | None:
    """Why clients with this model cannot be trained at once; None if they can."""
    for name, module in model.named_modules():
        if getattr(module, "track_running_stats", False):
            return f"layer {name!r} ({type(module).__name__}) updates running statistics"
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"layer {name!r} ({type(module).__name__}) draws its own random numbers"
    named = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if len(named) > len(dict(model.named_parameters())):
        return "some of its parameters are tied"
    return None


# Strength of the pull: one number for the loop, one per client (m, 1, ...) for many.
_Pulls = Mapping[str, tuple[Tensor, "float | Tensor"]]


def _pulls(
    params: Mapping[str, Tensor], anchor: Mapping[str, Tensor], proximal: float | Tensor
) -> _Pulls:
    if not (proximal.any() if isinstance(proximal, Tensor) else proximal):
        return {}

    def strength(param: Tensor) -> float | Tensor:
        if not isinstance(proximal, Tensor):
            return proximal
        return proximal.to(param.device, param.dtype).view(-1, *[1] * (param.ndim - 1))

    return {name: (anchor[name], strength(p)) for name, p in params.items() if name in anchor}


def _velocity(params: Mapping[str, Tensor], training: LocalTraining) -> dict[str, Tensor]:
    """Momentum buffers, new for each training."""
    return {name: torch.zeros_like(p) for name, p in params.items()} if training.momentum else {}


@torch.no_grad()
def _sgd(
    params: Mapping[str, Tensor],
    grads: Sequence[Tensor | None],
    pulls: _Pulls,
    velocity: Mapping[str, Tensor],
    training: LocalTraining,
    lr: float,
) -> None:
    """One step of SGD, in place."""
    for (name, param), grad in zip(params.items(), grads, strict=True):
        if grad is None:  # a parameter that the loss does not depend on; it is still pulled
            grad = torch.zeros_like(param)
        if name in pulls:
            anchor, strength = pulls[name]
            grad = grad + strength * (param - anchor)
        if training.weight_decay:
            grad = grad.add(param, alpha=training.weight_decay)
        if name in velocity:
            grad = velocity[name].mul_(training.momentum).add_(grad)
        param.sub_(grad, alpha=lr)


@contextmanager
def _own_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """For layers that draw from torch's global generators; those are as before afterwards."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        # Not torch.manual_seed: it seeds every accelerator, and is slow where there is none.
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextmanager
def _frozen_statistics(model: nn.Module, *, frozen: bool) -> Iterator[None]:
    """Batch normalisation by its running statistics: one example has no variance of its own."""
    layers = [
        module
        for module in model.modules()
        if frozen and module.training and isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    for layer in layers:
        layer.eval()
    try:
        yield
    finally:
        for layer in layers:
            layer.train()


def _stack(
    arrays: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None],
    steps: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    size: int,
    device: torch.device,
) -> Tensor:
    """Clients' arrays (steps_i, size_i, ...) as one (m, steps, size, ...), padded at the ends."""
    kept = [array for array in arrays if array is not None]
    out = np.zeros((len(kept), int(steps.max(initial=0)), size, *kept[0].shape[2:]), kept[0].dtype)
    for i, array in enumerate(kept):
        out[i, : len(array), : array.shape[1]] = array
    return torch.from_numpy(out).to(device)


def _weights(
    tasks: Sequence[Task],
    steps: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    size: int,
    like: Tensor,
) -> Tensor:
    """(m, steps, size): 1 / count for examples, zero for padding."""
    weights = np.zeros((len(tasks), int(steps.max(initial=0)), size))
    for i, task in enumerate(tasks):
        counts = task.batches.counts[:, None]
        valid = np.arange(size)[None, :] < counts
        weights[i, : len(counts)] = valid / counts
    return torch.from_numpy(weights).to(like.dtype)


def _draw_masks(
    masks: Masks, tasks: Sequence[Task], streams: Sequence[torch.Generator], size: int
) -> dict[str, Tensor]:
    """One step's masks of many clients, (m, size, ...)."""

    def padded(mask: Tensor) -> Tensor:
        return torch.cat([mask, mask.new_zeros(size - len(mask), *mask.shape[1:])])

    drawn = [
        masks.draw(task.batches.indices.shape[1], stream)
        for task, stream in zip(tasks, streams, strict=False)
    ]
    return {name: torch.stack([padded(own[name]) for own in drawn]) for name in drawn[0]}
