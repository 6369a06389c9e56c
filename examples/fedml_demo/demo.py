"""FedAvg, CRAFT as published and CRAFT balanced, inside FedML's simulator, in two federations.

    python examples/fedml_demo/demo.py [--rounds 100] [--seed 0] [--out runs/fedml_demo]

Each run is FedML's own single-process simulator on ``federation.py``, with nothing but the config
changed. FedML's log goes to ``fedml.log`` in the run's folder; its telemetry stays off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

sys.path.append(str(Path(__file__).resolve().parents[1] / "demo"))
from comparison import PUBLISHED, WORLDS, Outcome, conclude

HERE = Path(__file__).resolve().parent
RULES: dict[str, dict[str, Any]] = {
    # FedML's averaging as a rule, so that conflicts are counted and every client of the first
    # round starts from the same model (FedML alone trains them in a chain there).
    "FedAvg": {"craft_aggregator": "fedavg"},
    PUBLISHED: {"craft_aggregator": "craft", "craft_server_lr": 0.1},
    "CRAFT, balanced": {"craft_aggregator": "craft_balanced", "craft_server_lr": 2.0},
}


@dataclass
class Run:
    """One rule in one federation, and its folder."""

    world: str
    rule: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    task: TaskID | None = None

    def records(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def outcome(self) -> Outcome:
        evaluations = self.records("metrics.jsonl")
        accuracy = evaluations[-1]["accuracy"]
        return Outcome(self.world, self.rule, evaluations, accuracy, self.records("reports.jsonl"))

    @property
    def rounds_done(self) -> int:
        path = self.folder / "reports.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def start(self, rounds: int, seed: int) -> None:
        config = yaml.safe_load((HERE / "fedml_config.yaml").read_text())
        for section, values in WORLDS[self.world].items():
            config[section].update(values)
        config["common_args"]["random_seed"] = seed
        config["train_args"]["comm_round"] = rounds
        config["craft_args"] = {
            "enable_craft": True,
            "craft_report_path": "reports.jsonl",
            **RULES[self.rule],
        }
        self.folder.mkdir(parents=True)
        (self.folder / "fedml_config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        command = [sys.executable, "-m", "craft_adapters.fedml", str(HERE / "federation.py")]
        with (self.folder / "fedml.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--cf", "fedml_config.yaml"],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # runs go side by side
            )


def run_all(runs: list[Run], rounds: int, seed: int, console: Console) -> None:
    """As many runs at once as there are cores; stop at the first that fails."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} rounds"),
        TimeRemainingColumn(),
    )
    waiting, running = list(runs), list[Run]()
    try:
        with Progress(*columns, console=console) as progress:
            for run in runs:
                run.task = progress.add_task(
                    f"{run.rule} ({run.world.split(',')[0]})", total=rounds
                )
            while waiting or running:
                while waiting and len(running) < (os.cpu_count() or 1):
                    running.append(waiting.pop(0))
                    running[-1].start(rounds, seed)
                for run in list(running):
                    assert run.process is not None
                    assert run.task is not None
                    code = run.process.poll()
                    progress.update(run.task, completed=run.rounds_done)
                    if code is None:
                        continue
                    running.remove(run)
                    if code != 0 or run.rounds_done < rounds:
                        tail = (run.folder / "fedml.log").read_text(errors="replace")[-2000:]
                        raise SystemExit(f"{run.folder} failed (exit code {code}):\n{tail}")
                time.sleep(0.2)
    finally:
        for run in running:
            if run.process is not None:
                run.process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/fedml_demo"))
    options = parser.parse_args()
    console = Console()
    out = options.out.resolve() / time.strftime("%Y%m%d-%H%M%S")
    runs = [
        Run(world, rule, out / f"world{number}" / rule.replace(", ", "-").lower())
        for number, world in enumerate(WORLDS, 1)
        for rule in RULES
    ]
    console.print(f"FedML's simulator, {len(runs)} runs of {options.rounds} rounds; logs in {out}")
    run_all(runs, options.rounds, options.seed, console)
    conclude([run.outcome() for run in runs], out, console)


if __name__ == "__main__":
    main()
