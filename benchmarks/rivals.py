"""What our aggregate() is compared with: each from the same state dicts to a new model.

A function here does what is not timed and returns the call that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from federations import Federation
from oracle import flat
from torch import Tensor

from craft_adapters import AggregationResult, Aggregator

State = dict[str, Tensor]
Clients = list[tuple[int, State]]
Call = Callable[[], Any]


def ours(federation: Federation, aggregator: Aggregator) -> Callable[[], AggregationResult]:
    """CRAFT as this package does it, in the round after the one ``aggregator`` is in."""
    return partial(aggregator.aggregate, federation.state, federation.updates)


def fedml(federation: Federation) -> Callable[[], State]:
    """FedML 0.9.6's averaging."""
    # Copies of the dicts, because FedML overwrites the first one's entries; the tensors are the
    # same.
    return partial(
        _fedml_average, [(int(u.num_examples), dict(u.values)) for u in federation.updates]
    )


def _fedml_average(clients: Clients) -> State:
    """The loop of FedML 0.9.6's ``fedml/ml/aggregator/agg_operator.py``; overwrites, as it does."""
    total = sum(examples for examples, _ in clients)
    _, average = clients[0]
    for entry in average:
        for position, (examples, values) in enumerate(clients):
            weight = examples / total
            if position == 0:
                average[entry] = values[entry] * weight
            else:
                average[entry] += values[entry] * weight
    return average


def mean(federation: Federation) -> Callable[[], State]:
    """The shortest average there is: ``torch.stack(...).mean(0)``, all clients alike."""
    values = [u.values for u in federation.updates]
    return lambda: {entry: torch.stack([v[entry] for v in values]).mean(0) for entry in values[0]}


def published(
    federation: Federation, reference: Mapping[str, Tensor], server_lr: float = 0.1
) -> Callable[[], tuple[State, State]]:
    """CRAFT as its formula is published: u = r + U^+ (rho - U r), with a pseudo-inverse by SVD.

    The call returns the new state, and the step u per entry, flat.
    """
    shares = federation.shares.to(federation.device, torch.float32)

    def call() -> tuple[State, State]:
        new: State = {}
        steps: State = {}
        for group in federation.layout.groups:
            base, rows = _differences(federation, group.entries)
            # In place, to its favour: at 5,000,000 x 100 each copy is another 2 GB.
            rows /= torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            past = flat(reference, group.entries).to(torch.float32)
            past = past / torch.linalg.vector_norm(past)
            step = past + torch.linalg.pinv(rows) @ (shares - rows @ past)
            del rows
            moved = base - server_lr * step
            new.update(_split(federation, group.entries, moved))
            steps.update(_split(federation, group.entries, step))
        return new, steps

    return call


def torchjd(federation: Federation, columns: int | None = None) -> Callable[[], Tensor]:
    """TorchJD's ConFIG, on the whole model as one matrix, or on its first columns."""
    from torchjd.aggregation import ConFIG

    return partial(_whole_model, federation, ConFIG(), columns)


def conflictfree(federation: Federation, columns: int | None = None) -> Callable[[], Tensor]:
    """ConFIG by its authors' package, on the same matrix."""
    from conflictfree.grad_operator import ConFIG_update

    return partial(_whole_model, federation, ConFIG_update, columns)


def _whole_model(
    federation: Federation, rule: Callable[[Tensor], Tensor], columns: int | None
) -> Tensor:
    base, rows = _differences(federation, federation.entries)
    return base[:columns] - rule(rows[:, :columns])


def _differences(federation: Federation, entries: Iterable[str]) -> tuple[Tensor, Tensor]:
    """The global values of some entries, flat, and the clients' differences from them."""
    entries = list(entries)
    base = flat(federation.state, entries)
    return base, torch.stack([base - flat(u.values, entries) for u in federation.updates])


def _split(
    federation: Federation, entries: Iterable[str], values: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """A group's numbers entry by entry, each in its shape."""
    shapes = {entry: federation.state[entry].shape for entry in entries}
    parts = torch.split(values, [shape.numel() for shape in shapes.values()])
    return ((entry, part.view(shapes[entry])) for entry, part in zip(shapes, parts, strict=True))
