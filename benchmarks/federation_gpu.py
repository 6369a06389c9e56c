"""The paper's CIFAR-10 experiment on one card, for so many minutes.

    python benchmarks/federation_gpu.py --data FOLDER|synthetic [--minutes 8] [--set KEY=VALUE ...]

ResNet-20, 1000 clients, 100 a round, 500 rounds, as in examples/federation/paper. FOLDER holds
torchvision's CIFAR-10, or one folder of images per class, alone or under train/ and test/.
``synthetic``: images of the same number and shape, made of a pattern per class and noise: for
times, not for accuracies. ``--set`` changes the configuration as for ``craft-adapters run``:
``--set aggregator=fedavg``, or small sizes to try the script without a card.

When the time is up it evaluates what it has and stops; the same command goes on from there. Writes
one JSON, federation_gpu.json, beside the run's folder.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
from timing import Measured, timed
from training import engines

from craft_adapters.errors import CraftError
from craft_adapters.metrics import fairness
from craft_adapters.simulation import Run, RunConfig, read_config, read_lines

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "examples" / "federation" / "paper" / "cifar10_resnet20.yaml"
# Seconds kept to write in.
TO_END = 5.0
FIGURES = ("mean", "worst10", "best10", "std", "loss")


def main(argv: list[str] | None = None) -> int:
    started = time.perf_counter()
    options = _arguments(argv)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu and small --set tries it", file=sys.stderr)
        return 2
    folder = options.out / f"{options.name}-run"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        config = _config(options, folder)
        report.progress("data")
        run = Run(config, str(folder))
    except CraftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    numbers: Measured = {
        "about": {**report.about(device), "data": _described(options.data, run)},
        "config": config.resolved(),
        "seconds_of_one_round": _engines(run) if options.engines else None,
    }
    numbers |= _play(run, started + 60 * options.minutes)
    numbers["about"]["load_after"] = report.load()
    numbers["seconds"] = time.perf_counter() - started
    report.publish(options.name, _text(numbers), numbers, options.out)
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", required=True, metavar="FOLDER|synthetic")
    parser.add_argument("--images", type=int, default=60_000, help="number of synthetic ones")
    parser.add_argument("--minutes", type=float, default=8.0, metavar="M", help="for everything")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", metavar="DIR")
    parser.add_argument("--name", default="federation_gpu", help="of the JSON and the run's folder")
    parser.add_argument(
        "--no-engines", dest="engines", action="store_false", help="do not time both engines"
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args(argv)


def _config(options: argparse.Namespace, folder: Path) -> RunConfig:
    """The paper's, with these data."""
    if options.data == "synthetic":
        path = folder / "synthetic.npz"
        if not path.is_file():
            np.savez(path, **_synthetic(options.images))
        data = ["data=npz", f"data.path={path}"]
    elif (Path(options.data) / "cifar-10-batches-py").is_dir():
        data = [f"data.root={options.data}"]
    else:
        data = ["data=folder", f"data.root={options.data}"]
    return read_config(
        CONFIG,
        [*data, "data.standardise=true", f"device={options.device}", *options.overrides],
    )


def _synthetic(count: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, count)
    patterns = rng.integers(0, 96, (10, 3, 32, 32), dtype=np.uint8)
    noise = rng.integers(0, 160, (count, 3, 32, 32), dtype=np.uint8)
    return {"x": noise + patterns[y], "y": y}


def _described(data: str, run: Run) -> str:
    dataset = run.federation.dataset
    what = f"{len(dataset)} images of shape {dataset.shape}"
    if data == "synthetic":
        return f"synthetic: {what}, a pattern per class and noise; accuracies mean nothing"
    return f"{what} from {Path(data).name}"


def _engines(run: Run) -> Measured:
    """Seconds that each engine takes for the clients of one round, after a round to warm up."""
    report.progress("both engines")
    federation, model = run.federation, run.federation.load(run.state)
    clients = range(run.participants)
    device = federation.device
    given = federation.dataset, federation.split, model, federation.training, clients
    playing = engines(*given, names=("loop", "many"))
    measured = {n: min(timed(play, device)[0] for _ in range(2)) for n, play in playing.items()}
    return {**measured, "loop_over_many": measured["loop"] / measured["many"]}


def _play(run: Run, until: float) -> Measured:
    """Rounds until the time is up; what is left of it is kept for an evaluation."""
    report.progress("rounds")
    device, general = run.federation.device, run.config.general
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begun, first = time.perf_counter(), run.round
    longest, evaluating = 0.0, 0.0
    before = begun
    for done in run:
        now = time.perf_counter()
        # A round with an evaluation in it, the first one too, counts for both.
        if done.metrics:
            evaluating = max(evaluating, now - before)
        else:
            longest = max(longest, now - before)
        before = now
        if now + longest + 2 * evaluating + TO_END > until:
            break
    seconds = time.perf_counter() - begun
    rounds = list(read_lines(run.folder / "rounds.jsonl"))
    played = [record for record in rounds if record["round"] >= first]
    times = [r["aggregate_seconds"] for r in played if "aggregate_seconds" in r]
    images = sum(run.federation.num_examples(c) for record in played for c in record["clients"])
    evaluations = [
        {"round": record["round"], "model": record["model"], **{f: record[f] for f in FIGURES}}
        for record in read_lines(run.folder / "metrics.jsonl")
    ]
    if evaluations[-1]["round"] < run.round and not run.diverged:
        evaluations += _evaluated(run)
    return {
        "rounds": run.round,
        "of": general.rounds,
        "ended": run.diverged or ("finished" if run.round == general.rounds else "time is up"),
        "engine": run.federation.engine,
        "seconds_of_rounds": seconds,
        "images_per_second": images * run.federation.training.epochs / seconds,
        "aggregate_seconds": float(np.median(times)) if times else None,
        "evaluations": evaluations,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def _evaluated(run: Run) -> list[Measured]:
    """Between two evaluations of the run: the model as it is now."""
    found = []
    for kind, scores in run.method.evaluate(run.federation, run.state).items():
        summary = fairness(scores.accuracy)
        losses = [loss for loss in scores.loss.values() if loss is not None]
        figures = {
            "mean": summary.mean_unweighted,
            "worst10": summary.worst10,
            "best10": summary.best10,
            "std": summary.std_unweighted,
            "loss": float(np.mean(losses)),
        }
        found.append({"round": run.round, "model": kind, **figures})
    return found


def _text(numbers: Measured) -> str:
    names = numbers["config"]
    lines = [
        f"{names['aggregator']['name']}, {names['model']['name']}, {numbers['about']['data']}",
        f"{numbers['rounds']} of {numbers['of']} rounds: {numbers['ended']}; "
        f"{numbers['images_per_second']:.0f} images/s, engine {numbers['engine']}",
    ]
    if times := numbers["seconds_of_one_round"]:
        lines.append(
            f"one round's training: loop {report.duration(times['loop'])}, many "
            f"{report.duration(times['many'])}, {times['loop_over_many']:.1f} times"
        )
    rows = [
        [str(e["round"]), e["model"], *("-" if e[f] is None else f"{e[f]:.3f}" for f in FIGURES)]
        for e in numbers["evaluations"]
    ]
    lines += ["", report.table(["round", "model", *FIGURES], rows), ""]
    return "\n".join([*lines, report.machine(numbers["about"])])


if __name__ == "__main__":
    sys.exit(main())
