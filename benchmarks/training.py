"""Local training: both engines of the federation against a plain loop over the clients.

    python benchmarks/training.py [--quick] [--device cpu] [--out DIR]

One round of each: the same clients, examples, batch size and model. Times are the best of a few
repetitions, taken in turns in one process. ``auto`` is the engine that the federation picks for
itself, after it has picked it. The plain loop is what published codes do: for each client a copy
of the model, a ``DataLoader`` over its examples, ``torch.optim.SGD``, and a copy of the weights.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import report
import torch
from timing import Contestant, Measured, race
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from craft_adapters.models import get_model
from craft_adapters.simulation import (
    Dataset,
    Federation,
    Job,
    LocalTraining,
    Split,
    dirichlet_partition,
    train_test_split,
)


@dataclass(frozen=True)
class Row:
    """A model, the shape of its inputs, and how many clients train in the round."""

    model: str
    shape: tuple[int, ...]
    classes: int
    clients: int
    bars: tuple[tuple[str, float], ...] = ()
    """(device, how many times the plain loop's time is to be auto's, at least)"""


ROWS = (
    Row("mlp", (1, 28, 28), 62, 100, (("cpu", 3.0),)),
    Row("resnet20", (3, 32, 32), 10, 10, (("cpu", 1.0),)),
    Row("resnet20", (3, 32, 32), 10, 100, (("cuda", 10.0),)),
)
QUICK = (Row("mlp", (1, 28, 28), 62, 5),)
# Examples of a client, on average: the paper's 60,000 over 1000.
EXAMPLES = 60
REPETITIONS = 3


def main(argv: list[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    rows = QUICK if options.quick else [r for r in ROWS if device.type in dict(r.bars)]
    about = {**report.about(device), "quick": options.quick}
    results = []
    for row in rows:
        report.progress(f"{row.model}, {row.clients} clients")
        results.append(_measure(row, device, 1 if options.quick else REPETITIONS))
    about["load_after"] = report.load()
    text = "\n".join([_table(results), "", *_bars(results), report.machine(about)])
    report.publish("training", text, {"about": about, "rows": results}, options.out)
    return 0


def _measure(row: Row, device: torch.device, repetitions: int) -> Measured:
    dataset, split = _data(row)
    dataset = dataset.to(device)
    model = get_model(row.model, num_classes=row.classes, input_shape=row.shape, seed=0)
    training = LocalTraining(lr=0.05, batch_size=20)
    clients = range(row.clients)
    plain(model, dataset, split, clients[:1], training)  # what is imported and made once
    racing: dict[str, Contestant | str] = {
        "plain": _contestant(lambda: plain(model, dataset, split, clients, training), repetitions)
    }
    for engine, play in engines(dataset, split, model, training, clients).items():
        racing[engine] = _contestant(play, repetitions)
    times = race(racing, device)
    steps = sum(-(-len(split.train[client]) // 20) for client in clients)
    examples = sum(len(split.train[client]) for client in clients)
    return {
        "model": row.model,
        "clients": row.clients,
        "steps": steps,
        "examples": examples,
        "times": times,
        "plain_over": {
            name: times["plain"]["seconds"] / time["seconds"]
            for name, time in times.items()
            if name != "plain" and "seconds" in time
        },
        "bar": dict(row.bars).get(device.type),
    }


def engines(
    dataset: Dataset,
    split: Split,
    model: nn.Module,
    training: LocalTraining,
    clients: Sequence[int],
    names: Sequence[str] = ("loop", "many", "auto"),
) -> dict[str, Callable[[], Any]]:
    """Engine -> one round of these clients on it; each has played a round, to warm up."""
    made: dict[str, Callable[[], Any]] = {}
    for name in names:
        engine: Any = name
        federation = Federation(dataset, split, model, replace(training, engine=engine), seed=0)
        state = {k: v.to(dataset.x.device) for k, v in model.state_dict().items()}
        jobs = [Job(client, state) for client in clients]

        def play(federation: Federation = federation, jobs: list[Job] = jobs) -> Any:
            return federation.train(jobs, round=0)

        play()
        made[name] = play
    return made


def plain(
    model: nn.Module,
    dataset: Dataset,
    split: Split,
    clients: Sequence[int],
    training: LocalTraining,
) -> list[dict[str, torch.Tensor]]:
    """One client after the other, as published codes do it."""
    device = dataset.x.device
    trained = []
    for client in clients:
        own = torch.from_numpy(split.train[client]).to(device)
        examples = TensorDataset(dataset.inputs(own), dataset.y[own])
        local = copy.deepcopy(model).to(device)
        local.train()
        optimizer = torch.optim.SGD(local.parameters(), lr=training.lr)
        for _ in range(training.epochs):
            for x, y in DataLoader(examples, training.batch_size, shuffle=True):
                optimizer.zero_grad()
                F.cross_entropy(local(x), y).backward()
                optimizer.step()
        trained.append(copy.deepcopy(local.state_dict()))
    return trained


def _contestant(call: Callable[[], Any], repetitions: int) -> Contestant:
    return Contestant(lambda: call, repetitions)


def _data(row: Row) -> tuple[Dataset, Split]:
    """Noise, over clients of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    count = EXAMPLES * row.clients
    x = torch.rand((count, *row.shape), generator=generator)
    y = torch.randint(row.classes, (count,), generator=generator)
    parts = dirichlet_partition(y, num_clients=row.clients, alpha=0.1, min_size=20, seed=0)
    return Dataset("noise", x, y, row.classes), train_test_split(parts, seed=0)


def _table(results: list[Measured]) -> str:
    names = ("plain", "loop", "many", "auto")
    header = ["model", "clients", "steps", *names, *(f"plain / {name}" for name in names[1:])]
    return report.table(
        header,
        [
            [
                row["model"],
                str(row["clients"]),
                str(row["steps"]),
                *(report.cell(row["times"][name]) for name in names),
                *(f"{row['plain_over'].get(name, float('nan')):.2f}" for name in names[1:]),
            ]
            for row in results
        ],
    )


def _bars(results: list[Measured]) -> list[str]:
    return [
        f"{row['model']} x {row['clients']}, plain / auto: {row['plain_over']['auto']:.2f}, wanted "
        f"at least {row['bar']:g}, {'met' if row['plain_over']['auto'] >= row['bar'] else 'MISSED'}"
        for row in results
        if row["bar"] is not None
    ]


if __name__ == "__main__":
    sys.exit(main())
