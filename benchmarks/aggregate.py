"""CRAFT's aggregate() against the published rule and FedML's averaging, on the same state dicts.

    python benchmarks/aggregate.py [--quick] [--rows NAME ...] [--json PATH]

Times are the best of a few repetitions, taken in turns in one process, so that what else the
machine does hits all of them. Ours is a second round: the reference of the first one is there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from federations import COSINE, ROWS, Federation, Row, craft_with_reference, federation
from memory import available, limited, measure
from rules import fedml_average, fedml_list, miss, published_rule

T = TypeVar("T")
Measured = dict[str, Any]

MEMORY_BAR = 3.0
# What the published rule takes, in blocks of m x d, at its peak: the rows, and what torch's SVD and
# the product after it hold: 5.0 measured at 5,000,000 x 100. The clients' own values come on top.
PUBLISHED_BLOCKS = 6
QUICK_REASON = "left out by --quick"
HEADER = (
    "model x clients",
    "groups",
    "ours",
    "published",
    "published / ours",
    "FedML mean",
    "ours / FedML mean",
    "extra memory",
    "of it kept",
    "target missed by: ours",
    "published",
)


def main(argv: list[str] | None = None) -> int:
    options = _arguments(argv)
    rows = _chosen(options.rows)
    if not rows:
        print(f"no such row; there are: {', '.join(row.name for row in ROWS)}", file=sys.stderr)
        return 2
    about = _about(options.quick)
    results = []
    for row in rows:
        print(f"{row.name} ...", file=sys.stderr, flush=True)
        results.append(_measure(row, quick=options.quick))
    about["load_after"] = _load()
    _show(about, results)
    if options.json:
        text = json.dumps({"about": about, "rows": results}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _chosen(names: list[str] | None) -> list[Row]:
    if not names:
        return [row for row in ROWS if row.default]
    exact = {row.name for row in ROWS} & set(names)  # resnet20x10 is not resnet20x100 as well
    starts = tuple(name for name in names if name not in exact)
    return [row for row in ROWS if row.name in exact or row.name.startswith(starts)]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="without the published rule on the wide layer"
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="NAME",
        help="only these rows, or those whose name starts so, e.g. resnet110",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers there too")
    return parser.parse_args(argv)


def _measure(row: Row, *, quick: bool) -> Measured:
    # Before the clients exist here: the other process makes its own.
    memory = measure(row)
    given = federation(row)
    result: Measured = {
        "name": row.name,
        "clients": row.clients,
        "parameters": sum(given.widths),
        "groups": len(given.widths),
        "widest_group": max(given.widths),
        "largest_block_bytes": given.largest_block,
        "memory": memory,
    }
    if "bytes" in memory:
        for part in ("", "first_", "kept_"):
            memory[f"{part}blocks"] = memory[f"{part}bytes"] / given.largest_block
    result.update(_race(row, given, _reason_to_skip(row, given, quick)))
    ours = result["ours"]["seconds"]
    result["ours_over_fedml"] = ours / result["fedml"]["seconds"]
    if "seconds" in result["published"]:
        result["published_over_ours"] = result["published"]["seconds"] / ours
    result["bars"] = _bars(row, result)
    return result


def _reason_to_skip(row: Row, given: Federation, quick: bool) -> str | None:
    if quick and row.slow:
        return QUICK_REASON
    needed, free = PUBLISHED_BLOCKS * given.largest_block, available()
    if free is not None and needed > free:
        return f"needs about {needed / 1e9:.0f} GB more, {free / 1e9:.0f} GB are free"
    return None


def _race(row: Row, given: Federation, skip: str | None) -> Measured:
    """Time the three in turns, and check what they gave."""
    aggregator = craft_with_reference(row)
    before = aggregator.state_dict()
    reference = before["reference"]
    aggregator.aggregate(given.state, given.updates)  # warms up
    fedml_average(fedml_list(given))
    times: dict[str, list[float]] = {"ours": [], "fedml": [], "published": []}
    missed: dict[str, float] = {}
    for repetition in range(row.repetitions):
        aggregator.load_state_dict(before)
        seconds, result = _timed(lambda: aggregator.aggregate(given.state, given.updates))
        times["ours"].append(seconds)
        del result
        clients = fedml_list(given)
        seconds, average = _timed(partial(fedml_average, clients))
        times["fedml"].append(seconds)
        del average, clients
        if skip is None and repetition < row.published:
            try:
                with limited():
                    seconds, (_, steps) = _timed(lambda: published_rule(given, reference, 0.1))
            except (MemoryError, RuntimeError) as error:
                skip = str(error).partition("\n")[0] or type(error).__name__
            else:
                times["published"].append(seconds)
                missed["published"] = miss(given, steps)
                del steps
    missed["ours"] = miss(given, aggregator.state_dict()["reference"])
    measured: Measured = {}
    for name, taken in times.items():
        measured[name] = {"seconds": min(taken), "all": taken} if taken else {"reason": skip}
        if name in missed:
            measured[name]["missed"] = missed[name]
    return measured


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def _bars(row: Row, result: Measured) -> list[Measured]:
    """What the project wants of this row, and whether it is so (None: not measured)."""
    wanted = [
        ("published / ours", "at least", row.min_speedup, result.get("published_over_ours")),
        ("ours / FedML mean", "at most", row.max_slowdown, result["ours_over_fedml"]),
        (
            "extra memory, in blocks",
            "below",
            MEMORY_BAR if row.default else None,
            result["memory"].get("blocks"),
        ),
    ]
    bars = []
    for what, relation, bar, value in wanted:
        if bar is not None:
            met = None if value is None else value >= bar if relation == "at least" else value < bar
            bars.append(
                {"what": what, "relation": relation, "bar": bar, "value": value, "met": met}
            )
    return bars


def _about(quick: bool) -> Measured:
    return {
        "quick": quick,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "craft_adapters": metadata.version("craft-adapters"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cosine": COSINE,
        "load_before": _load(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _load() -> float | None:
    """Processes that wanted a core in the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _show(about: Measured, results: list[Measured]) -> None:
    cells = [_cells(result) for result in results]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*HEADER)
        for row in cells:
            table.add_row(*row)
        Console().print(table)
    else:
        widths = [max(map(len, column)) for column in zip(HEADER, *cells, strict=True)]
        for row in [HEADER, tuple("-" * width for width in widths), *cells]:
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print(f"| {' | '.join(padded)} |")
    print()
    for line in _footnotes(about, results):
        print(line)


def _cells(result: Measured) -> tuple[str, ...]:
    ours, published, fedml = result["ours"], result["published"], result["fedml"]
    memory, ratio = result["memory"], result.get("published_over_ours")
    return (
        result["name"].replace("x", " x ").replace("wide", "wide layer"),
        str(result["groups"]),
        _time(ours["seconds"]),
        _time(published["seconds"]) if "seconds" in published else "none (1)",
        "-" if ratio is None else f"{ratio:.1f}",
        _time(fedml["seconds"]),
        f"{result['ours_over_fedml']:.2f}",
        f"{memory['blocks']:.2f} blocks" if "blocks" in memory else "none (1)",
        f"{memory['kept_blocks']:.2f} blocks" if "blocks" in memory else "-",
        f"{ours['missed']:.0e}",
        f"{published['missed']:.0e}" if "missed" in published else "-",
    )


def _footnotes(about: Measured, results: list[Measured]) -> list[str]:
    lines = [
        "Extra memory: peak of our call; a block: the clients' values of the widest group, m x d "
        "float32; kept: the new model and the reference.",
        "Target missed by: max |U g - rho| / max(rho), checked in float64. "
        f"Clients' cosine {about['cosine']}.",
        f"torch {about['torch']}, Python {about['python']}, {about['cpu']}, "
        f"{about['cores']} cores, {about['threads']} threads, "
        f"load {about['load_before']} before and {about['load_after']} after.",
    ]
    for result in results:
        for what in ("published", "memory"):
            if "reason" in result[what]:
                lines.append(f"(1) {result['name']}, {what}: {result[what]['reason']}")
    words = {True: "met", False: "MISSED", None: "not measured"}
    for result in results:
        for bar in result["bars"]:
            value = "" if bar["value"] is None else f" {bar['value']:.2f}:"
            lines.append(
                f"{result['name']}, {bar['what']}:{value} "
                f"wanted {bar['relation']} {bar['bar']:g}, {words[bar['met']]}"
            )
    return lines


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


if __name__ == "__main__":
    sys.exit(main())
