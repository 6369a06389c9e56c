"""What the benchmarks aggregate: models of known shapes and clients that are random but related."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from craft_adapters import Aggregator, ClientUpdate, Layout
from craft_adapters.models import get_model

# Cosine between two clients' updates of a layer. Clients of one federation are rarely orthogonal
# (0) or of one mind (1); their updates are independent for sure.
COSINE = 0.3
# Spread of one coordinate of an update; weights have about five times as much.
STEP = 0.01
# The first round's clients: any that the measured ones are not made of.
FIRST_CLIENTS, FIRST_SEED = 3, 1


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        name: What ``--rows`` calls it.
        model: A name of ``get_model``, or one of ``_SINGLE_LAYERS``.
        clients: Number of clients.
        repetitions: Of our call and of the averages; the best one counts.
        published: Repetitions of the published rule, which takes up to minutes.
        quick: Whether the row is in the table with ``--quick``.
        slow: Whether ``--quick`` leaves out the rules that take an SVD.
        default: Whether the row is in the table without ``--rows``.
        bars: Bars of this row alone: a key of ``aggregate.RATIOS`` -> number.
    """

    name: str
    model: str
    clients: int
    repetitions: int
    published: int = 1
    quick: bool = False
    slow: bool = False
    default: bool = True
    bars: Mapping[str, float] = field(default_factory=dict)


ROWS = (
    Row(
        "resnet20x10",
        "resnet20",
        10,
        repetitions=25,
        published=5,
        quick=True,
        bars={"ours_over_floor": 3.0, "ours_over_fedml": 3.0},
    ),
    Row("resnet20x100", "resnet20", 100, repetitions=10, published=3, quick=True, slow=True),
    Row("resnet56x10", "resnet56", 10, repetitions=15, published=3),
    Row("resnet56x100", "resnet56", 100, repetitions=7, published=2),
    Row("resnet110x10", "resnet110", 10, repetitions=10, published=3, quick=True, slow=True),
    Row(
        "resnet110x100",
        "resnet110",
        100,
        repetitions=7,
        published=2,
        bars={"ours_over_floor": 1.5, "ours_over_fedml": 2.0, "published_over_ours": 12.0},
    ),
    Row("widex10", "wide", 10, repetitions=5, quick=True, slow=True, bars={"ours_over_floor": 1.5}),
    Row(
        "widex100",
        "wide",
        100,
        repetitions=3,
        slow=True,
        bars={"ours_over_floor": 1.5, "published_over_ours": 40.0},
    ),
    Row("widestx10", "widest", 10, repetitions=3, slow=True),
    Row("tinyx3", "tiny", 3, repetitions=2, default=False),
    Row("tinyx5", "tiny", 5, repetitions=2, slow=True, default=False),
)
"""All rows, in the order of the table."""

# "widest" is where the published cut-off, which grows with the width, drops every direction.
_SINGLE_LAYERS = {"wide": (2000, 2500), "widest": (3000, 3000), "tiny": (8, 16)}


def rows_named(names: Sequence[str]) -> list[Row]:
    """Rows of these names; for a name that is none, those that start so."""
    exact = {row.name for row in ROWS} & set(names)  # resnet20x10 is not resnet20x100 as well
    starts = tuple(name for name in names if name not in exact)
    return [row for row in ROWS if row.name in exact or row.name.startswith(starts)]


@dataclass(frozen=True, slots=True)
class Federation:
    """A global model, its layers, and what the clients sent: float32 tensors on one device."""

    state: dict[str, Tensor]
    layout: Layout
    updates: list[ClientUpdate]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(iter(self.state.values())).device

    @property
    def shares(self) -> Tensor:
        """rho, (clients,), float64, on the CPU."""
        counts = torch.tensor([u.num_examples for u in self.updates], dtype=torch.float64)
        return counts / counts.sum()

    @property
    def entries(self) -> list[str]:
        """All entries that are projected, layer by layer."""
        return [entry for group in self.layout.groups for entry in group.entries]

    @property
    def widths(self) -> list[int]:
        """Coordinates of each layer group."""
        return [sum(self.state[e].numel() for e in g.entries) for g in self.layout.groups]

    @property
    def largest_block(self) -> int:
        """Bytes of the clients' values of the widest group."""
        return len(self.updates) * max(self.widths) * torch.float32.itemsize

    def to(self, device: torch.device) -> Federation:
        """The same on another device."""
        state = {entry: value.to(device) for entry, value in self.state.items()}
        updates = [
            ClientUpdate(
                u.client_id, u.num_examples, {e: v.to(device) for e, v in u.values.items()}
            )
            for u in self.updates
        ]
        return Federation(state, self.layout, updates)


def federation(
    state: dict[str, Tensor], clients: int, *, cosine: float = COSINE, seed: int = 0
) -> Federation:
    """Clients around a global model, any two of them with about this cosine in every layer."""
    generator = torch.Generator().manual_seed(1000 + seed)
    common = {name: torch.empty_like(t).normal_(generator=generator) for name, t in state.items()}
    # For the rules that need more than models and counts.
    losses = 0.1 + 3 * torch.rand(clients, generator=torch.Generator().manual_seed(seed))
    updates = []
    for client, loss in enumerate(losses.tolist()):
        examples = int(torch.randint(50, 500, (), generator=generator))
        values = _client(state, common, cosine, generator)
        steps = -(-examples // 20)
        updates.append(ClientUpdate(client, examples, values, loss=loss, local_steps=steps))
    return Federation(state, Layout.infer(state), updates)


def model(name: str) -> dict[str, Tensor]:
    """The global model of a row."""
    if name in _SINGLE_LAYERS:
        return layers(1, math.prod(_SINGLE_LAYERS[name]))
    return {entry: t.detach() for entry, t in get_model(name, seed=0).state_dict().items()}


def layers(groups: int, width: int) -> dict[str, Tensor]:
    """A model of equal layers without biases."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"layer{i}.weight": torch.empty(1, width).normal_(std=5 * STEP, generator=generator)
        for i in range(groups)
    }


def after_first_round(aggregator: Aggregator, state: dict[str, Tensor]) -> Aggregator:
    """A rule as it is in all rounds but the first: with a reference."""
    first = federation(state, FIRST_CLIENTS, seed=FIRST_SEED)
    aggregator.aggregate(first.state, first.updates)
    return aggregator


def _client(
    state: Mapping[str, Tensor],
    common: Mapping[str, Tensor],
    cosine: float,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """One client's model. In place: a hundred clients of the wide layer are 2 GB as they are."""
    length = STEP * (0.5 + float(torch.rand((), generator=generator)))
    values = {}
    for name, base in state.items():
        value = torch.empty_like(base).normal_(generator=generator)
        value.mul_(length * math.sqrt(1 - cosine))
        values[name] = value.add_(common[name], alpha=length * math.sqrt(cosine)).add_(base)
    return values
