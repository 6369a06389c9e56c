"""What the scripts write: facts about the machine, Markdown tables, JSON and pictures."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from memory import available
from timing import Measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of memory for a number of an update: itself, a copy, and half as much to spare.
_BYTES_EACH = 10

# Okabe and Ito's palette, which colour-blind readers can tell apart; markers do it in print.
STYLES: tuple[dict[str, Any], ...] = tuple(
    {"color": colour, "marker": marker}
    for colour, marker in zip(
        ("#0072B2", "#000000", "#E69F00", "#56B4E9", "#D55E00", "#009E73", "#CC79A7"),
        ("o", "_", "s", "^", "D", "v", "P"),
        strict=True,
    )
)


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the options that all scripts have."""
    made = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    made.add_argument("--quick", action="store_true", help="small sizes: under a minute")
    made.add_argument(
        "--out", type=Path, metavar="DIR", help="write the table, all numbers and a picture there"
    )
    return made


def with_most(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the option that bounds the sizes; :func:`most` reads it."""
    made.add_argument(
        "--most",
        type=int,
        metavar="NUMBERS",
        help="no more numbers (clients times columns) than this; default: what memory allows",
    )
    return made


def most(options: argparse.Namespace, quick: int) -> int:
    """The largest number of numbers in all updates."""
    if options.most is not None:
        return int(options.most)
    if options.quick:
        return quick
    free = available()
    return sys.maxsize if free is None else free // _BYTES_EACH


def about(device: torch.device) -> Measured:
    """What the numbers depend on."""
    facts: Measured = {
        "device": str(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "craft_adapters": metadata.version("craft-adapters"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": load(),
    }
    if device.type == "cuda":
        facts["card"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    return facts


def load() -> float | None:
    """Processes that wanted a core in the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def machine(facts: Measured) -> str:
    """A line on what :func:`about` found, once "load_after" is there too."""
    card = f"{facts['card']}, CUDA {facts['cuda']}, " if "card" in facts else ""
    return (
        f"{card}torch {facts['torch']}, Python {facts['python']}, {facts['cpu']}, "
        f"{facts['cores']} cores, {facts['threads']} threads, "
        f"load {facts['load_before']} before and {facts['load_after']} after."
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        f"| {' | '.join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))} |"
        for line in lines
    )


def duration(seconds: float) -> str:
    """In the unit that suits: 21.3 ms, 1.95 s."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def cell(time: Measured) -> str:
    """What a race gave for one contestant, in short."""
    return duration(time["seconds"]) if "seconds" in time else "-"


def progress(text: str) -> None:
    """Say where the run is, beside the table."""
    print(f"{text} ...", file=sys.stderr, flush=True)


def publish(name: str, text: str, numbers: object, out: Path | None) -> None:
    """Print the text; into ``out``, write it and the numbers."""
    print(text)
    if out is not None:
        write(name, text, numbers, out)


def write(name: str, text: str, numbers: object, out: Path) -> None:
    """The text as Markdown, the numbers as JSON."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    encoded = json.dumps(_encodable(numbers), indent=2, allow_nan=False)
    (out / f"{name}.json").write_text(encoded + "\n", encoding="utf-8")


def _encodable(value: object) -> object:
    """NaN and infinity, which are no JSON, as text."""
    if isinstance(value, dict):
        return {key: _encodable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_encodable(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def figure(width: float, height: float) -> Figure | None:
    """An empty picture, or None, said so, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        print(f"no picture: {error}; pip install 'craft-adapters[plots]'", file=sys.stderr)
        return None
    return Figure(figsize=(width, height), layout="constrained")


def save(drawn: Figure, name: str, out: Path) -> None:
    """Into ``out``, as PNG."""
    for axes in drawn.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
    drawn.savefig(out / f"{name}.png", dpi=150)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
