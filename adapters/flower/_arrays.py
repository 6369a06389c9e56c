"""Flower's arrays under names, decoded when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from craft_adapters.errors import IncompatibleUpdate, OptionError

__all__ = ["Decoded", "are_positions", "checked_names", "under_names"]


class Decoded(Mapping[str, Tensor]):
    """One model, which stays as the bytes that arrived until an entry is asked for.

    Args:
        arrays: Entry name -> what the host has.
        decode: From that to a numpy array.

    Example:
        >>> import numpy as np
        >>> Decoded({"w": [1.0, 2.0]}, np.array)["w"]
        tensor([1., 2.], dtype=torch.float64)
    """

    def __init__(self, arrays: Mapping[str, Any], decode: Callable[[Any], Any]) -> None:
        self._arrays = arrays
        self._decode = decode

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self._decode(self._arrays[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def checked_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names of arrays in their order.

    Raises:
        OptionError: something that is no name, or a name twice.

    Example:
        >>> checked_names(torch.nn.Linear(2, 1).state_dict())
        ('weight', 'bias')
    """
    found = tuple([names] if isinstance(names, str) else names)
    if strange := [name for name in found if not isinstance(name, str)]:
        raise OptionError(
            f"names must be the arrays' names in their order, such as model.state_dict() or a "
            f"list of str; got a {type(strange[0]).__name__}"
        )
    if len(set(found)) < len(found):
        twice = sorted({name for name in found if found.count(name) > 1})
        raise OptionError(f"names: given twice: {', '.join(twice)}")
    return found


def are_positions(keys: Iterable[str]) -> bool:
    """Whether Flower made the keys up: it calls the arrays of a plain list "0", "1", ...

    Example:
        >>> are_positions(["0", "1"]), are_positions(["0.weight", "0.bias"])
        (True, False)
    """
    return all(key == str(position) for position, key in enumerate(keys))


def under_names(
    names: Sequence[str],
    arrays: Sequence[Any],
    decode: Callable[[Any], Any],
    model: Mapping[str, Tensor],
    client: int | str,
) -> dict[str, Any]:
    """A client's list of arrays as name -> array.

    Raises:
        IncompatibleUpdate: the list has another length than the model; names the client, and the
            first entry in whose place an array of another shape stands.
    """
    if len(arrays) == len(names):
        return dict(zip(names, arrays, strict=True))
    pairs = zip(names, arrays, strict=False)
    misfit = next((name for name, one in pairs if decode(one).shape != model[name].shape), None)
    hint = f"; where {misfit!r} belongs, an array of another shape stands" if misfit else ""
    raise IncompatibleUpdate(
        f"client {client!r}: {len(arrays)} arrays for the model's {len(names)} entries{hint}"
    )
