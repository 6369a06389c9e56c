"""What our aggregate() is compared with, and the exact check of what came out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from federations import Federation
from torch import Tensor


def published_rule(
    federation: Federation, reference: Mapping[str, Tensor], server_lr: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """CRAFT as its formula is published: u = r + U^+ (rho - U r), with a pseudo-inverse by SVD.

    Returns:
        The new state, and the step u per entry, flat.
    """
    shares = federation.shares.to(torch.float32)
    new, steps = {}, {}
    for group in federation.layout.groups:
        base = flat(federation.state, group.entries)
        rows = torch.stack([base - flat(u.values, group.entries) for u in federation.updates])
        # In place, to its favour: at 5,000,000 x 100 each copy is another 2 GB.
        rows /= torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        past = flat(reference, group.entries).to(torch.float32)
        past = past / torch.linalg.vector_norm(past)
        step = past + torch.linalg.pinv(rows) @ (shares - rows @ past)
        del rows
        sizes = [federation.state[entry].numel() for entry in group.entries]
        moved = base - server_lr * step
        for entry, part, value in zip(
            group.entries, step.split(sizes), moved.split(sizes), strict=True
        ):
            steps[entry] = part
            new[entry] = value.view(federation.state[entry].shape)
    return new, steps


def fedml_list(federation: Federation) -> list[tuple[int, dict[str, Tensor]]]:
    """The clients as FedML's server has them: (examples, state dict).

    Copies of the dicts, because FedML overwrites the first one's entries; the tensors are the same.
    """
    return [(int(u.num_examples), dict(u.values)) for u in federation.updates]


def fedml_average(clients: list[tuple[int, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """FedML 0.9.6's averaging, the loop of `fedml/ml/aggregator/agg_operator.py`.

    Overwrites the first client's dict, as FedML does.
    """
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


def miss(federation: Federation, steps: Mapping[str, Tensor]) -> float:
    """By how much a step misses its targets: the largest |U g - rho| / max(rho) of all groups.

    In float64 from the values as given, one client at a time: a second matrix would not fit.
    """
    shares = federation.shares
    worst = 0.0
    for group in federation.layout.groups:
        base = flat(federation.state, group.entries).to(torch.float64)
        step = flat(steps, group.entries).to(torch.float64)
        for update, share in zip(federation.updates, shares.tolist(), strict=True):
            row = base - flat(update.values, group.entries)
            inner = float(row @ step) / float(torch.linalg.vector_norm(row))
            error = abs(inner - share)
            # max() would drop a NaN.
            worst = error if not error <= worst else worst
    return worst / float(shares.max())


def flat(values: Mapping[str, Tensor], entries: Iterable[str]) -> Tensor:
    """Entries of a group laid end to end."""
    return torch.cat([values[entry].reshape(-1) for entry in entries])
