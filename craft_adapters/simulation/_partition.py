"""Who holds which examples, and who takes part in a round."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Split", "dirichlet_partition", "sample_clients", "train_test_split"]

IndexArray = npt.NDArray[np.int64]

# One stream of random numbers per purpose: with the same seed for everything, the clients drawn
# in a round still have nothing to do with the split.
_PARTITION, _TRAIN_TEST, _CLIENTS = range(3)


class Split(NamedTuple):
    """Each client's training and test examples, as sorted index arrays (int64)."""

    train: list[IndexArray]
    test: list[IndexArray]


def dirichlet_partition(
    labels: npt.ArrayLike | torch.Tensor,
    *,
    num_clients: int,
    alpha: float,
    min_size: int = 10,
    seed: int,
) -> list[IndexArray]:
    """Split a data set over clients so that each class is spread unevenly.

    For each class the clients' shares are drawn from Dirichlet(alpha, ..., alpha): a small alpha
    gives a class to few clients, a large one spreads it evenly. Clients left with fewer than
    ``min_size`` examples then get examples, drawn at random, from whichever client is largest
    at that moment. So it always ends, where drawing again until the sizes fit may not.

    Args:
        labels: One label per example, shape (n,), of any type that can be sorted.
        num_clients: Number of clients, at least 1.
        alpha: Concentration, any finite number > 0.
        min_size: Examples that each client has at the least; 0 allows empty clients.
        seed: Non-negative. Same seed, same split.

    Returns:
        Per client the sorted indices of its examples, int64. Each of 0..n-1 is in exactly one.

    Raises:
        ValueError: ``num_clients * min_size > n``, labels that are not one-dimensional, or an
            argument out of its range.
        TypeError: a count or the seed is not an integer.

    Example:
        >>> parts = dirichlet_partition([0] * 50 + [1] * 50, num_clients=3, alpha=0.1, seed=0)
        >>> sum(map(len, parts)), min(map(len, parts)) >= 10
        (100, True)
    """
    if isinstance(labels, torch.Tensor):
        labels = labels.detach().cpu().numpy()
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise ValueError(f"labels must have shape (n,), one label per example; got {labels.shape}")
    num_clients = _integer("num_clients", num_clients, at_least=1)
    min_size = _integer("min_size", min_size, at_least=0)
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"alpha must be a finite number > 0, got {alpha}")
    if num_clients * min_size > len(labels):
        raise ValueError(
            f"{num_clients} clients with at least {min_size} examples each need "
            f"{num_clients * min_size} examples, but there are {len(labels)}; "
            "lower num_clients or min_size"
        )
    rng = _generator(seed, _PARTITION)
    classes, class_of = np.unique(labels, return_inverse=True)
    owner = np.zeros(len(labels), dtype=np.int64)
    for c in range(len(classes)):
        members = rng.permutation(np.flatnonzero(class_of == c))
        counts = _round_to(len(members), _dirichlet(alpha, num_clients, rng), rng)
        owner[members] = np.repeat(np.arange(num_clients), counts)
    _fill_up(owner, num_clients, min_size, rng)
    sizes = np.bincount(owner, minlength=num_clients)
    by_owner = np.argsort(owner, kind="stable").astype(np.int64)
    return np.split(by_owner, np.cumsum(sizes)[:-1])


def train_test_split(
    parts: Sequence[npt.ArrayLike], *, test_fraction: float = 0.2, seed: int
) -> Split:
    """Split each client's own examples into training and test examples.

    A client with two or more examples gets at least one of each. One with a single example
    trains on it and has no test data; one with none has neither. Their arrays are empty, and
    ``craft_adapters.metrics`` counts such clients as left out instead of scoring them 0. A
    client's split depends on the seed, its position and its own examples, on no other client.

    Args:
        parts: Per client the indices of its examples.
        test_fraction: Share of the examples to test on, between 0 and 1, both excluded.
        seed: Non-negative. Same seed, same split.

    Returns:
        ``(train, test)``, each with one array per client in the order of ``parts``.

    Raises:
        ValueError: ``test_fraction`` or ``seed`` out of range, or a part not one-dimensional.
        TypeError: a part holds something other than integers.

    Example:
        >>> train, test = train_test_split([range(10), [10, 11], [12]], seed=0)
        >>> [len(part) for part in train], [len(part) for part in test]
        ([8, 1, 1], [2, 1, 0])
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must be between 0 and 1, got {test_fraction}")
    split = Split([], [])
    for client, part in enumerate(parts):
        indices = _generator(seed, _TRAIN_TEST, client).permutation(_indices(client, part))
        size = round(test_fraction * len(indices))
        size = max(1, min(size, len(indices) - 1)) if len(indices) > 1 else 0
        split.test.append(np.sort(indices[:size]))
        split.train.append(np.sort(indices[size:]))
    return split


def sample_clients(num_clients: int, per_round: int, *, round: int, seed: int) -> list[int]:
    """Draw the clients of one round, each equally likely, none twice.

    The draw depends on ``seed`` and ``round`` only, not on earlier rounds: a run that is resumed
    meets the same clients as one that was never stopped.

    Args:
        num_clients: Number of clients there are, at least 1.
        per_round: How many to draw, 1..num_clients.
        round: The round's number, from 0.
        seed: Non-negative. Same seed, same clients.

    Returns:
        Positions in 0..num_clients-1, ascending.

    Raises:
        ValueError: an argument out of its range.
        TypeError: an argument is not an integer.

    Example:
        >>> sample_clients(4, 4, round=0, seed=0)
        [0, 1, 2, 3]
    """
    num_clients = _integer("num_clients", num_clients, at_least=1)
    per_round = _integer("per_round", per_round, at_least=1)
    if per_round > num_clients:
        raise ValueError(f"cannot draw per_round={per_round} of num_clients={num_clients} clients")
    rng = _generator(seed, _CLIENTS, _integer("round", round, at_least=0))
    drawn: list[int] = np.sort(rng.permutation(num_clients)[:per_round]).tolist()
    return drawn


def _dirichlet(alpha: float, size: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Shares from Dirichlet(alpha, ..., alpha): finite, sum 1, for any alpha > 0.

    Gamma(alpha) = Gamma(alpha + 1) * U^(1/alpha) (Marsaglia & Tsang 2000), kept as a logarithm:
    the plain draws all underflow to zero when alpha is small, and the shares become 0/0. With the
    largest subtracted the limits come out right: one client takes all, or all get the same.
    """
    alpha = min(max(alpha, 1e-300), 1e300)  # beyond, the logarithms would overflow
    log_gamma = np.log(rng.standard_gamma(alpha + 1.0, size)) + np.log1p(-rng.random(size)) / alpha
    gamma = np.exp(log_gamma - log_gamma.max())
    shares: npt.NDArray[np.float64] = gamma / gamma.sum()
    return shares


def _round_to(
    total: int, shares: npt.NDArray[np.float64], rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Whole numbers with the given sum, each less than 1 away from ``total * share``.

    Rounding the running sum alone would favour the same clients in every class. A random offset
    makes each count right on average. It also keeps the sums away from whole numbers, where the
    last bit of a logarithm, which differs between machines, would decide.
    """
    edges = np.floor(np.cumsum(shares) * total + rng.random()).astype(np.int64)
    edges = np.minimum(edges, total)
    edges[-1] = total
    return np.diff(edges, prepend=0)


def _fill_up(owner: IndexArray, num_clients: int, min_size: int, rng: np.random.Generator) -> None:
    """Move examples, in place, from the largest client to those under ``min_size``.

    While one client is below the minimum the mean is not, so the largest is above it: a giver
    never becomes a taker, and each client's stock has to be shuffled only once.
    """
    sizes = np.bincount(owner, minlength=num_clients)
    stock: dict[int, Any] = {}
    for taker in np.flatnonzero(sizes < min_size):
        while sizes[taker] < min_size:
            giver = int(sizes.argmax())
            if giver not in stock:
                stock[giver] = iter(rng.permutation(np.flatnonzero(owner == giver)))
            owner[next(stock[giver])] = taker
            sizes[giver] -= 1
            sizes[taker] += 1


def _generator(seed: int, *key: int) -> np.random.Generator:
    """An independent stream of random numbers for each seed and key."""
    entropy = _integer("seed", seed, at_least=0)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy, spawn_key=key)))


def _integer(name: str, value: SupportsIndex, *, at_least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {number}")
    return number


def _indices(client: int, part: npt.ArrayLike) -> IndexArray:
    indices = np.asarray(part)
    if indices.ndim != 1:
        raise ValueError(f"parts[{client}] must be one-dimensional, got shape {indices.shape}")
    # An empty list is float64 to numpy.
    if indices.size and not np.issubdtype(indices.dtype, np.integer):
        raise TypeError(f"parts[{client}] must hold integer indices, got {indices.dtype}")
    return indices.astype(np.int64)
