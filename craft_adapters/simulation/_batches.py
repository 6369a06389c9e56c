"""Which examples a client trains on, step by step, and how they are shifted and mirrored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ._augment import PADDING
from ._partition import IndexArray
from ._settings import LocalTraining
from ._streams import TRAINING, generator

__all__ = ["Batches", "draw_batches"]


@dataclass(frozen=True, slots=True)
class Batches:
    """One client's steps. The last batch of an epoch may be short; it is filled up with padding.

    Attributes:
        indices: (steps, size) Examples of the data set; padding repeats an example.
        counts: (steps,) How many of a step's examples are no padding.
        shifts: (steps, size, 2) See ``crop_flip``; None without augmentation.
        flips: (steps, size)
    """

    indices: IndexArray
    counts: IndexArray
    shifts: IndexArray | None = None
    flips: npt.NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def head(self, steps: int) -> Batches:
        """The first steps only."""
        cut = [None if a is None else a[:steps] for a in (self.shifts, self.flips)]
        return Batches(self.indices[:steps], self.counts[:steps], *cut)  # type: ignore[arg-type]


def draw_batches(
    examples: IndexArray,
    training: LocalTraining,
    *,
    seed: int,
    round: int,
    client: int,
    stream: int = 0,
) -> Batches:
    """Draw a client's batches for a round: each epoch in a new order, no example twice in one.

    Args:
        examples: The client's training examples.
        training: Batch size, epochs or steps, augmentation.
        seed: The run's seed.
        round: The round's number.
        client: The client's position.
        stream: Another number gives another draw, for a second model trained in the same round.
    """
    count = len(examples)
    size = min(training.batch_size, count)
    per_epoch = -(-count // size) if count else 0
    steps = training.epochs * per_epoch if training.steps is None else training.steps
    if not count:
        steps = 0
    rng = generator(seed, TRAINING, stream, round, client)
    indices = np.zeros((steps, size), dtype=np.int64)
    counts = np.zeros(steps, dtype=np.int64)
    for first in range(0, steps, per_epoch or 1):
        order = examples[rng.permutation(count)]
        order = np.concatenate([order, np.repeat(order[:1], per_epoch * size - count)])
        wanted = min(per_epoch, steps - first)
        indices[first : first + wanted] = order.reshape(per_epoch, size)[:wanted]
        counts[first : first + wanted] = size
        if wanted == per_epoch:
            counts[first + wanted - 1] = count - (per_epoch - 1) * size
    if training.augment == "none":
        return Batches(indices, counts)
    shifts = rng.integers(0, 2 * PADDING + 1, (steps, size, 2))
    flips = rng.random((steps, size)) < 0.5
    return Batches(indices, counts, shifts, flips)
