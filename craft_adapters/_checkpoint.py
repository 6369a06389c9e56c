"""Nested dicts of tensors and plain numbers as one safetensors file, written atomically."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ._files import write_atomically
from .errors import CheckpointError

FORMAT = "craft-adapters state 1"


def write(path: Path, rule: str, state: Mapping[str, Any]) -> None:
    """Write a state, with a digest of its contents, atomically."""
    tensors: dict[str, torch.Tensor] = {}
    tree = _lift(state, tensors)
    contents = json.dumps(tree)
    header = {"format": FORMAT, "rule": rule, "state": contents}
    header["digest"] = _digest(contents, tensors)
    write_atomically(path, save(tensors, metadata=header))


def read(path: Path, rule: str) -> dict[str, Any]:
    """The state in ``path``; tensors on the CPU. Raises CheckpointError whatever is wrong."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from error
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a state of an aggregation rule ({FORMAT!r})")
    if header.get("rule") != rule:
        raise CheckpointError(f"{path}: state of rule {header.get('rule')!r}, not {rule!r}")
    try:
        if header["digest"] != _digest(header["state"], tensors):
            raise ValueError("its digest does not fit")
        tree = json.loads(header["state"])
        state = _lower(tree, tensors)
        if not isinstance(state, dict):
            raise ValueError("not a dict")
        return state
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its contents are damaged ({error})") from error


def _digest(contents: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of the table of contents and of all numbers."""
    digest = hashlib.sha256(contents.encode())
    for name in sorted(tensors):
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _lift(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON for ``value``; each tensor moves to ``tensors`` and leaves ``{"tensor": key}`` behind.

    A tensor goes under a running number: an entry's own name may hold any character, and two
    branches may use the same one.
    """
    if isinstance(value, torch.Tensor):
        key = str(len(tensors))
        tensors[key] = value.detach().cpu().contiguous()
        return {"tensor": key}
    if isinstance(value, Mapping):
        return {"dict": {str(key): _lift(inner, tensors) for key, inner in value.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"a state holds tensors and plain numbers only, got {type(value).__name__}")


def _lower(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    (kind, content), *rest = value.items()
    if rest or kind not in ("tensor", "dict", "value"):
        raise ValueError(f"unexpected node {sorted(value)}")
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _lower(inner, tensors) for key, inner in content.items()}
    return content
