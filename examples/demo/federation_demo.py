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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison import PUBLISHED, WORLDS, Outcome, conclude
from rich.console import Console

from craft_adapters.cli import main as craft_adapters
from craft_adapters.simulation import read_lines

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
    "CRAFT, balanced": {"name": "craft_balanced", "server_lr": 2.0},
}


@dataclass(frozen=True)
class Run:
    """One rule in one federation, and its folder."""

    world: str
    rule: str
    folder: Path

    def outcome(self) -> Outcome:
        evaluations = list(read_lines(self.folder / "metrics.jsonl"))
        accuracy = evaluations[-1]["client_accuracy"]
        rounds = list(read_lines(self.folder / "rounds.jsonl"))
        return Outcome(self.world, self.rule, evaluations, accuracy, rounds)


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
    conclude([run.outcome() for run in runs], out, console)


if __name__ == "__main__":
    main()
