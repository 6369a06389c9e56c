"""What all rules share whose step is a combination of the clients' updates.

:class:`GramRule` does the two passes over the updates, the buffers, the report and the order in
which things may fail; a rule only turns Gram matrices into weights.
"""

from __future__ import annotations

import copy
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from .._contract import (
    AggregationReport,
    AggregationResult,
    Aggregator,
    ClientId,
    ClientUpdate,
    GroupReport,
    State,
)
from .._intake import Intake, real, shaped
from .._layout import Granularity, Group, Layout
from ..errors import CheckpointError, OptionError
from ..projection import Rows, Solution, Workspace, combine, gram, is_sound, squares

__all__ = ["Combination", "GramRule", "Grams"]

# A cosine below this is negative, not orthogonal and rounded.
_NEGATIVE = -1e-12
# A step whose inner products are this near to their targets (against the largest) is not corrected.
_CLOSE = 1e-6


@dataclass(frozen=True, slots=True)
class Grams:
    """All that a rule needs to know about a round's updates: small float64 tensors on the CPU.

    For q groups, m clients and k memory rows (0 or 1):

    Attributes:
        groups: The q layer groups.
        buffers: Entries that are averaged or counted; a rule remembers nothing of them.
        clients: The m client updates, in the order of the rows.
        shares: (m,) Data shares p_i = n_i / sum n.
        products: (q, m, m) Inner products of the clients' updates.
        memory_products: (q, m) Inner products of the clients' updates with the memory row.
        memory_norms: (q,) Length of the memory row; zero without one.
        exact: (q,) bool. Whether the products are good to float64 (else to float32).
        rounding: (q,) Unit roundoff of the clients' values: relative noise to expect in a row.
        widths: (q,) Number of coordinates.
    """

    groups: tuple[Group, ...]
    buffers: tuple[str, ...]
    clients: tuple[ClientUpdate, ...]
    shares: Tensor
    products: Tensor
    memory_products: Tensor
    memory_norms: Tensor
    exact: Tensor
    rounding: Tensor
    widths: Tensor

    @property
    def norms(self) -> Tensor:
        """(q, m) Lengths of the clients' updates."""
        return self.products.diagonal(dim1=-2, dim2=-1).sqrt()


@dataclass(frozen=True, slots=True)
class Combination:
    """A rule's answer: per group, step g = sum_i weights_i g_i + memory_weight * memory.

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


class GramRule(Aggregator):
    """A rule that sees Gram matrices and answers with weights; see :class:`Combination`.

    A subclass implements :meth:`combine`, and, if it remembers a direction, :meth:`memory` and
    :meth:`commit`. Arguments are options that every such rule has.

    Args:
        granularity: What is one group: ``"layer"``, ``"model"``, ``"tensor"``, or a callable from
            entry name to group name.
        layout: A layout made by hand or from a model; else it is inferred from each global state.
        on_nonfinite: ``"drop"`` leaves out a client with NaN or infinity and reports it;
            ``"raise"`` raises NonFiniteUpdate.
        device: Where the arithmetic is done: ``"auto"`` (a CUDA device when there is one) or a
            torch device. Results come back on each entry's own device.

    What is computed in what: differences and products in float64, unless the device is a CPU and
    no value is float64. There they are tried in float32, at twice the speed, and kept where the
    clients are far enough from dependent; the step is then corrected by its true inner products.
    TF32 and autocast touch neither.
    """

    def __init__(
        self,
        *,
        granularity: Granularity = "layer",
        layout: Layout | None = None,
        on_nonfinite: Literal["drop", "raise"] = "drop",
        device: str | torch.device = "auto",
    ) -> None:
        super().__init__()
        if not callable(granularity) and granularity not in ("layer", "model", "tensor"):
            raise OptionError(
                f"granularity must be 'layer', 'model', 'tensor' or a callable, got {granularity!r}"
            )
        if on_nonfinite not in ("drop", "raise"):
            raise OptionError(f"on_nonfinite must be 'drop' or 'raise', got {on_nonfinite!r}")
        self.granularity: Granularity = granularity
        self.layout = layout
        self.on_nonfinite = on_nonfinite
        self.device = _device(device)
        self._round = 0

    @abstractmethod
    def combine(self, grams: Grams) -> Combination:
        """Turn Gram matrices into weights. Must not change the rule's state."""

    def memory(self) -> Mapping[str, Tensor]:
        """Entry -> the remembered direction; entries it lacks count as zero."""
        return {}

    def commit(self, grams: Grams, combination: Combination, steps: Mapping[str, Tensor]) -> None:
        """Take over a round that succeeded.

        Args:
            grams: What :meth:`combine` was given.
            combination: What it answered.
            steps: Entry -> step direction g, flat, float32 or float64, on the rule's device; zero
                where it was rounding noise. Entries that were not in the payload are not in it.
        """

    def aggregate(
        self,
        global_state: Mapping[str, Any],
        updates: Iterable[ClientUpdate],
        *,
        round: int | None = None,
    ) -> AggregationResult:
        """See :meth:`craft_adapters.Aggregator.aggregate`."""
        started = time.perf_counter()
        number = self._round if round is None else int(round)
        with torch.no_grad(), _full_precision(self.device):
            intake = Intake.of(global_state, updates)
            layout = self._layout(global_state).restrict(intake.payload)
            self._check_memory(global_state)
            grams, intake, tables = self._gram_pass(intake, layout)
            combination = self.combine(grams)
            applied = self._apply_pass(intake, layout, grams, combination, tables)
            report = AggregationReport(
                rule=self.name,
                round=number,
                clients=tuple(client.client_id for client in intake.clients),
                dropped=intake.dropped,
                groups=_report_groups(grams, combination, applied),
                seconds=time.perf_counter() - started,
            )
            self.commit(grams, combination, applied.steps)
        self._round = number + 1
        for observer in self.observers:
            observer(report)
        return AggregationResult(applied.state, report)

    def _layout(self, state: Mapping[str, Any]) -> Layout:
        if self.layout is None:
            return Layout.infer(state, self.granularity)
        self.layout.check(state)
        return self.layout

    def _check_memory(self, state: Mapping[str, Any]) -> None:
        for entry, tensor in self.memory().items():
            value = state.get(entry)
            if not isinstance(value, Tensor) or real(value).numel() != tensor.numel():
                raise CheckpointError(
                    f"the rule's saved state is of another model: it remembers entry {entry!r} "
                    f"with {tensor.numel()} numbers, which the global model does not have; start "
                    "with a new rule, or load the state that belongs to this model"
                )

    def _gram_pass(self, intake: Intake, layout: Layout) -> tuple[Grams, Intake, dict[str, _Table]]:
        """First read of the updates. Leaves out clients whose values are not finite.

        The tables come back for the apply pass if all clients' values are in memory anyway.
        """
        count = len(intake.clients)
        in_memory = all(isinstance(client.values, dict) for client in intake.clients)
        tables: dict[str, _Table] = {}
        workspace = Workspace()
        products, exact, rounding, widths = [], [], [], []
        for group in layout.groups:
            table = self._read(intake, group.entries, with_memory=True)
            if in_memory:
                tables[group.name] = table
            double = table.double
            dtype = torch.float64 if double or self.device.type != "cpu" else torch.float32
            product = gram(table.rows(dtype, self.device, workspace))
            if dtype == torch.float32 and not is_sound(product[:count, :count]):
                dtype = torch.float64
                product = gram(table.rows(dtype, self.device, workspace))
            if not table.remembers:
                product = torch.nn.functional.pad(product, (0, 1, 0, 1))
            products.append(product)
            exact.append(dtype == torch.float64)
            # Half types hold few distinct values, but those are what the clients mean: two rows
            # that differ in them differ.
            rounding.append(torch.finfo(torch.float64 if double else torch.float32).eps)
            widths.append(sum(tensor.numel() for tensor in table.base))
        finite = torch.ones(count, dtype=torch.bool)
        if layout.averaged:
            rows = self._read(intake, layout.averaged).rows(torch.float64, self.device, workspace)
            finite &= torch.isfinite(squares(rows)).cpu()
        for entry in layout.counted:
            for client in intake.clients:
                intake.read(client, entry)  # shape and type, before anything is computed

        stacked = torch.zeros(0, count + 1, count + 1, dtype=torch.float64)
        if products:
            stacked = torch.stack(products).cpu()
        diagonal = stacked.diagonal(dim1=-2, dim2=-1)[:, :count]
        finite &= torch.isfinite(diagonal).all(0)
        if not bool(finite.all()):
            tables = {}
            bad = (~finite).nonzero().flatten().tolist()
            suspects = (*layout.groups, Group("buffers", layout.averaged))
            intake = intake.without(bad, suspects, self.on_nonfinite)
            kept = torch.cat([finite.nonzero().flatten(), torch.tensor([count])])
            stacked = stacked[:, kept][:, :, kept]
            count = len(intake.clients)
        counts = torch.tensor([c.num_examples for c in intake.clients], dtype=torch.float64)
        counts = counts / counts.max()  # the sum of huge counts stays finite
        grams = Grams(
            groups=layout.groups,
            buffers=(*layout.averaged, *layout.counted),
            clients=intake.clients,
            shares=counts / counts.sum(),
            products=stacked[:, :count, :count],
            memory_products=stacked[:, :count, count],
            memory_norms=stacked[:, count, count].sqrt(),
            exact=torch.tensor(exact, dtype=torch.bool),
            rounding=torch.tensor(rounding, dtype=torch.float64),
            widths=torch.tensor(widths, dtype=torch.float64),
        )
        return grams, intake, tables

    def _apply_pass(
        self,
        intake: Intake,
        layout: Layout,
        grams: Grams,
        combination: Combination,
        tables: Mapping[str, _Table],
    ) -> _Applied:
        """Second read of the updates: the new state, the steps, and what they came to."""
        new: dict[str, Tensor] = {}
        steps: dict[str, Tensor] = {}
        norms = []
        inner = _inner_products(grams, combination)
        inverse = torch.where(combination.active, 1.0 / grams.norms, 0.0)
        exact = grams.exact.tolist()
        workspace = Workspace()
        on_device = (
            combination.weights.to(self.device),
            combination.memory_weights.to(self.device).unsqueeze(-1),
            combination.lengths.to(self.device),
            combination.rates.to(self.device),
            combination.noise.to(self.device),
        )
        for q, (group, weights, memory_weight, length, rate, noise) in enumerate(
            zip(layout.groups, *(column.unbind() for column in on_device), strict=True)
        ):
            table = tables.get(group.name) or self._read(intake, group.entries, with_memory=True)
            if table.remembers:
                weights = torch.cat([weights, memory_weight])
            dtype = torch.float64 if exact[q] else torch.float32
            step, measured = combine(
                table.rows(dtype, self.device, workspace),
                weights,
                None if exact[q] else _refinement(combination, q, inverse[q]),
            )
            if measured is not None:
                inner[q] = measured[: len(intake.clients)].cpu() * inverse[q]
            norm = torch.linalg.vector_norm(step, dtype=torch.float64)
            factor = torch.where(length.isnan(), rate, length / norm)
            if exact[q]:  # else the rows are independent: nothing cancels
                significant = norm > noise
                step, factor = step.where(significant, 0.0), factor.where(significant, 0.0)
                norm = norm.where(significant, 0.0)
            norms.append(norm)
            sizes = [tensor.numel() for tensor in table.base]
            origin = torch.cat([tensor.reshape(-1).to(self.device) for tensor in table.base])
            moved = origin.to(torch.float64) - factor * step
            for entry, part, value in zip(
                group.entries, torch.split(step, sizes), torch.split(moved, sizes), strict=True
            ):
                steps[entry] = part
                new[entry] = shaped(value, intake.state[entry])
        new.update(self._average(intake, layout.averaged, grams.shares, workspace))
        for entry in layout.counted:
            new[entry] = _largest(intake, entry)
        state: State = {}
        for entry, value in intake.state.items():
            if entry in layout.tied:
                new[entry] = new[layout.tied[entry]].clone()
            if entry in new:
                state[entry] = new[entry]
            elif isinstance(value, Tensor):
                state[entry] = value.detach().clone()
            else:
                state[entry] = copy.deepcopy(value)
        lengths = torch.stack(norms).cpu() if norms else torch.zeros(0, dtype=torch.float64)
        return _Applied(state, steps, lengths, inner.where(lengths.unsqueeze(-1) > 0, 0.0))

    def _read(self, intake: Intake, entries: Iterable[str], with_memory: bool = False) -> _Table:
        names = list(entries)
        base = [real(intake.state[name]) for name in names]
        states, directions = (
            [_together(column, self.device) for column in part] for part in intake.rows(names)
        )
        memory = self.memory() if with_memory else {}
        remembers = any(name in memory for name in names)
        if remembers:
            for name, origin, column in zip(names, base, directions, strict=True):
                known = memory.get(name)
                row = torch.zeros_like(origin) if known is None else known.view(origin.shape)
                column.append(row.to(column[0].device) if column else row)
        return _Table(base, states, directions, remembers)

    def _average(
        self, intake: Intake, entries: tuple[str, ...], shares: Tensor, workspace: Workspace
    ) -> dict[str, Tensor]:
        """Weighted mean of float buffers, as global minus the mean difference."""
        if not entries:
            return {}
        table = self._read(intake, entries)
        rows = table.rows(torch.float64, self.device, workspace)
        step, _ = combine(rows, shares.to(self.device))
        parts = torch.split(step, [tensor.numel() for tensor in table.base])
        return {
            entry: shaped(
                origin.to(self.device, torch.float64).reshape(-1) - part, intake.state[entry]
            )
            for entry, origin, part in zip(entries, table.base, parts, strict=True)
        }


@dataclass(frozen=True, slots=True)
class _Table:
    """The values of a group, as read: per entry, of each client, then of the memory row."""

    base: list[Tensor]
    states: list[list[Tensor]]
    directions: list[list[Tensor]]
    remembers: bool

    @property
    def double(self) -> bool:
        """Whether any value is float64."""
        columns = [self.base, *self.states, *self.directions]
        return any(torch.float64 in {tensor.dtype for tensor in column} for column in columns)

    def rows(self, dtype: torch.dtype, device: torch.device, workspace: Workspace) -> Rows:
        return Rows(
            self.base,
            self.states,
            self.directions,
            device=device,
            dtype=dtype,
            workspace=workspace,
        )


@dataclass(frozen=True, slots=True)
class _Applied:
    """What the apply pass gave: (q,) lengths of the steps, (q, m) inner products u_i . g."""

    state: State
    steps: dict[str, Tensor]
    norms: Tensor
    inner: Tensor


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Float32 products as float32: no TF32, no bfloat16, no autocast; restored afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"device must be 'auto' or a torch device, got {device!r}") from error


def _together(column: list[Tensor], device: torch.device) -> list[Tensor]:
    """On one device: that of the arithmetic, unless they share another (one transfer a block)."""
    if len({tensor.device for tensor in column}) > 1:
        return [tensor.to(device) for tensor in column]
    return column


def _inner_products(grams: Grams, combination: Combination) -> Tensor:
    """(q, m) u_i . g by the Gram matrices."""
    inner = (grams.products @ combination.weights.unsqueeze(-1)).squeeze(-1)
    inner += grams.memory_products * combination.memory_weights.unsqueeze(-1)
    return inner / grams.norms.where(grams.norms > 0, 1.0)


def _refinement(
    combination: Combination, q: int, inverse: Tensor
) -> Callable[[Tensor], Tensor | None] | None:
    """How to correct one group's step, given its true inner products with the rows."""
    targets, solution = combination.targets, combination.solution
    if targets is None or solution is None or not bool(solution.regular[q]):
        return None
    active, wanted = combination.active[q], targets[q]

    def correct(products: Tensor) -> Tensor | None:
        missing = wanted - products[: len(inverse)].cpu() * inverse
        missing = missing.where(active, 0.0)
        if bool(missing.abs().amax() <= _CLOSE * wanted.amax()):
            return None
        change = solution.again(q, missing) * inverse
        return torch.nn.functional.pad(change, (0, len(products) - len(change))).to(products.device)

    return correct


def _largest(intake: Intake, entry: str) -> Tensor:
    """Maximum over the clients of an integer buffer (or a counter that a host made a float)."""
    like = intake.state[entry]
    values = []
    for client in intake.clients:
        value = intake.read(client, entry).to(like.device)
        values.append(value if client.kind == "state" else like - value)
    return shaped(torch.stack(values).amax(0), like)


def _report_groups(
    grams: Grams, combination: Combination, applied: _Applied
) -> tuple[GroupReport, ...]:
    ids: list[ClientId] = [client.client_id for client in grams.clients]
    norms, active = grams.norms, combination.active
    safe = norms.where(norms > 0, 1.0)
    cosines = grams.products / safe.unsqueeze(-1) / safe.unsqueeze(-2)
    both = active.unsqueeze(-1) & active.unsqueeze(-2)
    conflicts = ((cosines < _NEGATIVE) & both).sum((-2, -1)) // 2
    inner, step_norms = applied.inner, applied.norms
    opposed = (inner < _NEGATIVE * step_norms.clamp(min=1e-300).unsqueeze(-1)) & active
    along_memory = (grams.memory_products * combination.weights).sum(-1)
    along_memory += grams.memory_norms.square() * combination.memory_weights
    cosine = along_memory / (grams.memory_norms * step_norms)
    cosine = cosine.where(combination.memory_weights != 0, torch.nan)
    residuals = (
        [None] * len(grams.groups)
        if combination.targets is None
        else (inner - combination.targets).abs().where(active, 0.0).amax(-1).tolist()
    )
    solution = combination.solution
    reports = []
    for q, group in enumerate(grams.groups):
        flags = active[q].tolist()
        some = any(flags)
        reports.append(
            GroupReport(
                name=group.name,
                width=int(grams.widths[q]),
                clients=tuple(c for c, flag in zip(ids, flags, strict=True) if flag),
                inactive=tuple(c for c, flag in zip(ids, flags, strict=True) if not flag),
                conflicts_before=int(conflicts[q]),
                conflicts_after=tuple(
                    c for c, flag in zip(ids, opposed[q].tolist(), strict=True) if flag
                ),
                residual=residuals[q] if some else None,
                cosine_to_reference=_finite(cosine[q]),
                step_norm=float(step_norms[q]),
                eigenvalue_min=_finite(solution.eigenvalue_min[q]) if solution else None,
                eigenvalue_max=_finite(solution.eigenvalue_max[q]) if solution else None,
                rank=int(solution.rank[q]) if solution else sum(flags),
                consensus=(
                    _finite(combination.consensus[q]) if combination.consensus is not None else None
                ),
                note=combination.notes.get(q, ""),
            )
        )
    return tuple(reports)


def _finite(value: Tensor) -> float | None:
    number = float(value)
    return number if abs(number) < torch.inf else None
