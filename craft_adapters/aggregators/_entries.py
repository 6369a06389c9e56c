"""Saved states with a tensor per entry or client: what is written, checks on what is read."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from .._contract import ClientId
from ..errors import CheckpointError

__all__ = [
    "client_of",
    "cloned",
    "key_of",
    "read_count",
    "read_entries",
    "read_numbers",
    "read_round",
]


def cloned(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that later rounds do not change."""
    return {name: tensor.clone() for name, tensor in entries.items()}


def key_of(client: ClientId) -> str:
    """A client's key in a saved state, whose keys are text: 7 and "7" stay two clients."""
    return json.dumps(client)


def client_of(rule: str, key: str) -> ClientId:
    """The client of a key.

    Raises:
        CheckpointError: it is none.
    """
    try:
        client = json.loads(key)
    except (TypeError, ValueError):
        client = None
    if isinstance(client, bool) or not isinstance(client, int | str):
        raise CheckpointError(f"not a state of rule {rule!r}: {key!r} stands for no client")
    return client


def read_round(rule: str, state: Mapping[str, Any], known: Collection[str]) -> int:
    """The round counter of a state; 0 if it has none.

    Raises:
        CheckpointError: the state has keys that the rule does not know, or the counter is none.
    """
    if foreign := sorted(set(state) - set(known)):
        raise CheckpointError(f"not a state of rule {rule!r}: unknown keys {foreign}")
    return read_count(rule, state, "round")


def read_count(rule: str, state: Mapping[str, Any], key: str) -> int:
    """A whole number >= 0 of a state; 0 if it is missing."""
    number = state.get(key, 0)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise CheckpointError(
            f"not a state of rule {rule!r}: {key} must be a whole number, got {number!r}"
        )
    return number


def read_numbers(rule: str, state: Mapping[str, Any], key: str) -> dict[str, float]:
    """The finite numbers >= 0 of a state under a key, by name; none if the key is missing."""
    table = state.get(key, {})
    if not isinstance(table, Mapping) or not all(
        isinstance(value, float) and 0 <= value < math.inf for value in table.values()
    ):
        raise CheckpointError(
            f"not a state of rule {rule!r}: {key} must hold finite numbers >= 0, got {table!r}"
        )
    return dict(table)


def read_entries(
    rule: str,
    state: Mapping[str, Any],
    key: str,
    seen: Mapping[str, Tensor],
    *,
    device: torch.device,
    least: float = -torch.inf,
) -> dict[str, Tensor]:
    """Copies of a state's tensors under a key, flat, on a device; none if the key is missing.

    Args:
        rule: The rule's name, for messages.
        state: The state.
        key: Where the tensors are.
        seen: What the rule remembers now: if anything, the state must be of the same model.
        device: Where the copies go.
        least: The smallest value allowed.

    Raises:
        CheckpointError: something else is there, numbers that are not finite or too small, or
            tensors of another model.
    """
    entries = state.get(key, {})
    if not isinstance(entries, Mapping) or not all(
        isinstance(value, Tensor) and value.is_floating_point() for value in entries.values()
    ):
        raise CheckpointError(f"not a state of rule {rule!r}: {key} must hold a tensor per entry")
    flat = {name: value.detach().reshape(-1) for name, value in entries.items()}
    for name, value in flat.items():
        if not bool((torch.isfinite(value) & (value >= least)).all()):
            raise CheckpointError(f"{key} of entry {name!r} holds numbers that it cannot hold")
        if seen and (name not in seen or seen[name].numel() != value.numel()):
            raise CheckpointError(f"{key} of entry {name!r} is of another model than the one seen")
    return {name: value.to(device, copy=True) for name, value in flat.items()}
