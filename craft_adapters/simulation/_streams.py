"""Random numbers by purpose: a stream for each seed and key, and no state to save.

With the same seed for everything, the clients drawn in a round still have nothing to do with the
split. A stream depends on its key only, never on what was drawn before: a run that is resumed
meets the same numbers as one that was never stopped.
"""

from __future__ import annotations

import operator
from typing import SupportsIndex

import numpy as np

__all__ = [
    "CLIENTS",
    "DROPOUT",
    "PARTITION",
    "SURVIVORS",
    "TRAINING",
    "TRAIN_TEST",
    "VALIDATION",
    "generator",
    "integer",
    "torch_seed",
]

# The numbers are part of every published run: new ones go to the end.
PARTITION, TRAIN_TEST, CLIENTS, SURVIVORS, TRAINING, DROPOUT, VALIDATION = range(7)


def generator(seed: int, *key: int) -> np.random.Generator:
    """An independent stream of random numbers for each seed and key, the same on any platform."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, key)))


def torch_seed(seed: int, *key: int) -> int:
    """A seed for a ``torch.Generator``, independent for each seed and key."""
    return int(_sequence(seed, key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def integer(name: str, value: SupportsIndex, *, at_least: int) -> int:
    """``value`` as an int; TypeError or ValueError names it."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {number}")
    return number


def _sequence(seed: int, key: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(integer("seed", seed, at_least=0), spawn_key=key)
