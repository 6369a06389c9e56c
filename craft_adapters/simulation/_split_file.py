"""A partition as a JSON file: what a run saves beside its figures, and what it can start from."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._files import write_atomically
from ..errors import OptionError
from ._partition import IndexArray, Split, train_test_split

__all__ = ["load_split", "save_split"]


def save_split(split: Split, path: str | os.PathLike[str]) -> None:
    """Write a split as ``{"train": [[...], ...], "test": [[...], ...]}``, one list per client."""
    lists = {name: [part.tolist() for part in parts] for name, parts in split._asdict().items()}
    write_atomically(Path(path), json.dumps(lists, separators=(",", ":")).encode())


def load_split(
    path: str | os.PathLike[str], num_examples: int, *, test_fraction: float = 0.2, seed: int
) -> Split:
    """Read who holds which examples from a file.

    Args:
        path: JSON. Either an object with "train" and "test", as :func:`save_split` writes, or a
            list with one list of indices per client, which is then split within each client.
        num_examples: Number of examples in the data set.
        test_fraction: As in :func:`train_test_split`, for a file without a test part.
        seed: As in :func:`train_test_split`, for a file without a test part.

    Raises:
        OptionError: the file is missing or no JSON of that form, or an index is out of range or
            used twice; says which.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise OptionError(f"index file {path}: cannot be read as JSON ({error})") from error
    if isinstance(content, dict) and content.keys() == {"train", "test"}:
        train, test = (_parts(path, content[name], name) for name in ("train", "test"))
        if len(train) != len(test):
            raise OptionError(
                f"index file {path}: {len(train)} clients in train but {len(test)} in test"
            )
        _check(path, [*train, *test], num_examples)
        return Split(train, test)
    parts = _parts(path, content, "")
    _check(path, parts, num_examples)
    return train_test_split(parts, test_fraction=test_fraction, seed=seed)


def _parts(path: Path, content: Any, where: str) -> list[IndexArray]:
    if not isinstance(content, list) or not content:
        raise OptionError(
            f"index file {path}: expected one list of indices per client, alone or under "
            f"'train' and 'test'{f'; {where!r} holds none' if where else ''}"
        )
    parts = []
    for client, part in enumerate(content):
        # Not left to numpy: it would take true for 1 and round nothing.
        if not isinstance(part, list) or any(type(index) is not int for index in part):
            place = f"client {client} of {where!r}" if where else f"client {client}"
            raise OptionError(f"index file {path}: {place} is no list of whole numbers")
        parts.append(np.sort(np.array(part, dtype=np.int64)))
    return parts


def _check(path: Path, parts: Sequence[npt.NDArray[np.int64]], num_examples: int) -> None:
    together = np.concatenate(parts)
    outside = together[(together < 0) | (together >= num_examples)]
    if len(outside):
        raise OptionError(
            f"index file {path}: index {outside[0]} is outside 0..{num_examples - 1}, "
            "the examples of the data set"
        )
    values, counts = np.unique(together, return_counts=True)
    if len(values) < len(together):
        twice = values[counts > 1][0]
        raise OptionError(f"index file {path}: index {twice} is used more than once")
