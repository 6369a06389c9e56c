"""The global model as a safetensors file, so that a restart goes on from it.

FedML saves no model and starts every run from the one that the user's script builds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from craft_adapters._files import write_atomically
from craft_adapters.errors import CheckpointError, OptionError

__all__ = ["read_model", "write_model"]


def write_model(path: Path, state: Mapping[str, Any]) -> None:
    """Write all entries under their own names, atomically: the old file or the new one."""
    entries = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    write_atomically(path, save(entries))


def read_model(path: Path, current: Mapping[str, Any]) -> OrderedDict[str, Any] | None:
    """The saved model, in the order of ``current``; None if there is no file yet.

    Raises:
        CheckpointError: not readable, or not of the model ``current``; names the entry.
        OptionError: ``current`` has entries that are no tensors, which the file cannot hold.
    """
    for name, value in current.items():
        if not isinstance(value, torch.Tensor):
            raise OptionError(
                f"craft_model_path: the model's entry {name!r} is a {type(value).__name__}, and "
                "the file holds tensors only; leave craft_model_path out and save the model "
                "yourself"
            )
    if not path.exists():
        return None
    try:
        saved = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from error
    for name in [*current, *saved]:
        if name not in saved or name not in current or saved[name].shape != current[name].shape:
            raise CheckpointError(
                f"{path}: a checkpoint of another model: entry {name!r} is missing, foreign or of "
                "another shape; give craft_model_path a new name or move the file away"
            )
    return OrderedDict((name, saved[name]) for name in current)
