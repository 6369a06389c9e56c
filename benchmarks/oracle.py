"""The exact check of what came out: everything in float64, from the values as given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from federations import Federation
from torch import Tensor

# Columns that the check of a Gram matrix sums at a time: short sums round less.
_COLUMNS = 1 << 13


def miss(federation: Federation, steps: Mapping[str, Tensor]) -> float:
    """By how much a step misses its targets: the largest |U g - rho| / max(rho) of all groups.

    One client at a time: a second matrix would not fit.
    """
    shares = federation.shares
    errors = []
    for group in federation.layout.groups:
        base = flat(federation.state, group.entries).to(torch.float64)
        step = flat(steps, group.entries).to(base)
        for update, share in zip(federation.updates, shares.tolist(), strict=True):
            row = base - flat(update.values, group.entries)
            inner = float(row @ step) / float(torch.linalg.vector_norm(row))
            errors.append(abs(inner - share))
    return _worst(errors) / float(shares.max())


def gram_error(federation: Federation, products: Tensor) -> float:
    """The largest |G - D D^T| / (|d_i| |d_j|) of all groups.

    Args:
        federation: The clients, in the order of the rows.
        products: (groups, clients, clients), float64, CPU.
    """
    errors = []
    for group, found in zip(federation.layout.groups, products, strict=True):
        base = flat(federation.state, group.entries)
        clients = [flat(update.values, group.entries) for update in federation.updates]
        exact = torch.zeros_like(found)
        for start in range(0, len(base), _COLUMNS):
            part = slice(start, start + _COLUMNS)
            rows = base[part].to(torch.float64) - torch.stack([c[part] for c in clients])
            exact += (rows @ rows.mT).cpu()
        norms = exact.diagonal().sqrt()
        errors.append(float(((found - exact) / torch.outer(norms, norms)).abs().max()))
    return _worst(errors)


def _worst(errors: list[float]) -> float:
    """The largest, or NaN if there is one, which max() would drop."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


def flat(values: Mapping[str, Tensor], entries: Iterable[str]) -> Tensor:
    """Entries of a group laid end to end: without a copy where it is one."""
    parts = [values[entry].reshape(-1) for entry in entries]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
