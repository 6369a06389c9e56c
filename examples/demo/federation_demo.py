"""FedAvg, CRAFT as published and CRAFT balanced on the bundled federation: no host is needed.

    python examples/demo/federation_demo.py [--rounds 100] [--seed 0] [--out runs/demo]

The same comparison as ``examples/fedml_demo/demo.py``, for a Python on which FedML cannot be
installed: the same digits, clients, model, training, rules and table. The partition and the order
of the examples are drawn by other generators than FedML's, so the figures differ a little.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from craft_adapters.cli import main as craft_adapters
from craft_adapters.plots import accuracy_over_rounds, client_histogram
from craft_adapters.simulation import read_lines
from craft_adapters.sinks import JsonlSink

sys.path.append(str(Path(__file__).resolve().parents[1] / "fedml_demo"))
from demo import PUBLISHED, WORLDS, show

BASE = {
    "data": "digits",
    "model": {"name": "mlp", "hidden": [128, 128]},
    "training": {"lr": 0.1, "batch_size": 20, "engine": "many"},
    "evaluate_every": 5,
    "checkpoint_every": 50,
}
RULES: dict[str, Mapping[str, Any]] = {
    "FedAvg": {"name": "fedavg"},
    PUBLISHED: {"name": "craft", "server_lr": 0.1},
    "CRAFT, balanced": {
        "name": "craft",
        "targets": "sqrt",
        "client_length": 1,
        "scale": "steady",
        "server_lr": 1.0,
    },
}


@dataclass(frozen=True)
class Run:
    """One rule in one federation, and its folder."""

    world: str
    rule: str
    folder: Path

    def records(self, name: str) -> list[dict[str, Any]]:
        return list(read_lines(self.folder / name))


def write_sweep(file: Path, rounds: int, seed: int) -> list[Run]:
    """A sweep of one run for each rule in each federation."""
    rules: dict[str, Any] = {}
    runs = []
    for number, (world, settings) in enumerate(WORLDS.items(), 1):
        train = settings["train_args"]
        for rule, aggregator in RULES.items():
            label = f"world{number}-{rule.replace(', ', '-').lower()}"
            rules[label] = {
                "partition": {
                    "name": "dirichlet",
                    "clients": train["client_num_in_total"],
                    "alpha": settings["data_args"]["partition_alpha"],
                    "min_size": 10,
                },
                "clients_per_round": train["client_num_per_round"],
                "aggregator": dict(aggregator),
            }
            runs.append(Run(world, rule, file.parent / f"{label}_seed-{seed}"))
    sweep = {"base": {**BASE, "rounds": rounds}, "seeds": [seed], "rules": rules}
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(sweep, indent=2), encoding="utf-8")
    return runs


def summarise(runs: list[Run]) -> Iterator[dict[str, Any]]:
    """One record a run: the last evaluation, conflicts per round, who gained against FedAvg."""
    base: dict[str, dict[str, float]] = {}
    for run in runs:
        last, rounds = run.records("metrics.jsonl")[-1], run.records("rounds.jsonl")
        accuracy = last["client_accuracy"]
        first = base.setdefault(run.world, accuracy)
        pairs = [(accuracy[c], first[c]) for c in accuracy if accuracy[c] is not None]
        yield {
            "world": run.world,
            "rule": run.rule,
            **{key: last[key] for key in ("mean", "worst10", "best10", "std")},
            "conflicts_before": sum(r["conflicts_before"] for r in rounds) / len(rounds),
            "conflicts_after": sum(r["conflicts_after"] for r in rounds) / len(rounds),
            "gained": sum(ours > theirs for ours, theirs in pairs),
            "lost": sum(ours < theirs for ours, theirs in pairs),
        }


def draw(runs: list[Run], out: Path) -> list[Path]:
    curves: dict[str, dict[str, Any]] = {}
    scores: dict[str, dict[str, Any]] = {}
    for run in runs:
        records = run.records("metrics.jsonl")
        title = run.world.replace(", Dirichlet", "\nDirichlet")
        curves.setdefault(title, {})[run.rule] = {
            "rounds": [record["round"] for record in records],
            "mean": [record["mean"] for record in records],
            "worst10": [record["worst10"] for record in records],
        }
        scores.setdefault(title, {})[run.rule] = records[-1]["client_accuracy"]
    return [
        accuracy_over_rounds(curves, out / "accuracy.png"),
        client_histogram(scores, out / "clients.png"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    options = parser.parse_args()
    console = Console()
    out = options.out.resolve() / time.strftime("%Y%m%d-%H%M%S")
    if sys.version_info >= (3, 12):
        console.print(
            "FedML 0.9.6 cannot be installed on this Python "
            f"({sys.version_info.major}.{sys.version_info.minor}; it stops at 3.11)."
        )
    console.print("This is the bundled federation, not FedML's simulator.")
    runs = write_sweep(out / "demo.json", options.rounds, options.seed)
    craft_adapters(["sweep", str(out / "demo.json"), "--out", str(out)], standalone_mode=False)
    summary = list(summarise(runs))
    with JsonlSink(out / "summary.jsonl") as sink:
        for row in summary:
            sink.write(row)
    show(summary, console)
    for path in (out / "summary.jsonl", *draw(runs, out)):
        console.print(f"written: {path}")


if __name__ == "__main__":
    main()
