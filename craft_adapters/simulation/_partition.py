"""Who holds which examples, and who takes part in a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ._streams import CLIENTS, PARTITION, SURVIVORS, TRAIN_TEST, VALIDATION, generator, integer

__all__ = [
    "IndexArray",
    "Split",
    "count_clients",
    "dirichlet_partition",
    "hold_out",
    "iid_partition",
    "sample_clients",
    "surviving_clients",
    "train_test_split",
    "writer_partition",
]

IndexArray = npt.NDArray[np.int64]


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
    labels = _one_per_example("labels", labels)
    num_clients = integer("num_clients", num_clients, at_least=1)
    min_size = integer("min_size", min_size, at_least=0)
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"alpha must be a finite number > 0, got {alpha}")
    if num_clients * min_size > len(labels):
        raise ValueError(
            f"{num_clients} clients with at least {min_size} examples each need "
            f"{num_clients * min_size} examples, but there are {len(labels)}; "
            "lower num_clients or min_size"
        )
    rng = generator(seed, PARTITION)
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


def iid_partition(num_examples: int, *, num_clients: int, seed: int) -> list[IndexArray]:
    """Split a data set over clients at random, in parts whose sizes differ by one at the most.

    Args:
        num_examples: Number of examples n.
        num_clients: Number of clients, 1..n: each gets at least one example.
        seed: Non-negative. Same seed, same split.

    Returns:
        Per client the sorted indices of its examples, int64. Each of 0..n-1 is in exactly one.

    Raises:
        ValueError: an argument out of its range.
        TypeError: an argument is not an integer.

    Example:
        >>> [len(part) for part in iid_partition(10, num_clients=3, seed=0)]
        [4, 3, 3]
    """
    num_clients = integer("num_clients", num_clients, at_least=1)
    num_examples = integer("num_examples", num_examples, at_least=0)
    if num_clients > num_examples:
        raise ValueError(f"{num_clients} clients cannot share {num_examples} examples")
    order = generator(seed, PARTITION).permutation(num_examples).astype(np.int64)
    return [np.sort(part) for part in np.array_split(order, num_clients)]


def writer_partition(
    writers: npt.ArrayLike | torch.Tensor, *, num_clients: int | None = None, seed: int
) -> list[IndexArray]:
    """One client per writer: the examples that one person wrote.

    Args:
        writers: One writer per example, shape (n,), of any type that can be sorted.
        num_clients: How many writers to draw; None takes all. The examples of a writer who is not
            drawn are in no part.
        seed: Non-negative. Same seed, same draw.

    Returns:
        Per client, in the order of the writers, the sorted indices of its examples, int64.

    Raises:
        ValueError: there are fewer writers than ``num_clients``, or ``writers`` is not
            one-dimensional.
        TypeError: a count or the seed is not an integer.

    Example:
        >>> [part.tolist() for part in writer_partition(["b", "a", "b"], seed=0)]
        [[1], [0, 2]]
    """
    names, owner = np.unique(_one_per_example("writers", writers), return_inverse=True)
    chosen = np.arange(len(names))
    if num_clients is not None:
        num_clients = integer("num_clients", num_clients, at_least=1)
        if num_clients > len(names):
            raise ValueError(f"{num_clients} clients need as many writers; there are {len(names)}")
        chosen = np.sort(generator(seed, PARTITION).permutation(len(names))[:num_clients])
    parts = np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1])
    return [parts[writer].astype(np.int64) for writer in chosen]


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
        indices = generator(seed, TRAIN_TEST, client).permutation(_indices(client, part))
        size = round(test_fraction * len(indices))
        size = max(1, min(size, len(indices) - 1)) if len(indices) > 1 else 0
        split.test.append(np.sort(indices[:size]))
        split.train.append(np.sort(indices[size:]))
    return split


def hold_out(
    examples: npt.ArrayLike, fraction: float, *, client: int, seed: int
) -> tuple[IndexArray, IndexArray]:
    """Part of a client's training examples to train on, and a part to choose settings by.

    Args:
        examples: Indices of the client's training examples.
        fraction: Share that is held out, rounded down.
        client: The client's position.
        seed: Non-negative. Same seed, same part, in every round.

    Returns:
        ``(kept, held_out)``, both sorted.

    Example:
        >>> kept, held = hold_out(range(19), 0.1, client=0, seed=0)
        >>> len(kept), len(held)
        (18, 1)
    """
    order = generator(seed, VALIDATION, client).permutation(_indices(client, examples))
    size = int(Fraction(str(float(fraction))) * len(order))
    return np.sort(order[size:]), np.sort(order[:size])


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
    num_clients = integer("num_clients", num_clients, at_least=1)
    per_round = integer("per_round", per_round, at_least=1)
    if per_round > num_clients:
        raise ValueError(f"cannot draw per_round={per_round} of num_clients={num_clients} clients")
    rng = generator(seed, CLIENTS, integer("round", round, at_least=0))
    drawn: list[int] = np.sort(rng.permutation(num_clients)[:per_round]).tolist()
    return drawn


def count_clients(num_clients: int, wanted: int | float) -> int:
    """How many clients a number or a share of them is, at least 1.

    A share is taken at its decimal value: 0.29 of 100 is 29, where a float product rounded down
    is 28 and 0.07 of 100 rounded up is 8.

    Args:
        num_clients: Number of clients there are.
        wanted: A count (int, 1..num_clients) or a share (float, above 0, at most 1).

    Raises:
        ValueError: a count or a share out of its range.

    Example:
        >>> count_clients(100, 0.29), count_clients(100, 7), count_clients(5, 0.1)
        (29, 7, 1)
    """
    if isinstance(wanted, float):
        if not 0 < wanted <= 1:
            raise ValueError(f"a share of clients must be above 0 and at most 1, got {wanted}")
        return _share(num_clients, Fraction(str(wanted)))
    if not 1 <= wanted <= num_clients:
        raise ValueError(f"a number of clients must be in 1..{num_clients}, got {wanted}")
    return wanted


def surviving_clients(
    clients: Sequence[int], drop_rate: float, *, round: int, seed: int
) -> list[int]:
    """The drawn clients that answer: ``drop_rate`` of them do not, but one always does.

    Args:
        clients: The clients drawn for this round.
        drop_rate: Share of them that is lost, at least 0 and below 1; see :func:`count_clients`.
        round: The round's number, from 0.
        seed: Non-negative. Same seed, same survivors.

    Returns:
        In the order given.

    Raises:
        ValueError: ``drop_rate`` is out of its range.

    Example:
        >>> len(surviving_clients(range(10), 0.9, round=0, seed=0))
        1
    """
    if not 0 <= drop_rate < 1:
        raise ValueError(f"drop_rate must be at least 0 and below 1, got {drop_rate}")
    # Not 1 - drop_rate: in floats 1 - 0.9 is less than 0.1.
    keep = _share(len(clients), 1 - Fraction(str(float(drop_rate))))
    order = generator(seed, SURVIVORS, round).permutation(len(clients))
    return [clients[i] for i in np.sort(order[:keep])]


def _share(count: int, share: Fraction) -> int:
    return max(1, round(share * count))


def _one_per_example(name: str, values: npt.ArrayLike | torch.Tensor) -> npt.NDArray[Any]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    values = np.asarray(values)
    if values.ndim != 1:
        raise ValueError(f"{name} must have shape (n,), one label per example; got {values.shape}")
    return values


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


def _indices(client: int, part: npt.ArrayLike) -> IndexArray:
    indices = np.asarray(part)
    if indices.ndim != 1:
        raise ValueError(f"parts[{client}] must be one-dimensional, got shape {indices.shape}")
    # An empty list is float64 to numpy.
    if indices.size and not np.issubdtype(indices.dtype, np.integer):
        raise TypeError(f"parts[{client}] must hold integer indices, got {indices.dtype}")
    return indices.astype(np.int64)
