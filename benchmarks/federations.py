"""What the benchmark aggregates: models of known shapes and clients that are random but related."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from craft_adapters import Aggregator, ClientUpdate, Layout, get_aggregator
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
        model: A name of ``get_model``, or "wide": a single layer; "small": one for tests.
        clients: Number of clients.
        repetitions: Of our call and of FedML's averaging; the best one counts.
        published: Repetitions of the published rule, which takes up to minutes.
        slow: Whether ``--quick`` leaves the published rule out.
        default: Whether the row is in the table without ``--rows``.
        min_speedup: Bar: the published rule takes at least so many times our time.
        max_slowdown: Bar: we take at most so many times FedML's averaging's time.
    """

    name: str
    model: str
    clients: int
    repetitions: int
    published: int = 1
    slow: bool = False
    default: bool = True
    min_speedup: float | None = None
    max_slowdown: float | None = None


ROWS = (
    Row("resnet20x10", "resnet20", 10, repetitions=25, published=5, max_slowdown=5.0),
    Row("resnet20x100", "resnet20", 100, repetitions=10, published=3),
    Row("resnet56x10", "resnet56", 10, repetitions=15, published=3),
    Row("resnet56x100", "resnet56", 100, repetitions=7, published=2),
    Row("resnet110x10", "resnet110", 10, repetitions=10, published=3),
    Row(
        "resnet110x100",
        "resnet110",
        100,
        repetitions=7,
        published=2,
        min_speedup=8.0,
        max_slowdown=3.0,
    ),
    Row("widex10", "wide", 10, repetitions=5, slow=True),
    Row("widex100", "wide", 100, repetitions=3, slow=True, min_speedup=25.0),
    Row("tinyx3", "small", 3, repetitions=2, default=False),
    Row("tinyx5", "small", 5, repetitions=2, slow=True, default=False),
)
"""All rows, in the order of the table."""

_LAYERS = {"wide": (2000, 2500), "small": (8, 16)}


@dataclass(frozen=True, slots=True)
class Federation:
    """A global model, its layers, and what the clients sent: float32 tensors in memory."""

    state: dict[str, Tensor]
    layout: Layout
    updates: list[ClientUpdate]

    @property
    def shares(self) -> Tensor:
        """rho, (clients,), float64."""
        counts = torch.tensor([u.num_examples for u in self.updates], dtype=torch.float64)
        return counts / counts.sum()

    @property
    def widths(self) -> list[int]:
        """Coordinates of each layer group."""
        return [sum(self.state[e].numel() for e in g.entries) for g in self.layout.groups]

    @property
    def largest_block(self) -> int:
        """Bytes of the clients' values of the widest group."""
        return len(self.updates) * max(self.widths) * torch.float32.itemsize


def federation(row: Row, *, clients: int | None = None, seed: int = 0) -> Federation:
    """The model of a row and its clients; ``clients`` overrides their number."""
    state = _model(row.model)
    number = row.clients if clients is None else clients
    generator = torch.Generator().manual_seed(1000 + seed)
    common = {name: torch.empty_like(t).normal_(generator=generator) for name, t in state.items()}
    updates = []
    for client in range(number):
        examples = int(torch.randint(50, 500, (), generator=generator))
        updates.append(ClientUpdate(client, examples, _client(state, common, generator)))
    return Federation(state, Layout.infer(state), updates)


def _model(name: str) -> dict[str, Tensor]:
    if name in _LAYERS:
        generator = torch.Generator().manual_seed(0)
        weight = torch.empty(_LAYERS[name]).normal_(std=5 * STEP, generator=generator)
        return {"layer.weight": weight}
    model = get_model(name, seed=0)
    return {entry: tensor.detach() for entry, tensor in model.state_dict().items()}


def _client(
    state: Mapping[str, Tensor], common: Mapping[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """One client's model. In place: a hundred clients of the wide layer are 2 GB as they are."""
    length = STEP * (0.5 + float(torch.rand((), generator=generator)))
    values = {}
    for name, base in state.items():
        value = torch.empty_like(base).normal_(generator=generator)
        value.mul_(length * math.sqrt(1 - COSINE))
        values[name] = value.add_(common[name], alpha=length * math.sqrt(COSINE)).add_(base)
    return values


def craft_with_reference(row: Row) -> Aggregator:
    """CRAFT after a first round, as it is in all later ones: with a reference."""
    first = federation(row, clients=FIRST_CLIENTS, seed=FIRST_SEED)
    aggregator = get_aggregator("craft")
    aggregator.aggregate(first.state, first.updates)
    return aggregator
