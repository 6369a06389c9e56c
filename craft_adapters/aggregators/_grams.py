"""What passes between :class:`GramRule` and its rules: Gram matrices, and weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from .._contract import ClientUpdate
from .._intake import Intake, real
from .._layout import Group, Layout
from ..projection import Cosines, Solution

__all__ = ["Combination", "Grams"]


@dataclass(frozen=True, slots=True)
class Grams:
    """All that a rule needs to know about a round's updates: small float64 tensors on the CPU.

    Of q groups, all or some, with m clients and k past updates:

    Attributes:
        groups: The q layer groups.
        buffers: Entries that are averaged or counted; a rule remembers nothing of them.
        clients: The m client updates, in the order of the rows.
        shares: (m,) Data shares p_i = n_i / sum n.
        past: The k past updates that the rule asked for; see :meth:`GramRule.past`.
        matrices: (q, m + k + 1, m + k + 1) Inner products of the clients' updates, the past
            updates and the memory row.
        exact: (q,) bool. Whether the products are good to float64 (else to float32).
        rounding: (q,) Unit roundoff of the clients' values: relative noise to expect in a row.
        widths: (q,) Number of coordinates.
        intake: What arrived, for a rule that keeps the clients' values.
    """

    groups: tuple[Group, ...]
    buffers: tuple[str, ...]
    clients: tuple[ClientUpdate, ...]
    shares: Tensor
    past: tuple[ClientUpdate, ...]
    matrices: Tensor
    exact: Tensor
    rounding: Tensor
    widths: Tensor
    intake: Intake

    @classmethod
    def empty(cls, intake: Intake, layout: Layout, past: tuple[ClientUpdate, ...]) -> Grams:
        """Of a layout's groups, to be filled in."""
        groups, size = layout.groups, len(intake.clients) + len(past) + 1
        counts = torch.tensor([c.num_examples for c in intake.clients], dtype=torch.float64)
        counts = counts / counts.max()  # the sum of huge counts stays finite
        widths = [sum(real(intake.state[e]).numel() for e in group.entries) for group in groups]
        return cls(
            groups=groups,
            buffers=(*layout.averaged, *layout.counted),
            clients=intake.clients,
            shares=counts / counts.sum(),
            past=past,
            matrices=torch.zeros(len(groups), size, size, dtype=torch.float64),
            exact=torch.ones(len(groups), dtype=torch.bool),
            rounding=torch.zeros(len(groups), dtype=torch.float64),
            widths=torch.tensor(widths, dtype=torch.float64),
            intake=intake,
        )

    def of(self, part: slice) -> Grams:
        """Those of some groups, in the same memory."""
        return replace(
            self,
            groups=self.groups[part],
            matrices=self.matrices[part],
            exact=self.exact[part],
            rounding=self.rounding[part],
            widths=self.widths[part],
        )

    @property
    def products(self) -> Tensor:
        """(q, m, m) Inner products of the clients' updates."""
        count = len(self.clients)
        return self.matrices[:, :count, :count]

    @property
    def all_products(self) -> Tensor:
        """(q, m + k, m + k) Inner products of the clients' and the past updates."""
        return self.matrices[:, :-1, :-1]

    @property
    def memory_products(self) -> Tensor:
        """(q, m) Inner products of the clients' updates with the memory row."""
        return self.matrices[:, : len(self.clients), -1]

    @property
    def memory_norms(self) -> Tensor:
        """(q,) Length of the memory row; zero without one."""
        return self.matrices[:, -1, -1].sqrt()

    @property
    def norms(self) -> Tensor:
        """(q, m) Lengths of the clients' updates."""
        return self.products.diagonal(dim1=-2, dim2=-1).sqrt()


@dataclass(frozen=True, slots=True)
class Combination:
    """A rule's answer: per group, step g = sum_i weights_i g_i + memory_weight * memory.

    Past updates are added with weights of their own.

    Attributes:
        weights: (q, m) On the clients' raw updates.
        memory_weights: (q,) On the memory row.
        active: (q, m) bool. Clients that have a say in the group.
        lengths: (q,) How far the model moves: this far along g, or, where NaN, by
            ``rates`` times g as it is.
        rates: (q,) See ``lengths``.
        noise: (q,) A step no longer than this is rounding noise of a sum that cancels: it becomes
            exactly zero.
        targets: (q, m) The inner products u_i . g asked for, or None.
        solution: What the solver found out about the cosine matrices, or None.
        consensus: (q,) See ``GroupReport.consensus``, or None.
        notes: Group position -> remark for the report.
        past_weights: (q, k) On the past updates; None for no weight.
        turn: Given an entry, some of its numbers (flat) and the combination there, rescales each
            coordinate in place. What comes out is g, for the lengths and the report too.
    """

    weights: Tensor
    memory_weights: Tensor
    active: Tensor
    lengths: Tensor
    rates: Tensor
    noise: Tensor
    targets: Tensor | None = None
    solution: Solution | None = None
    consensus: Tensor | None = None
    notes: Mapping[int, str] = field(default_factory=dict)
    past_weights: Tensor | None = None
    turn: Callable[[str, slice, Tensor], None] | None = None

    @classmethod
    def joined(cls, parts: Sequence[Combination], grams: Grams) -> Combination:
        """One for all groups, from those of their parts in order.

        Raises:
            TypeError: a part has a ``turn``, or some have what others lack.
        """
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        if any(part.turn is not None for part in parts):
            raise TypeError("a separable rule cannot turn steps; say separable = False")
        starts = itertools.accumulate((len(part.rates) for part in parts[:-1]), initial=0)
        notes = {
            start + q: note
            for start, part in zip(starts, parts, strict=True)
            for q, note in part.notes.items()
        }
        joined = _concatenated(parts)
        if first.solution is not None:
            solutions = [part.solution for part in parts if part.solution is not None]
            scale = torch.cat([solution.cosines.scale for solution in solutions])
            cosines = Cosines(grams.products, scale)
            joined["solution"] = replace(
                first.solution, cosines=cosines, **_concatenated(solutions)
            )
        return replace(first, notes=notes, **joined)


def _concatenated(parts: Sequence[Combination] | Sequence[Solution]) -> dict[str, Any]:
    """The tensors of all parts, by field, one after the other along the groups."""
    joined = {}
    for each in fields(parts[0]):
        values = [getattr(part, each.name) for part in parts]
        if len({value is None for value in values}) > 1:
            raise TypeError("a separable rule must answer for all groups in the same way")
        if isinstance(values[0], Tensor):
            joined[each.name] = torch.cat(values)
    return joined
