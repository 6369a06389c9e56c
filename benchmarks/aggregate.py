"""CRAFT's aggregate() against its rivals and the machine's floor, on the same state dicts.

    python benchmarks/aggregate.py [--quick] [--rows NAME ...] [--whole] [--out DIR]

Times are the best of a few repetitions, taken in turns in one process, so that what else the
machine does hits all of them. Ours is a second round: the reference of the first one is there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import bars
import contestants
import report
import torch
from federations import COSINE, ROWS, Row, federation, model, rows_named
from floor import Floor
from memory import measure
from timing import Measured, race

CPU = torch.device("cpu")
BARS = {"torchjd_over_ours": 1.0, "conflictfree_over_ours": 1.0, "work": 1.0, "missed": 1e-5}
"""Of every row of the table; a row may have more."""
# Bytes of what is worked on at a time, beside a group's block.
CHUNK = 1 << 24

QUICK_REASON = "left out by --quick"


def main(argv: list[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="NAME",
        help="only these rows, or those whose name starts so, e.g. resnet110",
    )
    parser.add_argument(
        "--whole", action="store_true", help="all columns for TorchJD and conflictfree, always"
    )
    options = parser.parse_args(argv)
    rows = [row for row in ROWS if (row.quick if options.quick else row.default)]
    if options.rows:
        rows = rows_named(options.rows)
    if not rows:
        print(f"no such row; there are: {', '.join(row.name for row in ROWS)}", file=sys.stderr)
        return 2
    about = {**report.about(CPU), "quick": options.quick, "cosine": COSINE}
    results = []
    for row in rows:
        report.progress(row.name)
        results.append(_measure(row, quick=options.quick, whole=options.whole))
    about["load_after"] = report.load()
    text = "\n".join([_table(results), "", *_footnotes(about, results)])
    report.publish("aggregate", text, {"about": about, "rows": results}, options.out)
    if options.out:
        _draw(results, options.out)
    return 0


def _measure(row: Row, *, quick: bool, whole: bool) -> Measured:
    # Before the clients exist here: the other process makes its own.
    memory = measure(row)
    given = federation(model(row.model), row.clients)
    if "bytes" in memory:
        memory["work"] = (memory["bytes"] - memory["kept_bytes"]) / (given.largest_block + CHUNK)
    racing = contestants.fast(given, CPU, row.repetitions)
    if quick and row.slow:
        racing |= dict.fromkeys(contestants.SLOW, QUICK_REASON)
    else:
        racing |= contestants.slow(given, row.published, whole=whole)
    floor = Floor(given)
    times = race(racing, CPU, floor.measure)
    times["floor"] = {"seconds": floor.seconds, "parts": floor.parts}
    ratios = bars.ratios(times)
    values = {**ratios, "missed": times["ours"]["missed"], "work": memory.get("work")}
    wanted = {**BARS, **row.bars} if row.default else row.bars
    return {
        "name": row.name,
        "clients": row.clients,
        "parameters": sum(given.widths),
        "groups": len(given.widths),
        "widest_group": max(given.widths),
        "largest_block_bytes": given.largest_block,
        "memory": memory,
        "times": times,
        "ratios": ratios,
        "bars": bars.judge(wanted, values),
    }


HEADER = (
    "model x clients",
    "groups",
    "ours",
    "floor",
    "ours / floor",
    "FedML mean",
    "ours / FedML mean",
    "plain mean",
    "published",
    "TorchJD ConFIG",
    "conflictfree",
    "extra memory",
    "of it kept",
    "widest group",
    "target missed by: ours",
    "published",
)


def _table(results: list[Measured]) -> str:
    return report.table(HEADER, [_cells(result) for result in results])


def _cells(result: Measured) -> tuple[str, ...]:
    times, memory, ratios = result["times"], result["memory"], result["ratios"]
    return (
        _title(result),
        str(result["groups"]),
        report.duration(times["ours"]["seconds"]),
        report.duration(times["floor"]["seconds"]),
        f"{ratios['ours_over_floor']:.2f}",
        report.duration(times["fedml"]["seconds"]),
        f"{ratios['ours_over_fedml']:.2f}",
        report.duration(times["mean"]["seconds"]),
        *(_slow(times[name], ratios.get(f"{name}_over_ours")) for name in contestants.SLOW),
        f"{memory['bytes'] / 1e6:.1f} MB" if "bytes" in memory else "none (1)",
        f"{memory['kept_bytes'] / 1e6:.1f} MB" if "bytes" in memory else "-",
        f"{result['largest_block_bytes'] / 1e6:.1f} MB",
        f"{times['ours']['missed']:.0e}",
        f"{times['published']['missed']:.0e}" if "missed" in times["published"] else "-",
    )


def _slow(time: Measured, ratio: float | None) -> str:
    if ratio is None:
        return "none (1)"
    more = "> " if "first_columns" in time else ""
    return f"{more}{report.duration(time['seconds'])} ({more}{ratio:.1f} x)"


def _title(result: Measured) -> str:
    name, _, clients = result["name"].rpartition("x")
    return (
        f"{name.replace('wide', 'wide layer').replace('wide layerst', 'widest layer')} x {clients}"
    )


def _footnotes(about: Measured, results: list[Measured]) -> list[str]:
    lines = [
        "Floor: one read that forms the differences, the float32 Gram product, one read that "
        "applies; each the fastest of a few plain ways, alone.",
        "In parentheses: times our time. With '>': the rule was given the first columns only.",
        "Extra memory: peak of our call; kept: the new model and the reference; widest group: the "
        "clients' values of it, m x d float32.",
        "Target missed by: max |U g - rho| / max(rho), checked in float64. "
        f"Clients' cosine {about['cosine']}.",
        report.machine(about),
    ]
    for result in results:
        parts = {**result["times"], "memory": result["memory"]}
        for what, part in parts.items():
            if "reason" in part:
                lines.append(f"(1) {result['name']}, {what}: {part['reason']}")
    return lines + bars.lines(results)


def _draw(results: list[Measured], out: Path) -> None:
    """Time of each contestant over the floor's, row by row."""
    figure = report.figure(8, 4.5)
    if figure is None:
        return
    axes = figure.subplots()
    for (name, title), style in zip(contestants.TITLES.items(), report.STYLES, strict=True):
        times = [(i, r["times"]) for i, r in enumerate(results) if "seconds" in r["times"][name]]
        axes.plot(
            [i for i, _ in times],
            [each[name]["seconds"] / each["floor"]["seconds"] for _, each in times],
            linestyle="none",
            label=title,
            **style,
        )
    axes.set_yscale("log")
    axes.set_ylabel("time / floor")
    axes.set_xticks(range(len(results)), [_title(r) for r in results], rotation=30, ha="right")
    figure.legend(loc="outside right upper", frameon=False)
    report.save(figure, "aggregate", out)


if __name__ == "__main__":
    sys.exit(main())
