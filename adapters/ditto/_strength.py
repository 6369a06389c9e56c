"""How strongly a personal model is pulled to the shared one: lambda."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from craft_adapters.errors import OptionError

__all__ = ["Strength"]


class Strength:
    """Lambda of each client: one number, a number per client, or a set to pick from.

    Attributes:
        choices: The set, in its order; empty unless lambda is picked.

    Raises:
        OptionError: a number that is negative or not finite, or an empty set.

    Example:
        >>> Strength(1).of(7), Strength({7: 0.5}).of(7), Strength([0.1, 1.0]).choices
        (1.0, 0.5, (0.1, 1.0))
    """

    def __init__(self, lam: float | Mapping[Any, float] | Sequence[float]) -> None:
        self.choices: tuple[float, ...] = ()
        self._by_client: dict[int, float] = {}
        self._fixed: float | None = None
        if isinstance(lam, Mapping):
            self._by_client = {_client(k): _number(v, f"lam of client {k}") for k, v in lam.items()}
        elif isinstance(lam, Sequence) and not isinstance(lam, str):
            self.choices = tuple(_number(v, "lam") for v in lam)
            if not self.choices:
                raise OptionError("lam: the set to pick from is empty")
        else:
            self._fixed = _number(lam, "lam")

    def of(self, client: int) -> float:
        """The client's lambda, where it is not picked.

        Raises:
            OptionError: lambda is given per client, but not for this one.
        """
        if self._fixed is not None:
            return self._fixed
        if client not in self._by_client:
            raise OptionError(f"lam: no value for client {client}")
        return self._by_client[client]


def _client(key: Any) -> int:
    try:
        return int(key)
    except (TypeError, ValueError):
        raise OptionError(f"lam: a client is its position, a whole number; got {key!r}") from None


def _number(value: Any, what: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise OptionError(f"{what} must be a finite number >= 0, got {value!r}")
    return number
