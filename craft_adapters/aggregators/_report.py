"""What a report says about each layer group, from Gram matrices and the rule's answer."""

from __future__ import annotations

import itertools
import math
import operator

import torch
from torch import Tensor

from .._contract import ClientId, GroupReport
from ..projection import Cosines
from ._grams import Combination, Grams

__all__ = ["group_reports"]

# A cosine below this is negative, not orthogonal and rounded.
_NEGATIVE = -1e-12


def group_reports(
    grams: Grams, combination: Combination, step_norms: Tensor, inner: Tensor
) -> tuple[GroupReport, ...]:
    """What happened in each of q groups.

    Args:
        grams: Of these groups.
        combination: What the rule answered.
        step_norms: (q,) Lengths of the steps.
        inner: (q, m) Inner products u_i . g.
    """
    ids: list[ClientId] = [client.client_id for client in grams.clients]
    active = combination.active
    cosines = Cosines(grams.products, torch.where(active, 1.0 / grams.norms, 0.0))
    conflicts = torch.zeros(len(grams.groups), dtype=torch.int64)
    for part in cosines.parts():
        conflicts[part] = (cosines.of(part) < _NEGATIVE).sum((-2, -1)) // 2
    opposed = (inner < _NEGATIVE * step_norms.clamp(min=1e-300).unsqueeze(-1)) & active
    along_memory = (grams.memory_products * combination.weights).sum(-1)
    along_memory += grams.memory_norms.square() * combination.memory_weights
    cosine = along_memory / (grams.memory_norms * step_norms)
    cosine = cosine.where(combination.memory_weights != 0, torch.nan)
    residuals: list[float] | list[None] = [None] * len(grams.groups)
    if combination.targets is not None:
        residuals = (inner - combination.targets).abs().where(active, 0.0).amax(-1).tolist()
    solution, notes = combination.solution, combination.notes
    ranks = (solution.rank if solution else active.sum(-1)).tolist()
    lows = _finite(solution.eigenvalue_min if solution else None, grams)
    highs = _finite(solution.eigenvalue_max if solution else None, grams)
    consensus = _finite(combination.consensus, grams)
    rows = zip(
        grams.groups,
        grams.widths.tolist(),
        active.tolist(),
        conflicts.tolist(),
        opposed.tolist(),
        residuals,
        _finite(cosine, grams),
        step_norms.tolist(),
        strict=True,
    )
    reports = []
    for q, (group, width, flags, before, against, residual, along, norm) in enumerate(rows):
        reports.append(
            GroupReport(
                name=group.name,
                width=int(width),
                clients=tuple(itertools.compress(ids, flags)),
                inactive=tuple(itertools.compress(ids, map(operator.not_, flags))),
                conflicts_before=before,
                conflicts_after=tuple(itertools.compress(ids, against)),
                residual=residual if any(flags) else None,
                cosine_to_reference=along,
                step_norm=norm,
                eigenvalue_min=lows[q],
                eigenvalue_max=highs[q],
                rank=ranks[q],
                consensus=consensus[q],
                note=notes.get(q, ""),
            )
        )
    return tuple(reports)


def _finite(values: Tensor | None, grams: Grams) -> list[float | None]:
    """Per group; None for what is not finite, or was not computed."""
    if values is None:
        return [None] * len(grams.groups)
    return [number if abs(number) < math.inf else None for number in values.tolist()]
