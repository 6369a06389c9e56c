"""What all rules share whose step is a combination of the clients' updates.

:class:`GramRule` does the two passes over the updates, the buffers, the report and the order in
which things may fail; a rule only turns Gram matrices into weights.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

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
from ..projection import Correction, Cosines, Piece, Solution, Turn, combine, gram, sound
from ._requirements import screened
from ._shards import Shards, local_state, local_updates, whole_state
from ._table import Table

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Combination", "GramRule", "Grams"]

# A cosine below this is negative, not orthogonal and rounded.
_NEGATIVE = -1e-12
# Compute capabilities of cards whose float64 runs at half the speed of float32 or more: P100, V100,
# A100, H100 and H200, B200. On the others it is a thirty-second or less.
_FAST_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
# Unit roundoff of a group's values, by whether any of them is float64.
_EPS = {double: torch.finfo(torch.float64 if double else torch.float32).eps for double in (0, 1)}
# A step whose inner products are this near to their targets (against the largest) is not corrected.
_CLOSE = 2.5e-6


@dataclass(frozen=True, slots=True)
class Grams:
    """All that a rule needs to know about a round's updates: small float64 tensors on the CPU.

    For q groups, m clients and k past updates:

    Attributes:
        groups: The q layer groups.
        buffers: Entries that are averaged or counted; a rule remembers nothing of them.
        clients: The m client updates, in the order of the rows.
        shares: (m,) Data shares p_i = n_i / sum n.
        products: (q, m, m) Inner products of the clients' updates.
        memory_products: (q, m) Inner products of the clients' updates with the memory row.
        memory_norms: (q,) Length of the memory row; zero without one.
        past: The k past updates that the rule asked for; see :meth:`GramRule.past`.
        all_products: (q, m + k, m + k) Inner products of the clients' and the past updates.
        exact: (q,) bool. Whether the products are good to float64 (else to float32).
        rounding: (q,) Unit roundoff of the clients' values: relative noise to expect in a row.
        widths: (q,) Number of coordinates.
        intake: What arrived, for a rule that keeps the clients' values.
    """

    groups: tuple[Group, ...]
    buffers: tuple[str, ...]
    clients: tuple[ClientUpdate, ...]
    shares: Tensor
    products: Tensor
    memory_products: Tensor
    memory_norms: Tensor
    past: tuple[ClientUpdate, ...]
    all_products: Tensor
    exact: Tensor
    rounding: Tensor
    widths: Tensor
    intake: Intake

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
        block_bytes: Memory to work in, at most; chosen from sizes and device if None.
        process_group: The ranks over which the model is spread, if it is: every rank calls with
            its own part of each entry (plain tensors, each number on exactly one rank, or DTensors
            with Shard placements) and with the same clients, and gets its part of the new model.
            An error on one rank leaves the others waiting for the group's timeout.

    What is computed in what: differences and products in float64, unless no value is float64, all
    are in memory, on one process, and float32 is much faster on the device. There they are tried
    in float32 and kept where the clients are far enough from dependent; the step is then corrected
    by its true inner products. TF32 and autocast touch neither.
    """

    def __init__(
        self,
        *,
        granularity: Granularity = "layer",
        layout: Layout | None = None,
        on_nonfinite: Literal["drop", "raise"] = "drop",
        device: str | torch.device = "auto",
        block_bytes: int | None = None,
        process_group: ProcessGroup | None = None,
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
        if block_bytes is not None and block_bytes <= 0:
            raise OptionError(f"block_bytes must be None or a number > 0, got {block_bytes!r}")
        self.device = _device(device)
        self.block_bytes = block_bytes
        self._shards = None if process_group is None else Shards(process_group, self.device)
        self._round = 0

    @abstractmethod
    def combine(self, grams: Grams) -> Combination:
        """Turn Gram matrices into weights. Must not change the rule's state."""

    def memory(self) -> Mapping[str, Tensor]:
        """Entry -> the remembered direction; entries it lacks count as zero."""
        return {}

    def kept(self) -> Mapping[str, Tensor]:
        """Entry -> a tensor with a number for each of its own: a state of another model shows."""
        return self.memory()

    def past(self, intake: Intake) -> Sequence[ClientUpdate]:
        """Earlier updates (``kind="update"``) that stand below this round's, one row each.

        They have a say in the step only, by ``Combination.past_weights``: not in shares, buffers
        and report. Their ids are not among the clients', their entries named as in the global
        model. Asked again where a client was left out; must give the same for the same clients.
        """
        return ()

    def commit(self, grams: Grams, combination: Combination, steps: Mapping[str, Tensor]) -> None:
        """Take over a round that succeeded.

        What is remembered must be replaced, not changed in place: an observer that raises takes
        the round back.

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
        given = global_state
        if self._shards is not None:
            global_state, updates = local_state(given), local_updates(updates)
        with torch.no_grad(), _plain_torch(self.device):
            intake = Intake.of(global_state, updates)
            intake = screened(intake, self.name, self.requires, self.on_nonfinite)
            layout = self._layout(global_state).restrict(intake.payload)
            self._check_kept(global_state)
            if self._shards is not None:
                counts = [(c.client_id, c.num_examples, c.kind) for c in intake.clients]
                self._shards.agree("clients and layer groups", (counts, layout))
            grams, intake, table = self._gram_pass(intake, layout)
            combination = self.combine(grams)
            applied = self._apply_pass(intake, layout, grams, combination, table)
            report = AggregationReport(
                rule=self.name,
                round=number,
                clients=tuple(client.client_id for client in intake.clients),
                dropped=intake.dropped,
                groups=_report_groups(grams, combination, applied),
                seconds=time.perf_counter() - started,
            )
            self._finish(grams, combination, applied, report)
        state = applied.state if self._shards is None else whole_state(applied.state, given)
        return AggregationResult(state, report)

    def _finish(
        self, grams: Grams, combination: Combination, applied: _Applied, report: AggregationReport
    ) -> None:
        """Take the round over and tell the observers; if one raises, it has not happened."""
        before = vars(self).copy()
        try:
            self.commit(grams, combination, applied.steps)
            self._round = report.round + 1
            for observer in self.observers:
                observer(report)
        except BaseException:
            vars(self).update(before)
            raise

    def over_ranks(self, values: Tensor) -> Tensor:
        """Sum of a float64 CPU tensor over the ranks of the process group; itself without one."""
        return values if self._shards is None else self._shards.sum(values)[0]

    def _layout(self, state: Mapping[str, Any]) -> Layout:
        if self.layout is None:
            return Layout.infer(state, self.granularity)
        self.layout.check(state)
        return self.layout

    def _check_kept(self, state: Mapping[str, Any]) -> None:
        for entry, tensor in self.kept().items():
            value = state.get(entry)
            if not isinstance(value, Tensor) or real(value).numel() != tensor.numel():
                raise CheckpointError(
                    f"the rule's saved state is of another model: it remembers entry {entry!r} "
                    f"with {tensor.numel()} numbers, which the global model does not have; start "
                    "with a new rule, or load the state that belongs to this model"
                )

    def _gram_pass(self, intake: Intake, layout: Layout) -> tuple[Grams, Intake, Table]:
        """First read of the updates. Leaves out clients whose values are not finite."""
        groups, count = layout.groups, len(intake.clients)
        past = tuple(self.past(intake))
        # Where clients sent models, what is not finite in the global one shows in all differences.
        shows = set(intake.payload) if intake.clients[0].kind == "state" else set()
        intake.check_global(entry for entry in intake.state if entry not in shows)
        table = self._table(_below(intake, past), layout)
        products = torch.zeros(0, dtype=torch.float64)
        exact = torch.ones(len(groups), dtype=torch.bool)
        # Values that would have to be read, or products added over processes, once more are not
        # tried in float32.
        if table.in_memory and self._shards is None and _prefers_float32(self.device):
            exact = torch.tensor([table.double(group) for group in groups], dtype=torch.bool)
        if not bool(exact.all()):
            products = self._multiply(table, groups, ~exact, torch.float32, products)
            exact |= ~sound(products[:, :-1, :-1])
        products = self._multiply(table, groups, exact, torch.float64, products)
        squares = torch.zeros(count, dtype=torch.float64)
        if layout.averaged:
            averaged = gram(table.rows([_buffers(layout)], torch.float64))[0]
            squares = averaged.diagonal()[:count].cpu()
        intake.read(layout.counted)  # shape and type, before anything is computed
        widths = torch.tensor(
            [sum(real(intake.state[e]).numel() for e in group.entries) for group in groups],
            dtype=torch.float64,
        )
        if self._shards is not None:
            products, squares, widths = self._shards.sum(products, squares, widths)
        finite = torch.isfinite(products.diagonal(dim1=-2, dim2=-1)[:, :count]).all(0)
        finite &= torch.isfinite(squares)
        # Half types hold few distinct values, but those are what the clients mean: two rows that
        # differ in them differ.
        double = [table.double(group) for group in groups]
        if not bool(finite.all()):
            intake.check_global(intake.state)
            bad = (~finite).nonzero().flatten().tolist()
            entries = [entry for group in groups for entry in group.entries] + [*layout.averaged]
            first = None if self._shards is None else self._shards.first
            intake = intake.without(bad, entries, self.on_nonfinite, first)
            # Whoever is left out may be among those whose past updates are asked for.
            if _ids(self.past(intake)) != _ids(past):
                return self._gram_pass(intake, layout)
            others = torch.arange(count, products.shape[-1])
            kept = torch.cat([finite.nonzero().flatten(), others])
            products = products[:, kept][:, :, kept]
            count = len(intake.clients)
            table = self._table(_below(intake, past), layout)
        counts = torch.tensor([c.num_examples for c in intake.clients], dtype=torch.float64)
        counts = counts / counts.max()  # the sum of huge counts stays finite
        grams = Grams(
            groups=groups,
            buffers=(*layout.averaged, *layout.counted),
            clients=intake.clients,
            shares=counts / counts.sum(),
            products=products[:, :count, :count],
            memory_products=products[:, :count, -1],
            memory_norms=products[:, -1, -1].sqrt(),
            past=past,
            all_products=products[:, :-1, :-1],
            exact=exact,
            rounding=torch.tensor([_EPS[is_double] for is_double in double], dtype=torch.float64),
            widths=widths,
            intake=intake,
        )
        return grams, intake, table

    def _table(self, intake: Intake, layout: Layout) -> Table:
        return Table(intake, layout, self.memory(), self.device, self.block_bytes)

    def _multiply(
        self,
        table: Table,
        groups: Sequence[Group],
        chosen: Tensor,
        dtype: torch.dtype,
        products: Tensor,
    ) -> Tensor:
        """Gram matrices of the chosen groups; those of the others are as they were, or zero."""
        members = chosen.nonzero().flatten()
        if groups and not len(members):
            return products
        found = gram(table.rows([groups[q] for q in members.tolist()], dtype)).cpu()
        if not table.remembers:
            found = torch.nn.functional.pad(found, (0, 1, 0, 1))
        if len(members) == len(groups):  # no second copy: it may be as large as a block
            return found
        if not products.numel():
            products = torch.zeros(len(groups), *found.shape[1:], dtype=torch.float64)
        products[members] = found
        return products

    def _apply_pass(
        self,
        intake: Intake,
        layout: Layout,
        grams: Grams,
        combination: Combination,
        table: Table,
    ) -> _Applied:
        """Second read of the updates: the new state, the steps, and what they came to."""
        groups, count = layout.groups, len(intake.clients)
        new: dict[str, Tensor] = {}
        steps: dict[str, Tensor] = {}
        norms = torch.zeros(len(groups), dtype=torch.float64)
        inner = _inner_products(grams, combination)
        inverse = torch.where(combination.active, 1.0 / grams.norms, 0.0)
        parts = [combination.weights, _past_weights(grams, combination)]
        if table.remembers:
            parts.append(combination.memory_weights.unsqueeze(-1))
        weights = torch.cat(parts, dim=-1)
        flats = []
        double = grams.rounding == _EPS[True]
        for chosen, dtype, step_dtype in (
            (~grams.exact, torch.float32, torch.float32),
            (grams.exact & ~double, torch.float64, torch.float32),
            (grams.exact & double, torch.float64, torch.float64),
        ):
            members = chosen.nonzero().flatten()
            if not len(members):
                continue
            some = [groups[q] for q in members.tolist()]
            rows = table.rows(some, dtype)
            correct = _refinement(combination, members, inverse) if dtype == torch.float32 else None
            flat, measured = combine(
                rows,
                weights[members].to(self.device),
                correct,
                dtype=step_dtype,
                turn=_turn(combination, some),
            )
            rows.release()  # before the new model takes its memory
            if measured is not None:
                inner[members] = self.over_ranks(measured[:, :count].cpu()) * inverse[members]
            norms[members] = rows.lengths(flat).cpu()
            flats.append((members.tolist(), rows.plan.entries, flat))
        norms = self.over_ranks(norms.square()).sqrt()
        # Float32 rows were independent: nothing cancels.
        norms = norms.where(~grams.exact | (norms > combination.noise), 0.0)
        factors = torch.where(
            combination.lengths.isnan(),
            combination.rates,
            torch.where(norms > 0, combination.lengths / norms, 0.0),
        ).tolist()
        for positions, starts, flat in flats:
            places = iter(starts)
            for q in positions:
                for entry in groups[q].entries:
                    start, origin = next(places), real(intake.state[entry]).to(self.device)
                    step = flat[start : start + origin.numel()]
                    if not norms[q]:
                        step.zero_()
                    steps[entry] = step
                    moved = torch.sub(origin, step.view(origin.shape), alpha=factors[q])
                    new[entry] = shaped(moved, intake.state[entry])
        new.update(self._average(intake, layout, grams.shares, table))
        new.update(_largest(intake, layout.counted))
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
        return _Applied(state, steps, norms, inner.where(norms.unsqueeze(-1) > 0, 0.0))

    def _average(
        self, intake: Intake, layout: Layout, shares: Tensor, table: Table
    ) -> dict[str, Tensor]:
        """Weighted mean of float buffers, as global minus the mean difference."""
        if not layout.averaged:
            return {}
        rows = table.rows([_buffers(layout)], torch.float64)
        weights = torch.nn.functional.pad(shares, (0, rows.count - len(shares)))
        flat, _ = combine(rows, weights.unsqueeze(0).to(self.device))
        averages = {}
        for entry, start in zip(layout.averaged, rows.plan.entries, strict=True):
            origin = real(intake.state[entry]).to(self.device)
            step = flat[start : start + origin.numel()].view(origin.shape)
            averages[entry] = shaped(origin - step, intake.state[entry])
        return averages


@dataclass(frozen=True, slots=True)
class _Applied:
    """What the apply pass gave: (q,) lengths of the steps, (q, m) inner products u_i . g."""

    state: State
    steps: dict[str, Tensor]
    norms: Tensor
    inner: Tensor


@contextmanager
def _plain_torch(device: torch.device) -> Iterator[None]:
    """Float32 products as float32, new tensors on the CPU unless said otherwise; restored after.

    That is: no TF32, no bfloat16, no autocast, no default device.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", enabled=False))
            stack.enter_context(torch.autocast(device.type, enabled=False))
            if torch.get_default_device().type != "cpu":  # the context slows every call
                stack.enter_context(torch.device("cpu"))
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


def _prefers_float32(device: torch.device) -> bool:
    """Whether float64 products take much longer there."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) not in _FAST_FLOAT64
    return device.type == "cpu"


def _buffers(layout: Layout) -> Group:
    return Group("buffers", layout.averaged)


def _ids(updates: Sequence[ClientUpdate]) -> list[ClientId]:
    return [update.client_id for update in updates]


def _below(intake: Intake, past: Sequence[ClientUpdate]) -> Intake:
    """The round's clients and past updates below them: the rows of the matrices."""
    return replace(
        intake,
        clients=(*intake.clients, *past),
        prefixes={**intake.prefixes, **{update.client_id: intake.prefix for update in past}},
    )


def _past_weights(grams: Grams, combination: Combination) -> Tensor:
    """(q, k) Zero where the rule gave none."""
    if combination.past_weights is not None:
        return combination.past_weights
    return torch.zeros(len(grams.groups), len(grams.past), dtype=torch.float64)


def _turn(combination: Combination, groups: Sequence[Group]) -> Turn | None:
    """The same for pieces of some groups' entries."""
    if (turn := combination.turn) is None:
        return None
    names = [entry for group in groups for entry in group.entries]

    def turn_piece(piece: Piece, step: Tensor) -> None:
        turn(names[piece.entry], slice(piece.start, piece.stop), step)

    return turn_piece


def _inner_products(grams: Grams, combination: Combination) -> Tensor:
    """(q, m) u_i . g by the Gram matrices."""
    inner = (grams.products @ combination.weights.unsqueeze(-1)).squeeze(-1)
    inner += grams.memory_products * combination.memory_weights.unsqueeze(-1)
    across = grams.all_products[:, : len(grams.clients), len(grams.clients) :]
    inner += (across @ _past_weights(grams, combination).unsqueeze(-1)).squeeze(-1)
    return inner / grams.norms.where(grams.norms > 0, 1.0)


def _refinement(combination: Combination, members: Tensor, inverse: Tensor) -> Correction | None:
    """How to correct the steps of some groups, given their true inner products with the rows."""
    targets, solution = combination.targets, combination.solution
    if targets is None or solution is None:
        return None

    scale, wanted = inverse[members], targets[members]
    mendable = combination.active[members] & solution.regular[members].unsqueeze(-1)
    allowed = _CLOSE * wanted.amax(-1, keepdim=True)

    def correct(positions: slice, products: Tensor) -> Tensor | None:
        some = scale[positions]
        missing = wanted[positions] - products[:, : some.shape[1]].cpu() * some
        missing = missing.where(mendable[positions], 0.0)
        if not bool((missing.abs() > allowed[positions]).any()):
            return None
        change = solution.again(members[positions], missing) * some
        others = products.shape[1] - change.shape[1]
        return torch.nn.functional.pad(change, (0, others)).to(products.device)

    return correct


def _largest(intake: Intake, entries: Sequence[str]) -> dict[str, Tensor]:
    """Maximum over the clients of integer buffers (or counters that a host made floats)."""
    largest = {}
    for entry, *values in zip(entries, *intake.read(entries), strict=True):
        like = intake.state[entry]
        counts = [
            value.to(like.device) if client.kind == "state" else like - value.to(like.device)
            for client, value in zip(intake.clients, values, strict=True)
        ]
        largest[entry] = shaped(torch.stack(counts).amax(0), like)
    return largest


def _report_groups(
    grams: Grams, combination: Combination, applied: _Applied
) -> tuple[GroupReport, ...]:
    ids: list[ClientId] = [client.client_id for client in grams.clients]
    active = combination.active
    cosines = Cosines(grams.products, torch.where(active, 1.0 / grams.norms, 0.0))
    conflicts = torch.zeros(len(grams.groups), dtype=torch.int64)
    for part in cosines.parts():
        conflicts[part] = (cosines.of(part) < _NEGATIVE).sum((-2, -1)) // 2
    inner, step_norms = applied.inner, applied.norms
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
