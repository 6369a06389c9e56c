"""The step worked out by its formula in float64 numpy, and how the cases' inputs are built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from craft_adapters import ClientUpdate
from craft_adapters.aggregators import Craft

Vector = NDArray[np.float64]

_THRESHOLD = 1e-6  # a client whose update is shorter is inactive
_NO_REFERENCE = 1e-12  # a previous step that is shorter is none


def step(rows: ArrayLike, shares: ArrayLike, previous: ArrayLike | None = None) -> Vector:
    """g = r + U^+ (rho - U r) of one layer group, by a pseudo-inverse whose cut-off is 1e-12.

    Args:
        rows: (m, d) The clients' updates theta_t - theta_i.
        shares: (m,) Weights, in any unit; rho are the active clients' shares of their sum.
        previous: (d,) The step before, not normalised.
    """
    table = np.asarray(rows, np.float64)
    weights = np.asarray(shares, np.float64)
    norms = np.linalg.norm(table, axis=1)
    active = norms >= _THRESHOLD
    if not active.any():
        average: Vector = weights / weights.sum() @ table
        return average
    units = table[active] / norms[active, None]
    rho = weights[active] / weights[active].sum()
    reference = np.zeros(table.shape[1])
    if previous is not None:
        past = np.asarray(previous, np.float64).ravel()
        length = float(np.linalg.norm(past))
        if length > _NO_REFERENCE:
            reference = past / length
    g: Vector = reference + np.linalg.pinv(units, rcond=1e-12) @ (rho - units @ reference)
    return g


def after(
    theta: ArrayLike,
    clients: Sequence[ArrayLike],
    counts: ArrayLike,
    previous: ArrayLike | None = None,
    server_lr: float = 1.0,
) -> Vector:
    """theta - server_lr g, in theta's shape, for clients that sent their models."""
    origin = np.asarray(theta, np.float64)
    rows = np.stack([(origin - np.asarray(client, np.float64)).ravel() for client in clients])
    moved: Vector = origin - server_lr * step(rows, counts, previous).reshape(origin.shape)
    return moved


def put(values: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Numbers and lists of numbers as tensors of ``dtype``; tensors keep their own."""
    made: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            made[name] = value.to(device)
        elif isinstance(value, float | list):
            made[name] = torch.tensor(value, dtype=dtype, device=device)
        else:
            made[name] = value
    return made


def replies(
    clients: Sequence[Mapping[str, Any]],
    counts: Sequence[Any],
    device: torch.device,
    dtype: torch.dtype,
) -> list[ClientUpdate]:
    """The clients' models, with ids 0, 1, 2 ..."""
    return ClientUpdate.join([put(client, device, dtype) for client in clients], counts)


def rule(device: torch.device, **options: Any) -> Craft:
    """CRAFT that moves by g itself, so that the new model reads out the step."""
    return Craft(**{"server_lr": 1.0, "device": device, **options})


def with_previous(device: torch.device, reference: Mapping[str, Tensor]) -> Craft:
    """The same, with a previous step."""
    made = rule(device)
    made.load_state_dict({"reference": dict(reference)})
    return made


def numbers(value: Tensor) -> Vector:
    """A tensor as float64 numpy, flattened in index order."""
    flat: Vector = value.detach().cpu().double().reshape(-1).numpy()
    return flat


def near(got: Tensor, wanted: ArrayLike, atol: float = 1e-6) -> bool:
    """Whether a tensor is the wanted numbers, in index order, to an absolute tolerance."""
    return bool(
        np.allclose(numbers(got), np.asarray(wanted, np.float64).ravel(), rtol=0, atol=atol)
    )


def same_bits(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two states have the same names in the same order, and the same bits."""
    return list(first) == list(second) and all(
        value.dtype == second[name].dtype
        and value.shape == second[name].shape
        and torch.equal(
            value.cpu().contiguous().reshape(-1).view(torch.uint8),
            second[name].cpu().contiguous().reshape(-1).view(torch.uint8),
        )
        for name, value in first.items()
    )
