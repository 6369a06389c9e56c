"""What must hold for CRAFT whatever comes in: measured by float64 oracles on the actual values."""

from __future__ import annotations

import itertools
import json
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from craft_adapters import ClientUpdate, OptionError
from craft_adapters.aggregators import Craft, FedAvg
from craft_adapters.aggregators.craft import AgreementWarning
from craft_adapters.projection import Cosines, Rows, combine, gram, solve

Kind = Literal["state", "update"]
F64 = torch.float64
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
THRESHOLD = 1e-6  # the default norm_threshold
SHAPES = ((3, 4), (5,), (2, 3, 2), (), (0,), (1, 7), (2, 1, 3, 3))

quick = settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


# -- a federation that hypothesis draws, and one that tests make by hand -------------------------


@dataclass(frozen=True)
class Plan:
    """What a federation looks like; :meth:`build` makes its rounds."""

    seed: int
    dtype: torch.dtype
    kind: Kind
    shapes: tuple[tuple[int, ...], ...]
    exponents: tuple[float, ...]  # log10 of each client's norm
    cosine: float
    counts: tuple[int, ...]

    def build(self, device: torch.device, round: int = 0) -> Federation:
        generator = torch.Generator().manual_seed(self.seed + round)
        sizes = [math.prod(shape) for shape in self.shapes]
        count, width = len(self.exponents), sum(sizes)
        common = torch.randn(1, width, generator=generator, dtype=F64)
        own = torch.randn(count, width, generator=generator, dtype=F64)
        rows = math.sqrt(self.cosine) * common + math.sqrt(1 - self.cosine) * own
        lengths = torch.tensor([10.0**e for e in self.exponents], dtype=F64)
        rows = torch.nn.functional.normalize(rows, dim=1) * lengths.unsqueeze(-1)
        theta = torch.randn(width, generator=generator, dtype=F64)
        theta = (theta * lengths.amax() / math.sqrt(width)).to(self.dtype)
        values = theta.to(F64) - rows if self.kind == "state" else rows
        names = [f"layer{i}.weight" for i in range(len(sizes))]

        def entries(flat: Tensor) -> dict[str, Tensor]:
            parts = flat.to(device, self.dtype).split(sizes)
            return {
                name: part.clone().view(shape)
                for name, part, shape in zip(names, parts, self.shapes, strict=True)
            }

        return Federation(
            entries(theta),
            [
                ClientUpdate(i, n, entries(row), self.kind)
                for i, (n, row) in enumerate(zip(self.counts, values.unbind(), strict=True))
            ],
        )


@dataclass(frozen=True)
class Federation:
    theta: dict[str, Tensor]
    clients: list[ClientUpdate]

    @property
    def rows(self) -> Tensor:
        """(m, d) The clients' actual updates in float64, by client id."""
        return torch.stack(
            [
                flat(self.theta) - flat(client.values)
                if client.kind == "state"
                else flat(client.values)
                for client in sorted(self.clients, key=lambda client: client.client_id)
            ]
        )

    @property
    def rho(self) -> Tensor:
        clients = sorted(self.clients, key=lambda client: client.client_id)
        counts = torch.tensor([client.num_examples for client in clients], dtype=F64)
        return counts / counts.sum()


@st.composite
def plans(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    kinds: Sequence[Kind] = ("state", "update"),
    lowest: float = -16.0,
    highest: float = 9.0,
    smallest: int = 1,
) -> Plan:
    """Federations whose rows are independent unless a dtype makes them equal."""
    dtype = draw(st.sampled_from(dtypes))
    kind = draw(st.sampled_from(kinds))
    count = draw(st.integers(smallest, 7))
    shapes = draw(st.lists(st.sampled_from(SHAPES), max_size=3))
    shapes.insert(draw(st.integers(0, len(shapes))), (count + 1, 3))
    if dtype == torch.float16:  # its own range is 6e-8 to 65504
        lowest, highest = max(lowest, -2.0), min(highest, 4.0)
    # Not within a factor of two of the threshold, where rounding decides.
    exponent = st.floats(lowest, highest, width=32).filter(lambda e: abs(e + 6) > 0.3)
    if kind == "state":  # one scale for all, or theta's rounding swallows the small ones
        exponents = [draw(exponent)] * count
    else:
        exponents = [draw(exponent) for _ in range(count)]
    return Plan(
        seed=draw(st.integers(0, 2**20)),
        dtype=dtype,
        kind=kind,
        shapes=tuple(shapes),
        exponents=tuple(exponents),
        cosine=draw(st.sampled_from((0.0, 0.3, 0.8, 0.95))),
        counts=tuple(draw(st.integers(1, 1000)) for _ in range(count)),
    )


def by_hand(
    device: torch.device,
    *,
    clients: int = 5,
    width: int = 64,
    cosine: float = 0.3,
    seed: int = 0,
    round: int = 0,
    dtype: torch.dtype = F64,
    counts: Sequence[int] | None = None,
    exponents: Sequence[float] | None = None,
    kind: Kind = "update",
    shapes: tuple[tuple[int, ...], ...] | None = None,
) -> Federation:
    return Plan(
        seed=1000 * seed,
        dtype=dtype,
        kind=kind,
        shapes=shapes or ((width,),),
        exponents=tuple(exponents or [0.1 * (i % 7) - 0.3 for i in range(clients)]),
        cosine=cosine,
        counts=tuple(counts or [10 + 7 * i for i in range(clients)]),
    ).build(device, round)


# -- oracles -------------------------------------------------------------------------------------


def flat(entries: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().cpu().to(F64).reshape(-1) for value in entries.values()])


def remembered(rule: Craft, theta: Mapping[str, Tensor]) -> Tensor:
    """The last step, before server_lr, better than the model's dtype could say."""
    known = rule.state_dict()["reference"]
    return flat({name: known[name] for name in theta})


def units(rows: Tensor) -> Tensor:
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)


def direction(vector: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(vector)
    return vector / norm if norm > 0 else vector


def formula(rows: Tensor, rho: Tensor, reference: Tensor | None = None) -> Tensor:
    """g = r + U^+ (rho - U r), with torch.linalg.pinv in float64 as the published code has it."""
    unit = units(rows)
    r = torch.zeros(rows.shape[1], dtype=F64) if reference is None else reference
    return r + torch.linalg.pinv(unit) @ (rho - unit @ r)


def condition(rows: Tensor) -> float:
    return float(torch.linalg.cond(units(rows))) if len(rows) else 1.0


def run(federation: Federation, rule: Craft, round: int | None = None) -> Tensor:
    rule.aggregate(federation.theta, federation.clients, round=round)
    return remembered(rule, federation.theta)


def rule_for(device: torch.device, **options: Any) -> Craft:
    return Craft(**{"server_lr": 1.0, "granularity": "model", "device": device, **options})


def relative(got: Tensor, wanted: Tensor) -> float:
    return float(torch.linalg.vector_norm(got - wanted) / torch.linalg.vector_norm(wanted))


# -- the step ------------------------------------------------------------------------------------


@quick
@given(plan=plans())
def test_feasible_closest_and_applied(plan: Plan, device: torch.device) -> None:
    rule = rule_for(device)
    past = None
    for number in range(2):
        federation = plan.build(device, number)
        rows = federation.rows
        active = torch.linalg.vector_norm(rows, dim=1) >= THRESHOLD
        used = rows[active]
        assume(condition(used) < 100)
        result = rule.aggregate(federation.theta, federation.clients)
        g = remembered(rule, federation.theta)
        double = plan.dtype == F64
        (group,) = result.report.groups
        assert len(group.clients) == len(used)
        if not len(used):  # the paper's rule: a weighted average, and nothing to remember
            assert not g.any()
            g = federation.rho @ rows
            terms = federation.rho @ rows.abs()  # a sum that cancels is as good as its terms
            past = None
        else:
            unit = units(used)
            rho = federation.rho[active] / federation.rho[active].sum()
            r = torch.zeros_like(g) if past is None else direction(past)
            # Feasible.
            residual = (unit @ g - rho).abs().amax()
            assert residual <= (1e-10 if double else 1e-5) * rho.amax()
            assert group.residual == pytest.approx(float(residual), abs=1e-6 * float(rho.amax()))
            # Closest: what was added lies in the row space ...
            moved = g - r
            noise = (1e-10 if double else 1e-6) * (1 + torch.linalg.vector_norm(g))
            pinv = torch.linalg.pinv(unit)
            assert torch.linalg.vector_norm(moved - pinv @ (unit @ moved)) <= noise
            # ... so that no other feasible step is nearer to the reference.
            generator = torch.Generator().manual_seed(plan.seed)
            for size in (1e-3, 1.0):
                other = size * torch.randn(len(g), generator=generator, dtype=F64)
                other -= pinv @ (unit @ other)
                nearer = torch.linalg.vector_norm(moved) - torch.linalg.vector_norm(moved + other)
                assert nearer <= noise
            past, terms = g, g.abs()
        # Applied: theta - server_lr g, rounded once to the model's dtype.
        theta = flat(federation.theta)
        rounding = torch.finfo(plan.dtype).eps * ((theta - g).abs() + (0 if double else 1e-6))
        rounding += torch.finfo(torch.float32).eps * (0 if double else 1) * g.abs()
        rounding += torch.finfo(F64).eps * (theta.abs() + terms)
        assert ((flat(result.state) - (theta - g)).abs() <= rounding).all()


@quick
@given(plan=plans(dtypes=[F64], kinds=["update"]), copies=st.integers(0, 3))
def test_float64_equals_pinv(plan: Plan, copies: int, device: torch.device) -> None:
    rule = rule_for(device)
    past = None
    for number in range(2):
        federation = plan.build(device, number)
        # Duplicates in another length: dependent rows, whose least-squares answer is pinv's too.
        again = [
            ClientUpdate(100 + i, 5, {k: 0.5 * v for k, v in client.values.items()}, "update")
            for i, client in enumerate(federation.clients[:copies])
        ]
        federation = Federation(federation.theta, federation.clients + again)
        active = torch.linalg.vector_norm(federation.rows, dim=1) >= THRESHOLD
        assume(active.any())
        rho = federation.rho[active] / federation.rho[active].sum()
        g = run(federation, rule)
        wanted = formula(federation.rows[active], rho, None if past is None else direction(past))
        assert relative(g, wanted) <= 1e-9
        past = g


@quick
@given(seed=st.integers(0, 1000), count=st.integers(2, 12), rank=st.integers(1, 12))
def test_dependent_rows_of_any_rank_equal_pinv(
    seed: int, count: int, rank: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(rank, 20, generator=generator, dtype=F64)
    rows = torch.randn(count, rank, generator=generator, dtype=F64) @ basis
    values = torch.linalg.svdvals(units(rows))[: min(count, rank)]
    assume(values[-1] > 1e-3 * values[0])
    theta = {"w": torch.zeros(20, dtype=F64, device=device)}
    clients = [ClientUpdate(i, i + 1, {"w": g.to(device)}, "update") for i, g in enumerate(rows)]
    rule = rule_for(device)
    rule.load_state_dict({"reference": {"w": torch.ones(20, dtype=F64)}})
    report = rule.aggregate(theta, clients).report
    g = remembered(rule, theta)
    wanted = formula(rows, Federation(theta, clients).rho, direction(torch.ones(20, dtype=F64)))
    assert relative(g, wanted) <= 1e-9
    (group,) = report.groups
    assert group.rank == min(count, rank)
    assert bool(group.note) is (rank < count)


@quick
@given(plan=plans(), order=st.randoms(use_true_random=False))
def test_order_of_replies_changes_not_a_bit(
    plan: Plan, order: random.Random, device: torch.device
) -> None:
    federation, later = plan.build(device), plan.build(device, 1)
    # Both kinds of values and both kinds of ids at once.
    mixed = [
        ClientUpdate(
            f"client-{c.client_id}" if i % 3 == 1 else c.client_id,
            c.num_examples,
            c.values if i % 2 else {k: federation.theta[k] - v for k, v in c.values.items()},
            "update" if i % 2 else "state",
        )
        for i, c in enumerate(federation.clients)
    ]
    one, two = rule_for(device), rule_for(device)
    for clients in (mixed, later.clients):
        shuffled = list(clients)
        order.shuffle(shuffled)
        first = one.aggregate(federation.theta, clients)
        second = two.aggregate(federation.theta, iter(shuffled))
        assert same(first.state, second.state)
        assert replace(first.report, seconds=0) == replace(second.report, seconds=0)
        assert same(one.state_dict(), two.state_dict())


@quick
@given(
    plan=plans(kinds=["update"], lowest=-3.0, highest=3.0),
    factor=st.sampled_from((0.25, 0.5, 2.0, 16.0, 0.3, 3.7)),
    which=st.integers(0, 6),
    options=st.sampled_from(({}, {"reference": "ema"})),
)
def test_positive_scaling_of_a_client_changes_nothing(
    plan: Plan, factor: float, which: int, options: dict[str, Any], device: torch.device
) -> None:
    if plan.dtype.itemsize == 2:
        # Other factors round each number: the direction is another one then.
        assume(math.log2(factor).is_integer())
        plan = replace(plan, exponents=tuple(min(max(e, 0.5), 2.0) for e in plan.exponents))
    which %= len(plan.counts)
    rules = rule_for(device, **options), rule_for(device, **options)
    for number in range(2):
        federation = plan.build(device, number)
        assume(condition(federation.rows) < 30)
        scaled = [
            replace(c, values={k: v * factor for k, v in c.values.items()}) if i == which else c
            for i, c in enumerate(federation.clients)
        ]
        # Else half types have lost digits at the end of their range.
        assume(relative(Federation({}, scaled).rows[which] / factor, federation.rows[which]) < 1e-6)
        g, h = (
            run(Federation(federation.theta, clients), rule)
            for rule, clients in zip(rules, (federation.clients, scaled), strict=True)
        )
        assert relative(h, g) <= (1e-11 if plan.dtype == F64 else 1e-5)


@quick
@given(
    seed=st.integers(0, 1000),
    dtype=st.sampled_from((torch.float32, F64)),
    cuts=st.lists(st.integers(0, 300), max_size=4),
    states=st.integers(0, 4),
    directions=st.integers(1, 4),
    block=st.integers(8, 4000),
)
def test_gram_of_the_whole_is_the_sum_of_its_shards(
    seed: int,
    dtype: torch.dtype,
    cuts: list[int],
    states: int,
    directions: int,
    block: int,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = states + directions
    table = torch.randn(1 + count, 300, generator=generator).to(device)

    def rows(start: int, stop: int, **options: Any) -> Rows:
        part = table[:, start:stop]
        return Rows(
            [[stop - start]],
            lambda entry, first, last: list(part[:, first:last]),
            states=states,
            directions=directions,
            device=device,
            dtype=dtype,
            **options,
        )

    whole = gram(rows(0, 300))[0]
    edges = [0, *sorted(cuts), 300]
    shards = list(itertools.pairwise(edges))
    total = torch.stack([gram(rows(a, b))[0] for a, b in shards]).sum(0)
    lengths = whole.diagonal().sqrt()
    eps = 1e-14 if dtype == F64 else 1e-6
    assert ((whole - total).abs() / lengths / lengths.unsqueeze(-1)).amax() <= eps
    assert whole.dtype == F64
    blocked = gram(rows(0, 300, block_bytes=block))[0]
    assert ((whole - blocked).abs() / lengths / lengths.unsqueeze(-1)).amax() <= eps

    # The whole step from the sum, shard by shard, against the formula.
    cosines = Cosines(total.cpu()[None], 1 / lengths.cpu()[None])
    rho = torch.full((count,), 1.0 / count, dtype=F64)
    found = solve(cosines, rho[None, :, None], rtol=torch.tensor([1e-15]))
    weights = (found.x.flatten() / lengths.cpu()).to(device).unsqueeze(0)
    step = torch.cat([combine(rows(a, b), weights)[0][: b - a] for a, b in shards])
    clients = table.cpu().to(F64)
    true = torch.cat([clients[0] - clients[1 : 1 + states], clients[1 + states :]])
    assert relative(step.cpu().to(F64), formula(true, rho)) <= (1e-12 if dtype == F64 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("base", DTYPES)
@pytest.mark.parametrize("sent", DTYPES)
def test_differences_are_taken_in_the_blocks_dtype(
    sent: torch.dtype, base: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    """Of small entries, which are stacked first, and of wide ones, on both sides of each other."""
    widths = (3, 20_000, 5, 9_000, 400)
    generator = torch.Generator().manual_seed(0)
    entries = [
        [
            (1000 * torch.randn(width, generator=generator)).to(device, kind)
            for kind in (base, sent, torch.float32, sent)
        ]
        for width in widths
    ]
    rows = Rows(
        [widths],
        lambda entry, start, stop: [value[start:stop] for value in entries[entry]],
        states=2,
        directions=1,
        device=device,
        dtype=dtype,
        block_bytes=1 << 22,
    )
    ((_, block),) = rows.blocks(rows.plan.packs[0])
    exact = []
    for start, *states, direction in [[v.to(dtype) for v in values] for values in entries]:
        exact.append(torch.stack([*(start - state for state in states), direction]))
    # Only float64 values of wide entries may be rounded after the difference instead of before.
    slack = 1e-3 if sent == F64 and dtype != F64 else 0.0
    found = block[:, : sum(widths)]
    torch.testing.assert_close(found, torch.cat(exact, dim=1), rtol=0.0, atol=slack)


@pytest.mark.parametrize("kind", ["state", "update"])
def test_flags_where_numbers_are_expected(
    kind: Literal["state", "update"], device: torch.device
) -> None:
    """Of small and of wide entries alike, true is one."""
    theta = {
        "a": torch.full((9,), 2.0, device=device),
        "b": torch.full((9000,), 2.0, device=device),
    }
    sent = {name: torch.ones_like(value, dtype=torch.bool) for name, value in theta.items()}
    state = FedAvg(device=device).aggregate(theta, [ClientUpdate(0, 1, sent, kind)]).state
    for name in theta:
        assert torch.equal(state[name], torch.ones_like(theta[name]))


# -- what goes in and what comes out -------------------------------------------------------------


def same(one: Any, two: Any) -> bool:
    """Equal bit for bit, down through dicts."""
    if isinstance(one, Tensor):
        return one.dtype == two.dtype and one.device == two.device and torch.equal(one, two)
    if isinstance(one, Mapping):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    return bool(type(one) is type(two) and one == two)


def bytes_of(entries: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """Where each entry's numbers lie: first byte and the one after the last."""
    spans = []
    for value in entries.values():
        if value.numel():
            steps = zip(value.shape, value.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in steps)
            start = value.data_ptr()
            spans.append((start, start + (last + 1) * value.element_size()))
    return spans


def apart(*groups: Mapping[str, Tensor]) -> bool:
    """No two of all the entries share a byte."""
    spans = sorted(span for entries in groups for span in bytes_of(entries))
    return all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))


@quick
@given(plan=plans(lowest=-2.0, highest=2.0), strided=st.booleans())
def test_inputs_stay_untouched_and_nothing_is_shared(
    plan: Plan, strided: bool, device: torch.device
) -> None:
    rule = rule_for(device)
    held: list[Mapping[str, Tensor]] = []
    for number in range(2):
        federation = plan.build(device, number)
        theta = {**federation.theta, "mask": torch.ones(2, dtype=torch.bool, device=device)}
        if strided:  # every other element of a longer tensor
            theta = {
                k: torch.stack([v, v], -1)[..., 0] if v.numel() else v for k, v in theta.items()
            }
        clients = [
            replace(c, values={**c.values, "mask": ~theta["mask"]}) for c in federation.clients
        ]
        given_values = [theta, *(client.values for client in clients)]
        before = [
            {k: (v, v.clone(), v._version, v.stride()) for k, v in values.items()}
            for values in given_values
        ]
        result = rule.aggregate(theta, clients)
        for values, copies in zip(given_values, before, strict=True):
            assert list(values) == list(copies)
            for name, (tensor, copy, version, stride) in copies.items():
                assert values[name] is tensor
                assert tensor._version == version
                assert tensor.stride() == stride
                assert torch.equal(tensor, copy)
        for name, value in theta.items():
            new = result.state[name]
            assert (new.shape, new.dtype, new.device) == (value.shape, value.dtype, value.device)
        assert list(result.state) == list(theta)
        memory = rule.state_dict()["reference"]
        assert apart(result.state, memory, *given_values)
        held.append(result.state)
        # Neither the result nor what state_dict gave is the rule's own memory.
        kept = {name: value.clone() for name, value in memory.items()}
        for value in [*result.state.values(), *memory.values()]:
            value.zero_()
        assert same(rule.state_dict()["reference"], kept)
    assert apart(*held)


def test_each_entry_keeps_its_dtype(device: torch.device) -> None:
    federation = by_hand(device, shapes=((3, 4), (5,), (7, 2), (9,)))
    theta = {
        name: value.to(dtype)
        for (name, value), dtype in zip(federation.theta.items(), DTYPES, strict=True)
    }
    rule = rule_for(device)
    result = rule.aggregate(theta, federation.clients)
    assert [value.dtype for value in result.state.values()] == list(DTYPES)
    wanted = formula(federation.rows, federation.rho)
    assert relative(remembered(rule, theta), wanted) <= 1e-9
    assert relative(flat(theta) - flat(result.state), wanted) <= 1e-2


# -- precision and global switches ---------------------------------------------------------------


def wide(
    device: torch.device, count: int, width: int, cosine: float, seed: int = 0
) -> tuple[dict[str, Tensor], list[ClientUpdate]]:
    """Float32 updates of a chosen cosine; cheap: each is the same noise, rolled to elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    common, noise = torch.randn(2, width, generator=generator).to(device).unbind()
    own = math.sqrt(1 - cosine)
    common *= math.sqrt(cosine)
    clients = [
        ClientUpdate(i, 10 + 3 * i, {"w": (noise.roll(1009 * i) * own).add_(common)}, "update")
        for i in range(count)
    ]
    return {"w": torch.zeros(width, device=device)}, clients


def exact_step(clients: list[ClientUpdate], reference: Tensor | None = None) -> Tensor:
    """The float64 answer, from blocks; r is a unit vector, float64."""
    width = clients[0].values["w"].numel()
    blocks = [slice(start, start + (1 << 18)) for start in range(0, width, 1 << 18)]
    count = len(clients)

    def block(where: slice) -> Tensor:
        return torch.stack([client.values["w"][where].to(F64) for client in clients])

    total = torch.zeros(count, count, dtype=F64, device=clients[0].values["w"].device)
    before = torch.zeros(count, dtype=F64, device=total.device)
    for where in blocks:
        rows = block(where)
        total += rows @ rows.T
        if reference is not None:
            before += rows @ reference[where]
    lengths = total.diagonal().sqrt()
    counts = torch.tensor([client.num_examples for client in clients], dtype=F64).to(total.device)
    cosines = total / lengths / lengths.unsqueeze(-1)
    weights = torch.linalg.solve(cosines, counts / counts.sum() - before / lengths) / lengths
    step = torch.cat([block(where).T @ weights for where in blocks])
    return step if reference is None else step + reference


@pytest.mark.slow
def test_float32_at_fifty_clients_two_million_wide(device: torch.device) -> None:
    theta, clients = wide(device, 50, 2_000_000, 0.95)
    rule = rule_for(device)
    past = None
    for _ in range(2):
        report = rule.aggregate(theta, clients).report
        wanted = exact_step(clients, past)
        got = rule.state_dict()["reference"]["w"].to(F64)
        assert torch.linalg.vector_norm(got - wanted) <= 1e-5 * torch.linalg.vector_norm(wanted)
        (group,) = report.groups
        assert group.rank == 50
        assert group.residual is not None
        assert group.residual <= 1e-5 * (10 + 3 * 49) / sum(10 + 3 * i for i in range(50))
        past = direction(got)
        for client in clients:  # other updates for the second round, in the same memory
            client.values["w"].copy_(client.values["w"].roll(77 * (client.client_id + 1)))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "cosine"), [(1, 0.8), (4, 0.0), (4, 0.8)])
def test_float32_at_nine_million_columns(count: int, cosine: float, device: torch.device) -> None:
    """Beyond 8.39 million columns torch.linalg.pinv in float32 returns zero."""
    theta, clients = wide(device, count, 9_000_000, cosine)
    rule = rule_for(device)
    rule.aggregate(theta, clients)
    got = rule.state_dict()["reference"]["w"].to(F64)
    rho = [client.num_examples / sum(c.num_examples for c in clients) for client in clients]
    for client, target in zip(clients, rho, strict=True):
        row = client.values["w"].to(F64)
        alignment = float(torch.dot(row, got) / torch.linalg.vector_norm(row))
        assert alignment == pytest.approx(target, abs=1e-5 * max(rho))
    wanted = exact_step(clients)
    assert torch.linalg.vector_norm(got - wanted) <= 1e-5 * torch.linalg.vector_norm(wanted)


@pytest.fixture
def global_switches() -> Iterator[None]:
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(dtype)


def two_rounds(
    device: torch.device, dtype: torch.dtype, kind: Kind, **options: Any
) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    rule = rule_for(device, **options)
    states = []
    for number in range(2):
        federation = by_hand(
            device, clients=9, width=5000, cosine=0.6, round=number, dtype=dtype, kind=kind
        )
        theta = {**federation.theta, "running_mean": torch.ones(300, dtype=dtype, device=device)}
        clients = [
            replace(
                client,
                values={
                    **client.values,
                    "running_mean": torch.full((300,), 0.1 * i, dtype=dtype, device=device),
                },
            )
            for i, client in enumerate(federation.clients)
        ]
        states.append(rule.aggregate(theta, clients).state)
    return states, rule.state_dict()


@pytest.mark.parametrize("kind", ["state", "update"])
@pytest.mark.parametrize("entries", DTYPES)
@pytest.mark.parametrize("switch", ["high", "medium", "autocast", "default float64"])
@pytest.mark.usefixtures("global_switches")
def test_global_switches_change_not_a_bit(
    switch: str, entries: torch.dtype, kind: Kind, device: torch.device
) -> None:
    plain, memory = two_rounds(device, entries, kind)
    if switch == "autocast":
        with torch.autocast(device.type, torch.bfloat16):
            switched, other = two_rounds(device, entries, kind)
            assert torch.is_autocast_enabled(device.type)
    elif switch == "default float64":
        torch.set_default_dtype(F64)
        switched, other = two_rounds(device, entries, kind)
        assert torch.get_default_dtype() == F64
    else:
        torch.set_float32_matmul_precision(switch)  # TF32 on a GPU, bfloat16 on some CPUs
        switched, other = two_rounds(device, entries, kind)
        assert torch.get_float32_matmul_precision() == switch
    assert all(same(a, b) for a, b in zip(plain, switched, strict=True))
    assert same(memory, other)


@pytest.mark.parametrize("inside", [False, True])
def test_inference_tensors(inside: bool, device: torch.device) -> None:
    plain = rule_for(device)
    rule = rule_for(device)
    for number in range(3):
        federation = by_hand(device, dtype=torch.float32, round=number, kind="state")
        wanted = plain.aggregate(federation.theta, federation.clients).state
        with torch.inference_mode():
            theta = {name: value.clone() for name, value in federation.theta.items()}
            clients = [
                replace(c, values={name: value.clone() for name, value in c.values.items()})
                for c in federation.clients
            ]
        assert theta["layer0.weight"].is_inference()
        # The second round outside, so that memory made inside is used there.
        with torch.inference_mode(inside and number != 1):
            got = rule.aggregate(theta, clients).state
        assert same(wanted, got)
    assert same(plain.state_dict(), rule.state_dict())


def test_parameters_that_require_grad(device: torch.device) -> None:
    federation = by_hand(device, dtype=torch.float32, kind="state")
    wanted = rule_for(device).aggregate(federation.theta, federation.clients).state
    theta = {name: nn.Parameter(value) for name, value in federation.theta.items()}
    clients = [
        replace(c, values={k: (nn.Parameter(v) * 1.0) for k, v in c.values.items()})
        for c in federation.clients
    ]
    rule = rule_for(device)
    with torch.enable_grad():
        got = rule.aggregate(theta, clients).state
        assert torch.is_grad_enabled()
    assert same(wanted, got)
    assert all(type(value) is Tensor and not value.requires_grad for value in got.values())
    assert not any(v.requires_grad for v in rule.state_dict()["reference"].values())


# -- thresholds and what cancels -----------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.0, 1e-6, 0.05, 10.0])
def test_norm_threshold(threshold: float, device: torch.device, dtype: torch.dtype) -> None:
    lengths = [0.01, 0.1, 1.0, 5.0]
    federation = by_hand(device, clients=4, exponents=[math.log10(n) for n in lengths], dtype=dtype)
    active = torch.tensor([n >= threshold for n in lengths])
    rule = rule_for(device, norm_threshold=threshold)
    result = rule.aggregate(federation.theta, federation.clients)
    (group,) = result.report.groups
    assert group.clients == tuple(i for i in range(4) if active[i])
    assert group.inactive == tuple(i for i in range(4) if not active[i])
    if active.any():
        rho = federation.rho[active] / federation.rho[active].sum()
        wanted = formula(federation.rows[active], rho)
        assert relative(remembered(rule, federation.theta), wanted) <= 1e-5
    else:
        assert "weighted average" in group.note
        assert group.residual is None
        moved = flat(federation.theta) - flat(result.state)
        assert relative(moved, federation.rho @ federation.rows) <= 50 * torch.finfo(dtype).eps


@pytest.mark.parametrize("exponent", [-120.0, -30.0, 30.0, 120.0])
def test_float64_lengths_far_beyond_float32(exponent: float, device: torch.device) -> None:
    federation = by_hand(device, clients=3, exponents=[exponent, exponent + 2, exponent - 1])
    rule = rule_for(device, norm_threshold=0.0)
    wanted = formula(federation.rows, federation.rho)
    assert relative(run(federation, rule), wanted) <= 1e-9


@pytest.mark.parametrize("kind", ["state", "update"])
@pytest.mark.parametrize("client_length", [None, 1.0])
@pytest.mark.parametrize("entries", DTYPES)
def test_what_cancels_is_exactly_zero(
    entries: torch.dtype, client_length: float | None, kind: Kind, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(3)
    row = torch.randn(50, generator=generator).to(device, entries)
    theta = {"w": torch.zeros(50, dtype=entries, device=device)}
    clients = [ClientUpdate(i, 5, {"w": sign * row}, kind) for i, sign in enumerate((1, -2))]
    rule = rule_for(device, client_length=client_length)
    result = rule.aggregate(theta, clients)
    assert same(result.state, theta)
    assert not remembered(rule, theta).any()
    (group,) = result.report.groups
    assert group.step_norm == 0
    assert group.conflicts_after == ()
    # The next round has no reference, and says so.
    federation = by_hand(device, width=50, dtype=entries)
    federation = Federation(theta, [replace(c, values={"w": c.values["layer0.weight"]})
                                    for c in federation.clients])  # fmt: skip
    report = rule.aggregate(theta, federation.clients).report
    assert report.groups[0].cosine_to_reference is None
    if client_length is None:
        wanted = formula(federation.rows, federation.rho)
        assert relative(remembered(rule, theta), wanted) <= 1e-5


# -- options -------------------------------------------------------------------------------------

TARGETS = {
    "examples": lambda counts: counts,
    "uniform": torch.ones_like,
    "sqrt": torch.sqrt,
    "callable": lambda counts: counts**2,
}


def targets_option(name: str) -> Any:
    if name == "callable":
        return lambda clients: [client.num_examples**2 for client in clients]
    return name


@pytest.mark.parametrize("name", TARGETS)
def test_targets(name: str, device: torch.device) -> None:
    rule = rule_for(device, targets=targets_option(name))
    past = None
    for number in range(3):
        # One client is inactive: the targets are renormalised over the others.
        federation = by_hand(device, round=number, exponents=[0.0, 0.3, -9.0, -0.4, 0.1])
        active = torch.tensor([True, True, False, True, True])
        raw = TARGETS[name](federation.rho)[active]
        wanted = formula(federation.rows[active], raw / raw.sum(), past)
        g = run(federation, rule)
        assert relative(g, wanted) <= 1e-9
        past = direction(g)


@pytest.mark.parametrize("bad", [[1.0, 2.0], [1.0] * 6, [1, 1, 1, 1, 0.0], [1, 1, 1, 1, math.nan]])
def test_targets_that_are_no_targets(bad: list[float], device: torch.device) -> None:
    federation = by_hand(device)
    rule = rule_for(device, targets=lambda clients: bad)
    before = rule.state_dict()
    with pytest.raises(OptionError, match="targets"):
        rule.aggregate(federation.theta, federation.clients)
    assert same(before, rule.state_dict())


@pytest.mark.parametrize("length", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("cosine", [0.0, 0.9, 1 - 1e-7])
def test_client_length(name: str, length: float, cosine: float, device: torch.device) -> None:
    rule = rule_for(device, targets=targets_option(name), client_length=length)
    past = None
    for number in range(3):
        federation = by_hand(device, round=number, cosine=cosine)
        unit = units(federation.rows)
        rho = TARGETS[name](federation.rho)
        rho = rho / rho.sum()
        kernel = unit @ unit.T
        targets = length * rho / (rho @ torch.linalg.pinv(kernel, hermitian=True) @ rho).sqrt()
        g = run(federation, rule)
        loose = 1e-9 if cosine < 0.99 else 1e-6
        own = torch.linalg.pinv(unit) @ targets
        assert torch.linalg.vector_norm(own) == pytest.approx(length, rel=loose)
        assert relative(g, formula(federation.rows, targets, past)) <= loose
        assert (unit @ g - targets).abs().amax() <= loose * targets.amax()
        assert (unit @ g > 0).all()
        assert torch.linalg.vector_norm(g) <= math.sqrt(1 + length**2) + 1e-9
        past = direction(g)


@pytest.mark.parametrize("dependent", [False, True])
def test_client_length_bounds_the_step(dependent: bool, device: torch.device) -> None:
    """However nearly parallel, or dependent, the clients are; in float32."""
    rule = rule_for(device, client_length=1.0)
    for number in range(4):
        cosine = 1 - 10.0 ** -(number + 2)
        federation = by_hand(device, cosine=cosine, round=number, dtype=torch.float32)
        clients = federation.clients
        if dependent:
            clients = clients + [replace(c, client_id=50 + i) for i, c in enumerate(clients)]
        g = run(Federation(federation.theta, clients), rule)
        assert torch.linalg.vector_norm(g) <= math.sqrt(2) + 1e-5


@pytest.mark.parametrize("client_length", [None, 1.0])
def test_zero_reference_and_uniform_targets_are_configs_direction(
    client_length: float | None, device: torch.device
) -> None:
    rule = rule_for(device, reference="zero", targets="uniform", client_length=client_length)
    for number in range(3):
        federation = by_hand(device, round=number)
        result = rule.aggregate(federation.theta, federation.clients)
        g = flat(federation.theta) - flat(result.state)
        config = direction(torch.linalg.pinv(units(federation.rows)) @ torch.ones(5, dtype=F64))
        torch.testing.assert_close(direction(g), config, rtol=0, atol=1e-10)
        if client_length is not None:
            torch.testing.assert_close(g, config, rtol=0, atol=1e-10)
        assert result.report.groups[0].cosine_to_reference is None
        assert rule.state_dict()["reference"] == {}


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_ema_reference(beta: float, device: torch.device) -> None:
    rule = rule_for(device, reference="ema", beta=beta)
    average = torch.zeros(64, dtype=F64)
    for number in range(4):
        federation = by_hand(device, round=number)
        wanted = formula(federation.rows, federation.rho, direction(average))
        result = rule.aggregate(federation.theta, federation.clients)
        assert relative(flat(federation.theta) - flat(result.state), wanted) <= 1e-9
        average = beta * average + (1 - beta) * direction(wanted)
        assert relative(remembered(rule, federation.theta), average) <= 1e-9


# -- step lengths -------------------------------------------------------------------------------


@pytest.mark.parametrize("server_lr", [1.0, 0.25])
@pytest.mark.parametrize("scale", ["unit", "client_norm", "mean", "steady"])
def test_scale(scale: str, server_lr: float, device: torch.device) -> None:
    rule = rule_for(device, scale=scale, server_lr=server_lr)
    steady = None
    past = None
    for number in range(6):
        # Lengths that jump up, then fall: the growth bound holds, then the average.
        jump = (0.0, 1.0, 1.0, -1.0, -1.0, 0.01)[number]
        exponents = [jump + e for e in (0.0, -0.3, 0.2, 0.4, -9.0, 0.1)]
        federation = by_hand(device, clients=6, exponents=exponents, round=number)
        active = [0, 1, 2, 3, 5]
        rows, rho = federation.rows[active], federation.rho[active]
        rho = rho / rho.sum()
        g = formula(rows, rho, past)
        norms = torch.linalg.vector_norm(rows, dim=1)
        if scale == "unit":
            length = float(torch.linalg.vector_norm(g))
        elif scale == "client_norm":
            length = float(rho @ norms)
        elif scale == "mean":
            length = float(torch.linalg.vector_norm(rho @ rows))
        else:
            median = float(norms.median())  # of five: no choice to make
            follow = 0.1 * median + 0.9 * (steady or median)
            length = steady = min(follow, 1.02 * (steady or median))
        result = rule.aggregate(federation.theta, federation.clients)
        moved = flat(federation.theta) - flat(result.state)
        assert relative(moved, server_lr * length * direction(g)) <= 1e-9
        assert relative(remembered(rule, federation.theta), g) <= 1e-9
        past = direction(g)
    if scale == "steady":
        assert rule.state_dict()["lengths"] == {"model": pytest.approx(steady, rel=1e-12)}


def test_steady_with_an_even_number_of_clients(device: torch.device) -> None:
    """The median of 1, 3, 5, 100 is 4, whichever convention: between the middle two."""
    lengths = [1.0, 3.0, 5.0, 100.0]
    federation = by_hand(device, clients=4, exponents=[math.log10(n) for n in lengths])
    rule = rule_for(device, scale="steady")
    rule.aggregate(federation.theta, federation.clients)
    assert 3 * (1 - 1e-9) <= rule.state_dict()["lengths"]["model"] <= 5 * (1 + 1e-9)


def test_default_server_lr() -> None:
    assert Craft().server_lr == 0.1
    assert Craft(scale="steady").server_lr == Craft(scale="client_norm").server_lr == 1.0


LAYERS = {
    "conv.weight": (2, 1, 2, 2),
    "conv.bias": (2,),
    "norm.weight": (2,),
    "norm.bias": (2,),
    "head.weight": (3, 4),
    "head.bias": (3,),
}
GROUPS = {
    "layer": [
        ["conv.weight", "conv.bias", "norm.weight", "norm.bias"],
        ["head.weight", "head.bias"],
    ],
    "model": [list(LAYERS)],
    "tensor": [[name] for name in LAYERS],
    "callable": [[n for n in LAYERS if n.endswith(leaf)] for leaf in ("weight", "bias")],
}


@pytest.mark.parametrize("granularity", GROUPS)
def test_granularity(granularity: str, device: torch.device) -> None:
    rule = rule_for(
        device,
        granularity=(lambda n: n.rpartition(".")[2]) if granularity == "callable" else granularity,
    )
    past: dict[int, Tensor] = {}
    for number in range(2):
        federation = by_hand(device, clients=2, shapes=tuple(LAYERS.values()), round=number)
        names = dict(zip(federation.theta, LAYERS, strict=True))
        theta = {names[k]: v for k, v in federation.theta.items()}
        clients = [
            replace(c, values={names[k]: v for k, v in c.values.items()})
            for c in federation.clients
        ]
        result = rule.aggregate(theta, clients)
        assert len(result.report.groups) == len(GROUPS[granularity])
        for q, entries in enumerate(GROUPS[granularity]):
            rows = torch.stack([flat({n: c.values[n] for n in entries}) for c in clients])
            wanted = formula(rows, federation.rho, past.get(q))
            group = {n: theta[n] for n in entries}
            moved = flat(group) - flat({n: result.state[n] for n in entries})
            assert relative(moved, wanted) <= 1e-9
            assert relative(remembered(rule, group), wanted) <= 1e-9
            assert result.report.groups[q].width == rows.shape[1]
            past[q] = direction(wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"server_lr": 0.0},
        {"server_lr": math.nan},
        {"norm_threshold": -1.0},
        {"reference": "last"},
        {"beta": 1.0},
        {"targets": "sizes"},
        {"client_length": 0.0},
        {"client_length": math.inf},
        {"scale": "unitary"},
        {"granularity": "block"},
        {"on_nonfinite": "ignore"},
        {"device": "abacus"},
    ],
)
def test_option_values_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        Craft(**options)


# -- the warning owed to users of the published setting ------------------------------------------


def agreement_warnings(
    device: torch.device, rule: Craft, rounds: range, clients: int = 10, **shape: Any
) -> list[int]:
    """The rounds in which the rule warned."""
    warned = []
    for number in rounds:
        federation = by_hand(
            device, clients=clients, counts=[5] * clients, round=number, dtype=F64, **shape
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rule.aggregate(federation.theta, federation.clients)
        assert all(issubclass(item.category, AgreementWarning) for item in caught)
        warned += [number] * len(caught)
    return warned


def test_agreement_is_warned_of_once(device: torch.device) -> None:
    rule = rule_for(device)
    warned = agreement_warnings(device, rule, range(10), cosine=0.8)
    assert len(warned) == 1
    assert warned[0] >= 1  # "for several rounds"


def test_agreement_warning_names_the_options_and_the_callers_line(device: torch.device) -> None:
    rule = rule_for(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(5):
            federation = by_hand(device, clients=10, cosine=0.8, round=number)
            rule.aggregate(federation.theta, federation.clients)
    (warning,) = caught
    for option in ("'craft_balanced'", "client_length=1", "targets='sqrt'"):
        assert option in str(warning.message)
    assert Path(warning.filename).name == Path(__file__).name


@pytest.mark.parametrize("options", [{"client_length": 1.0}, {"reference": "zero"}])
def test_no_agreement_warning_outside_the_published_setting(
    options: dict[str, Any], device: torch.device
) -> None:
    rule = rule_for(device, **options)
    assert agreement_warnings(device, rule, range(6), cosine=0.8) == []


@pytest.mark.parametrize("width", [20, 400])
@pytest.mark.parametrize("clients", [2, 10, 100])
def test_no_agreement_warning_for_unrelated_clients(
    clients: int, width: int, device: torch.device
) -> None:
    """Also where there are more of them than coordinates."""
    rule = rule_for(device)
    assert agreement_warnings(device, rule, range(6), clients, width=width, cosine=0.0) == []


def test_agreement_must_last(device: torch.device) -> None:
    rule = rule_for(device)
    for start in range(0, 12, 3):
        assert agreement_warnings(device, rule, range(start, start + 2), cosine=0.8) == []
        assert agreement_warnings(device, rule, range(start + 2, start + 3), cosine=0.0) == []


def test_agreement_warning_survives_a_restart(device: torch.device, tmp_path: Path) -> None:
    plain = agreement_warnings(device, rule_for(device), range(8), cosine=0.8)
    warned = []
    for number in range(8):
        rule = rule_for(device)
        if number:
            rule.load(tmp_path / "state")
        warned += agreement_warnings(device, rule, range(number, number + 1), cosine=0.8)
        rule.save(tmp_path / "state")
    assert warned == plain
    assert len(plain) == 1


# -- the report ----------------------------------------------------------------------------------


@quick
@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 12),
    width=st.sampled_from((2, 5, 9, 40)),
    cosine=st.sampled_from((0.0, 0.2, 0.8)),
)
def test_report_by_brute_force(
    seed: int, count: int, width: int, cosine: float, device: torch.device
) -> None:
    rule = rule_for(device, scale="client_norm")
    past = None
    for number in range(2):
        federation = by_hand(
            device, clients=count, width=width, cosine=cosine, seed=seed, round=number
        )
        unit = units(federation.rows)
        values = torch.linalg.eigvalsh(unit @ unit.T)
        rank = min(count, width)
        assume(values[-rank] > 1e-5 * values[-1])
        report = rule.aggregate(federation.theta, federation.clients).report
        (group,) = report.groups
        g = remembered(rule, federation.theta)
        assert report.rule == "craft"
        assert report.round == number
        assert report.clients == group.clients == tuple(range(count))
        assert group.width == width
        assert group.residual == pytest.approx(
            float((unit @ g - federation.rho).abs().amax()), abs=1e-9
        )
        pairs = [(unit[i] @ unit[j]).item() for i in range(count) for j in range(i)]
        against = (unit @ g).tolist()
        assume(min(map(abs, pairs + against), default=1.0) > 1e-9)
        assert group.conflicts_before == report.conflicts_before == sum(p < 0 for p in pairs)
        assert group.conflicts_after == tuple(i for i, a in enumerate(against) if a < 0)
        assert report.conflicts_after == len(group.conflicts_after)
        assert group.step_norm == pytest.approx(float(torch.linalg.vector_norm(g)), rel=1e-9)
        if past is None:
            assert group.cosine_to_reference is None
        else:
            cosine_now = float(direction(g) @ past)
            assert group.cosine_to_reference == pytest.approx(cosine_now, abs=1e-9)
        assert group.rank == rank
        assert group.eigenvalue_max == pytest.approx(float(values[-1]), rel=0.2)
        assert group.eigenvalue_min == pytest.approx(float(values[-rank]), rel=0.2)
        ones = torch.ones(count, dtype=F64)
        if rank == count:
            inverse = torch.linalg.pinv(unit @ unit.T, hermitian=True)
            consensus = float(1 / (ones @ inverse @ ones).sqrt())
            assert group.consensus == pytest.approx(consensus, rel=1e-6)
        assert json.loads(json.dumps(report.to_dict()))["groups"][0]["rank"] == rank
        past = direction(g)


@quick
@given(seed=st.integers(0, 1000), count=st.integers(2, 12), width=st.integers(1, 8))
def test_consensus_is_a_cosine(seed: int, count: int, width: int, device: torch.device) -> None:
    """No direction has a cosine above 1 with anybody, dependent rows or not."""
    federation = by_hand(device, clients=count, width=width, cosine=0.0, seed=seed)
    rule = rule_for(device)
    (group,) = rule.aggregate(federation.theta, federation.clients).report.groups
    assert group.consensus is None or 0 <= group.consensus <= 1 + 1e-9


@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("count", [3, 30, 100])
def test_eigenvalues_where_cholesky_served(count: int, cosine: float, device: torch.device) -> None:
    federation = by_hand(device, clients=count, width=600, cosine=cosine)
    (group,) = rule_for(device).aggregate(federation.theta, federation.clients).report.groups
    unit = units(federation.rows)
    values = torch.linalg.eigvalsh(unit @ unit.T)
    assert group.eigenvalue_max == pytest.approx(float(values[-1]), rel=0.2)
    assert group.eigenvalue_min == pytest.approx(float(values[0]), rel=0.2)


def test_report_of_dependent_clients_lists_who_conflicts(device: torch.device) -> None:
    theta = {"w": torch.zeros(2, dtype=F64, device=device)}
    rows = torch.tensor([[1.0, 0.0], [-3.0, 0.0]], dtype=F64, device=device)
    clients = [ClientUpdate(i, n, {"w": rows[i]}, "update") for i, n in enumerate((1, 3))]
    report = rule_for(device).aggregate(theta, clients).report
    (group,) = report.groups
    assert group.rank == 1
    assert "not guaranteed" in group.note
    assert (group.conflicts_before, group.conflicts_after) == (1, (0,))
    assert group.consensus is None  # no direction at all
    assert json.loads(json.dumps(report.to_dict()))["conflicts_after"] == 1
