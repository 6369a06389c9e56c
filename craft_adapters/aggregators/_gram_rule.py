"""What all rules share whose step is a combination of the clients' updates.

:class:`GramRule` does the two passes over the updates, the buffers, the report and the order in
which things may fail; a rule only turns Gram matrices into weights.
"""

from __future__ import annotations

import copy
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .._contract import (
    AggregationReport,
    AggregationResult,
    Aggregator,
    ClientUpdate,
    State,
)
from .._intake import Intake, real, shaped
from .._layout import Granularity, Group, Layout
from ..errors import CheckpointError, OptionError
from ..projection import Correction, Piece, Turn, combine, gram, sound
from ._grams import Combination, Grams
from ._report import group_reports
from ._requirements import screened
from ._shards import Shards, local_state, local_updates, whole_state
from ._table import Table

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["GramRule"]

# Compute capabilities of cards whose float64 runs at half the speed of float32 or more: P100, V100,
# A100, H100 and H200, B200. On the others it is a thirty-second or less.
_FAST_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
# Unit roundoff of a group's values, by whether any of them is float64.
_EPS = {double: torch.finfo(torch.float64 if double else torch.float32).eps for double in (0, 1)}
# A step whose inner products are this near to their targets (against the largest) is not corrected.
_CLOSE = 2.5e-6


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

    Attributes:
        separable: Whether groups do not need each other: :meth:`combine` may then be called for
            some groups at a time, several times a round, and its answers for the groups must be
            the same however they are asked for, without a ``turn``. Small groups of large models
            are then read once instead of twice. A subclass with a :meth:`combine` of its own says
            it again, or is not.
    """

    separable: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "combine" in vars(cls) and "separable" not in vars(cls):
            cls.separable = False

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
        """Turn Gram matrices into weights. Must not change the rule's state.

        What it is given may be some of the groups (see ``separable``), and a client that turns out
        to hold NaN in others: the round then begins again without it.
        """

    def check(self, clients: Sequence[ClientUpdate]) -> None:
        """Refuse clients whose numbers (``loss``, ``local_steps``) the rule cannot use.

        Called before any value is read, so that which error comes first does not depend on blocks.
        """

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
            grams: Of all groups.
            combination: What :meth:`combine` answered, for all groups.
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
            self.check(intake.clients)
            layout = self._layout(global_state).restrict(intake.payload)
            self._check_kept(global_state)
            if self._shards is not None:
                counts = [(c.client_id, c.num_examples, c.kind) for c in intake.clients]
                self._shards.agree("clients and layer groups", (counts, layout))
            # A loop: what one attempt holds goes before the next.
            while isinstance(found := self._passes(intake, layout), Tensor):
                intake = self._without(intake, layout, found)
            grams, combination, steps, state = found
            report = AggregationReport(
                rule=self.name,
                round=number,
                clients=tuple(client.client_id for client in grams.clients),
                dropped=grams.intake.dropped,
                groups=group_reports(grams, combination, steps.norms, steps.inner),
                seconds=time.perf_counter() - started,
            )
            self._finish(grams, combination, steps, report)
        if self._shards is not None:
            state = whole_state(state, given)
        return AggregationResult(state, report)

    def _finish(
        self, grams: Grams, combination: Combination, steps: _Steps, report: AggregationReport
    ) -> None:
        """Take the round over and tell the observers; if one raises, it has not happened."""
        before = vars(self).copy()
        try:
            self.commit(grams, combination, steps.entries)
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
                    "with a new rule (delete its state file, if it has one), or load the state "
                    "that belongs to this model"
                )

    def _passes(self, intake: Intake, layout: Layout) -> _Outcome | Tensor:
        """Both reads of the updates; or (m,) whose values are finite, unless all are.

        Where groups do not need each other, the second read of some follows the first at once,
        while their block is there.
        """
        past = tuple(self.past(intake))
        # Where clients sent models, what is not finite in the global one shows in all differences.
        shows = set(intake.payload) if intake.clients[0].kind == "state" else set()
        intake.check_global(entry for entry in intake.state if entry not in shows)
        table = Table(_below(intake, past), layout, self.memory(), self.device, self.block_bytes)
        intake.read(layout.counted)  # shape and type, before anything is computed
        grams = Grams.empty(intake, layout, past)
        averages, squares = self._average(grams, layout, table)
        finite = torch.ones(len(grams.clients), dtype=torch.bool)
        combinations, steps = [], []
        for part in self._parts(table, grams.groups):
            some = grams.of(part)
            self._multiply(table, some)
            if self._shards is not None:  # then all groups are one part
                double = (some.rounding == _EPS[True]).to(torch.float64)
                self._shards.add_up(some.matrices, squares, some.widths, double)
                # A rank without numbers of a lazy group has not seen their type.
                some.rounding[double > 0] = _EPS[True]
            finite &= some.norms.isfinite().all(0) & squares.isfinite()
            if bool(finite.all()):
                combinations.append(self.combine(some))
                steps.append(self._step(table, some, combinations[-1]))
        if not bool(finite.all()):
            return finite
        table.release()  # before the new model takes its memory
        combination, applied = Combination.joined(combinations, grams), _Steps.joined(steps)
        state = self._state(grams, layout, combination, applied, averages)
        return grams, combination, applied, state

    def _without(self, intake: Intake, layout: Layout, finite: Tensor) -> Intake:
        """Leave out the clients whose values are not finite."""
        intake.check_global(intake.state)
        entries = [entry for group in layout.groups for entry in group.entries]
        first = None if self._shards is None else self._shards.first
        bad = (~finite).nonzero().flatten().tolist()
        return intake.without(bad, [*entries, *layout.averaged], self.on_nonfinite, first)

    def _parts(self, table: Table, groups: Sequence[Group]) -> list[slice]:
        """Neighbouring groups that are worked on together."""
        if not self.separable or self._shards is not None:
            return [slice(0, len(groups))]
        single = self._tries_float32(table) and not all(map(table.double, groups))
        return table.parts(groups, torch.float32 if single else torch.float64)

    def _tries_float32(self, table: Table) -> bool:
        """Not where values would have to be read, or products added over processes, once more."""
        return table.in_memory and self._shards is None and _prefers_float32(self.device)

    def _multiply(self, table: Table, grams: Grams) -> None:
        """First read of some groups: fill in their products, and what these are good to."""
        if self._tries_float32(table):
            double = [table.double(group) for group in grams.groups]
            grams.exact.copy_(torch.tensor(double, dtype=torch.bool))
            self._put_products(table, grams, ~grams.exact, torch.float32)
            grams.exact.logical_or_(~sound(grams.all_products))
        self._put_products(table, grams, grams.exact, torch.float64)
        # Half types hold few distinct values, but those are what the clients mean: two rows that
        # differ in them differ.
        noise = [_EPS[table.double(group)] for group in grams.groups]
        grams.rounding.copy_(torch.tensor(noise, dtype=torch.float64))

    def _put_products(self, table: Table, grams: Grams, chosen: Tensor, dtype: torch.dtype) -> None:
        members = chosen.nonzero().flatten()
        if not len(members):
            return
        rows = table.rows([grams.groups[q] for q in members.tolist()], dtype)
        place = grams.matrices if table.remembers else grams.all_products
        if len(members) == len(place) and place.device == rows.device:
            gram(rows, place)  # no second copy: it may be as large as a block
        else:
            place[members] = gram(rows).cpu()

    def _step(self, table: Table, grams: Grams, combination: Combination) -> _Steps:
        """Second read of some groups: their steps, and what they came to."""
        groups, count = grams.groups, len(grams.clients)
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
            if measured is not None:
                inner[members] = self.over_ranks(measured[:, :count].cpu()) * inverse[members]
            norms[members] = rows.lengths(flat).cpu()
            flats.append((members.tolist(), rows.plan.entries, flat))
        norms = self.over_ranks(norms.square()).sqrt()
        # Float32 rows were independent: nothing cancels.
        norms = norms.where(~grams.exact | (norms > combination.noise), 0.0)
        steps = {}
        for positions, starts, flat in flats:
            places = iter(starts)
            for q in positions:
                for entry in groups[q].entries:
                    start, size = next(places), real(grams.intake.state[entry]).numel()
                    steps[entry] = flat[start : start + size]
                    if not norms[q]:
                        steps[entry].zero_()
        return _Steps(steps, norms, inner.where(norms.unsqueeze(-1) > 0, 0.0))

    def _average(
        self, grams: Grams, layout: Layout, table: Table
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Weighted mean of float buffers, as global minus the mean difference.

        And (m,) the squares of the clients' differences, all buffers together.
        """
        count = len(grams.clients)
        if not layout.averaged:
            return {}, torch.zeros(count, dtype=torch.float64)
        rows = table.rows([Group("buffers", layout.averaged)], torch.float64)
        squares = gram(rows)[0].diagonal()[:count].cpu()
        weights = torch.nn.functional.pad(grams.shares, (0, rows.count - count))
        flat, _ = combine(rows, weights.unsqueeze(0).to(self.device))
        averages = {}
        for entry, start in zip(layout.averaged, rows.plan.entries, strict=True):
            origin = real(grams.intake.state[entry]).to(self.device)
            step = flat[start : start + origin.numel()].view(origin.shape)
            averages[entry] = shaped(origin - step, grams.intake.state[entry])
        return averages, squares

    def _state(
        self,
        grams: Grams,
        layout: Layout,
        combination: Combination,
        steps: _Steps,
        averages: Mapping[str, Tensor],
    ) -> State:
        """The new global model."""
        intake, norms = grams.intake, steps.norms
        factors = torch.where(
            combination.lengths.isnan(),
            combination.rates,
            torch.where(norms > 0, combination.lengths / norms, 0.0),
        )
        new = {**averages, **_largest(intake, layout.counted)}
        for group, factor in zip(grams.groups, factors.tolist(), strict=True):
            for entry in group.entries:
                origin = real(intake.state[entry]).to(self.device)
                step = steps.entries[entry].view(origin.shape)
                moved = torch.sub(origin, step, alpha=factor)
                new[entry] = shaped(moved, intake.state[entry])
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
        return state


@dataclass(frozen=True, slots=True)
class _Steps:
    """What the second read gave, for q groups.

    Attributes:
        entries: Entry -> step, flat.
        norms: (q,) Lengths of the steps.
        inner: (q, m) Inner products u_i . g.
    """

    entries: dict[str, Tensor]
    norms: Tensor
    inner: Tensor

    @classmethod
    def joined(cls, parts: Sequence[_Steps]) -> _Steps:
        """One for all groups, from those of their parts in order."""
        return cls(
            {entry: step for part in parts for entry, step in part.entries.items()},
            torch.cat([part.norms for part in parts]),
            torch.cat([part.inner for part in parts]),
        )


_Outcome = tuple[Grams, Combination, _Steps, State]


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
