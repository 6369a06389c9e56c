"""What several rules share: common options, plain steps, what counts as rounding noise."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Literal, TypedDict, TypeVar

import torch
from torch import Tensor, distributed

from .._layout import Layout
from ..errors import OptionError
from ._gram_rule import GramRule
from ._grams import Combination, Grams

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "EPS64",
    "NOISE",
    "Common",
    "cancelled",
    "cutoff",
    "plain_step",
    "shows_common_options",
    "within",
]

Rule = TypeVar("Rule", bound=GramRule)

# Rounding noise that a sum which cancels may leave, in units of the rounding of its terms.
NOISE = 8.0
EPS64 = torch.finfo(torch.float64).eps


class Common(TypedDict, total=False):
    """Options of every :class:`GramRule`, for rules that pass them on as they are."""

    layout: Layout | None
    on_nonfinite: Literal["drop", "raise"]
    device: str | torch.device
    block_bytes: int | None
    process_group: ProcessGroup | None


def shows_common_options(rule: type[Rule]) -> type[Rule]:
    """Put the options of every rule into the signature of one that takes ``**common``.

    Options are listed, checked and read from configuration files by the signature.

    >>> @shows_common_options
    ... class Rule(GramRule):
    ...     def __init__(self, *, step: float = 1.0, **common: "Unpack[Common]") -> None: ...
    >>> list(inspect.signature(Rule).parameters)[:3]
    ['step', 'granularity', 'layout']
    """
    own = inspect.signature(rule.__init__).parameters
    everyones = inspect.signature(
        GramRule.__init__, eval_str=True, locals={"ProcessGroup": distributed.ProcessGroup}
    ).parameters
    merged = {**own, **{name: each for name, each in everyones.items() if name not in own}}
    # Keyword options all, so their order is free.
    rule.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each for each in merged.values() if each.kind is inspect.Parameter.KEYWORD_ONLY]
    )
    return rule


def within(option: str, value: float, low: float, high: float, *, ends: str = "[]") -> None:
    """Raise OptionError unless a number lies in an interval whose ends are [closed] or (open).

    >>> within("beta", 1.0, 0, 1, ends="[)")
    Traceback (most recent call last):
    craft_adapters.errors.OptionError: beta must be a number in [0, 1), got 1.0
    """
    above = value > low or (value == low and ends[0] == "[")
    below = value < high or (value == high and ends[1] == "]")
    if not (above and below and math.isfinite(value)):
        interval = f"{ends[0]}{low:g}, {high:g}{ends[1]}"
        raise OptionError(f"{option} must be a number in {interval}, got {value!r}")


def plain_step(
    grams: Grams,
    weights: Tensor,
    *,
    memory_weight: float = 0.0,
    rate: float | Tensor = 1.0,
    noise: Tensor | None = None,
) -> Combination:
    """The model moves by ``rate`` times the combination as it is; all that moved have a say.

    Args:
        grams: What the rule was given.
        weights: (q, m), or (m,) for the same in all groups, on the clients.
        memory_weight: On the memory row.
        rate: One for all groups, or (q,).
        noise: (q,) See :class:`Combination`; zero if None.
    """
    zero = torch.zeros(len(grams.groups), dtype=torch.float64)
    return Combination(
        weights=weights.expand_as(grams.norms),
        memory_weights=zero + memory_weight,
        active=grams.norms > 0,
        lengths=torch.full_like(zero, torch.nan),
        rates=zero + rate,
        noise=zero if noise is None else noise,
    )


def cancelled(grams: Grams, weights: Tensor) -> Tensor:
    """(q,) Length that rounding may leave of a step that ought to be zero.

    Args:
        grams: What the rule was given.
        weights: (q, m) on the clients, or (q, m + k) with the past updates.
    """
    norms = grams.all_products.diagonal(dim1=-2, dim2=-1).sqrt()
    return NOISE * grams.rounding * (weights.abs() * norms[:, : weights.shape[-1]]).sum(-1)


def cutoff(grams: Grams) -> Tensor:
    """(q,) Relative size of eigenvalues of cosine matrices that mean nothing; see ``solve``.

    Float32 rows that ought to be equal differ by its eps, so their difference has eps^2 in the
    Gram matrix; what float64 itself loses there is the lower limit.
    """
    return grams.rounding.square().clamp(min=4 * EPS64)
