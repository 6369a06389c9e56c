"""How well, and how evenly, a model serves the clients of a federation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ._contract import ClientId

__all__ = ["ClientScores", "Fairness", "fairness", "per_client_accuracy"]


@dataclass(frozen=True, slots=True)
class Fairness:
    """The distribution of one figure, usually test accuracy, over the clients evaluated.

    All figures have the unit of what was given and are None if no client was evaluated.

    Attributes:
        mean_unweighted: Mean in which each client counts the same.
        std_unweighted: Population standard deviation (divisor n) around ``mean_unweighted``.
        mean_weighted: Mean in which each *example* counts the same. None without counts.
        std_weighted: Population standard deviation around ``mean_weighted``, with its weights.
        best10: Unweighted mean over the best 10 % of clients: k = max(1, ceil(n / 10)) of n.
        worst10: Unweighted mean over the worst 10 %, the same k.
        min: Worst client.
        max: Best client.
        num_evaluated: Number of clients with test data, n.
        num_left_out: Number of clients left out for want of test data.
    """

    mean_unweighted: float | None
    std_unweighted: float | None
    mean_weighted: float | None
    std_weighted: float | None
    best10: float | None
    worst10: float | None
    min: float | None
    max: float | None
    num_evaluated: int
    num_left_out: int


@dataclass(frozen=True, slots=True)
class ClientScores:
    """One model on many clients' test data, by client.

    Attributes:
        accuracy: Share of examples classified right, in [0, 1]; None without test data.
        loss: Mean cross-entropy in nats; None without test data.
        num_examples: Number of test examples.
    """

    accuracy: dict[ClientId, float | None]
    loss: dict[ClientId, float | None]
    num_examples: dict[ClientId, int]


def fairness(
    accuracies: Mapping[ClientId, float | None] | Iterable[float | None],
    num_examples: Mapping[ClientId, float] | Iterable[float] | None = None,
) -> Fairness:
    """Sum up per-client accuracies.

    A client whose accuracy is None or NaN, or whose ``num_examples`` is zero, has no test data:
    it is left out and counted as such, for a made-up 0 would pull everything down. The order of
    the clients does not change a bit of the result.

    Args:
        accuracies: By client id, or by position.
        num_examples: Number of *test* examples of each client, by the same ids or positions.

    Returns:
        See :class:`Fairness`. With nobody evaluated the figures are None, and a warning says so.

    Raises:
        ValueError: ids (or lengths) differ, an accuracy is infinite, or a count is negative, NaN
            or infinite; names the client.

    Example:
        >>> result = fairness({"a": 0.75, "b": 0.25, "c": None}, {"a": 30, "b": 10, "c": 0})
        >>> result.mean_unweighted, result.mean_weighted, result.num_left_out
        (0.5, 0.625, 1)
    """
    scores = _by_id(accuracies)
    counts = None if num_examples is None else _by_id(num_examples)
    if counts is not None and (lonely := sorted(map(repr, scores.keys() ^ counts.keys()))):
        raise ValueError(
            f"{len(scores)} clients have an accuracy and {len(counts)} have num_examples; "
            f"in one of the two only: {', '.join(lonely)}"
        )
    values: list[Fraction] = []
    weights: list[Fraction] = []
    for client, score in scores.items():
        weight = 1.0 if counts is None else _weight(client, counts[client])
        if score is None or math.isnan(score) or weight == 0:
            continue
        if math.isinf(score):
            raise ValueError(f"client {client!r}: accuracy must be finite, got {score}")
        values.append(Fraction(float(score)))
        weights.append(Fraction(weight))
    left_out = len(scores) - len(values)
    if not values:
        warnings.warn(
            f"fairness: none of the {len(scores)} clients has test data; all figures are None",
            RuntimeWarning,
            stacklevel=2,
        )
        return Fairness(None, None, None, None, None, None, None, None, 0, left_out)
    ranked = sorted(values)
    k = -(-len(ranked) // 10)  # ceil(n / 10) in integers, which no rounding can push over
    mean, std = _mean_and_std(values, [Fraction(1)] * len(values))
    weighted = (None, None) if counts is None else _mean_and_std(values, weights)
    return Fairness(
        mean_unweighted=mean,
        std_unweighted=std,
        mean_weighted=weighted[0],
        std_weighted=weighted[1],
        best10=float(sum(ranked[-k:]) / k),
        worst10=float(sum(ranked[:k]) / k),
        min=float(ranked[0]),
        max=float(ranked[-1]),
        num_evaluated=len(values),
        num_left_out=left_out,
    )


@torch.no_grad()
def per_client_accuracy(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    parts: Mapping[ClientId, npt.ArrayLike] | Sequence[npt.ArrayLike],
    *,
    batch_size: int = 1024,
    read: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> ClientScores:
    """Evaluate one classifier on many clients' test examples.

    All clients' examples go through the model in common batches, so a thousand clients with ten
    examples each cost ten batches, not a thousand. The model is in eval mode meanwhile; after
    that, also after an error, each module is back in the mode it was in. No gradients.

    Args:
        model: Maps a batch of examples to logits, shape (batch, num_classes).
        x: Examples of all clients, shape (n, ...), on any device.
        y: Labels, integers, shape (n,).
        parts: Per client the indices of its test examples, by client id or by position.
        batch_size: Examples per forward pass, at least 1. Batches go to the model's device.
        read: Indices of a batch, on the device of ``x``, -> what the model takes; None: ``x`` as
            it is.

    Returns:
        See :class:`ClientScores`.

    Raises:
        ValueError: ``x`` and ``y`` differ in length, or ``batch_size`` is below 1.
        IndexError: an index of a client is outside 0..n-1; names the client.

    Example:
        >>> x = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
        >>> y = torch.tensor([0, 0])
        >>> per_client_accuracy(nn.Identity(), x, y, {"a": [0], "b": [0, 1], "c": []}).accuracy
        {'a': 1.0, 'b': 0.5, 'c': None}
    """
    if len(x) != len(y):
        raise ValueError(f"{len(x)} examples in x but {len(y)} labels in y")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    by_id = parts if isinstance(parts, Mapping) else dict(enumerate(parts))
    indices = {client: _indices(client, part, len(x)) for client, part in by_id.items()}
    sizes = [len(part) for part in indices.values()]
    order = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *indices.values()]))
    parameter = next(model.parameters(), x)
    correct, loss = [np.empty(0)], [np.empty(0)]
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            rows = batch.to(x.device)
            inputs = x[rows] if read is None else read(rows)
            logits = model(inputs.to(parameter.device)).float()
            target = y[batch.to(y.device)].to(logits.device, torch.int64)
            correct.append((logits.argmax(1) == target).double().cpu().numpy())
            each = nn.functional.cross_entropy(logits, target, reduction="none")
            loss.append(each.double().cpu().numpy())
    finally:
        # One by one: model.train() would also wake the layers that were frozen in eval mode.
        for module, training in modes.items():
            module.training = training
    owner = np.repeat(np.arange(len(sizes)), sizes)

    def means(figures: list[npt.NDArray[np.float64]]) -> dict[ClientId, float | None]:
        sums = np.bincount(owner, np.concatenate(figures), minlength=len(sizes)).tolist()
        return {
            client: total / size if size else None
            for client, total, size in zip(indices, sums, sizes, strict=True)
        }

    return ClientScores(means(correct), means(loss), dict(zip(indices, sizes, strict=True)))


def _by_id(
    values: Mapping[ClientId, float | None] | Iterable[float | None],
) -> dict[ClientId, float | None]:
    return dict(values) if isinstance(values, Mapping) else dict(enumerate(values))


def _weight(client: ClientId, count: float | None) -> float:
    if count is None or not (math.isfinite(count) and count >= 0):
        raise ValueError(f"client {client!r}: num_examples must be finite and >= 0, got {count}")
    return float(count)


def _mean_and_std(values: Sequence[Fraction], weights: Sequence[Fraction]) -> tuple[float, float]:
    """Weighted mean and population standard deviation, rounded once, at the end.

    In exact arithmetic the order of the clients cannot matter, worst <= mean <= best holds to the
    last bit, clients that are all the same have a deviation of exactly zero, and the short formula
    for the variance loses nothing.
    """
    total = sum(weights)
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / total
    square = sum(w * v * v for w, v in zip(weights, values, strict=True)) / total
    return float(mean), math.sqrt(square - mean**2)


def _indices(client: ClientId, part: npt.ArrayLike, size: int) -> npt.NDArray[np.int64]:
    indices = np.asarray(part)
    if indices.ndim != 1 or (indices.size and not np.issubdtype(indices.dtype, np.integer)):
        raise ValueError(
            f"client {client!r}: test examples must be a one-dimensional array of integer "
            f"indices, got {indices.dtype} of shape {indices.shape}"
        )
    if indices.size and not (indices.min() >= 0 and indices.max() < size):
        raise IndexError(f"client {client!r}: indices must be in 0..{size - 1}, the length of x")
    return indices.astype(np.int64)
