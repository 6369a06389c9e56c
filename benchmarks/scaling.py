"""How the time of aggregate() grows with clients, width and groups, beside its rivals'.

    python benchmarks/scaling.py [--quick] [--most NUMBERS] [--out DIR]

One thing grows at a time. Slopes are fitted in log-log over the upper half of an axis: 1 is
proportional, 2 is quadratic. A rival that took long leaves its axis.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import bars
import contestants
import numpy as np
import report
import torch
from federations import COSINE, federation, layers
from floor import Floor
from timing import Measured, race

CPU = torch.device("cpu")
# Seconds after which a rival is not given the next size.
LIMIT = 2.0
# Numbers to go through before the best time counts, with 2 to 10 repetitions.
ENOUGH = 20_000_000
QUICK = 5_000_000


@dataclass(frozen=True, slots=True)
class Size:
    """So many clients with models of ``columns`` numbers in equal groups."""

    clients: int
    columns: int
    groups: int = 1

    @property
    def numbers(self) -> int:
        """In all updates."""
        return self.clients * self.columns


AXES = {
    "clients": [Size(m, 100_000) for m in (2, 5, 10, 20, 50, 100, 200, 500, 1000)],
    "columns": [Size(10, 10**k) for k in range(3, 9)],
    "groups": [Size(10, 3_000 * q, q) for q in (1, 3, 10, 30, 110, 330)],
}
FIXED = (
    "Clients: one layer of 100,000 columns. Columns: one layer, 10 clients. "
    "Groups: layers of 3,000 columns, 10 clients."
)


def main(argv: list[str] | None = None) -> int:
    parser = report.parser(__doc__)
    options = report.with_most(parser).parse_args(argv)
    most = report.most(options, QUICK)
    about = {**report.about(CPU), "most": most, "cosine": COSINE, "limit": LIMIT}
    axes = {name: _measure(name, sizes, most) for name, sizes in AXES.items()}
    about["load_after"] = report.load()
    text = "\n".join(
        [*(_table(name, axis) + "\n" for name, axis in axes.items()), *_footnotes(about, axes)]
    )
    report.publish("scaling", text, {"about": about, "axes": axes}, options.out)
    if options.out:
        _draw(axes, options.out)
    return 0


def _measure(name: str, sizes: Sequence[Size], most: int) -> Measured:
    """One axis: its points, and the slope of each contestant."""
    points: list[Measured] = []
    left: dict[str, str] = {}
    large = [size for size in sizes[1:] if size.numbers > most]
    for size in sizes:
        if size in large:
            continue
        report.progress(f"{name} {getattr(size, name)}")
        times = _race(size, left)
        points.append(
            {
                "clients": size.clients,
                "columns": size.columns,
                "groups": size.groups,
                "times": times,
                "ratios": bars.ratios(times),
            }
        )
        for rival in times.keys() - {"ours", "floor"}:
            seconds = times[rival].get("seconds", 0.0)
            if seconds > LIMIT:
                left[rival] = f"took {report.duration(seconds)} at {name} {getattr(size, name)}"
            elif "reason" in times[rival]:
                left[rival] = times[rival]["reason"]
    return {
        "points": points,
        "slopes": {rule: _slope(name, points, rule) for rule in contestants.TITLES},
        "left_out": left,
        "too_large": [getattr(size, name) for size in large],
    }


def _race(size: Size, left: dict[str, str]) -> Measured:
    given = federation(layers(size.groups, size.columns // size.groups), size.clients)
    repetitions = max(2, min(10, ENOUGH // size.numbers))
    racing = contestants.fast(given, CPU, repetitions) | contestants.slow(given)
    floor = Floor(given)
    times = race(racing | left, CPU, floor.measure)
    return {**times, "floor": {"seconds": floor.seconds, "parts": floor.parts}}


def _slope(name: str, points: Sequence[Measured], rule: str) -> float | None:
    """Of log time against log size, over the upper half of what was measured."""
    known = [
        (p[name], p["times"][rule]["seconds"]) for p in points if "seconds" in p["times"][rule]
    ]
    if len(known) < 2:
        return None
    middle = math.sqrt(known[0][0] * known[-1][0])
    lower = sum(size < middle for size, _ in known)
    x, y = np.log(known[min(lower, len(known) - 2) :]).T
    return float(np.polyfit(x, y, 1)[0])


def _table(name: str, axis: Measured) -> str:
    header = [name, *contestants.TITLES.values(), "ours / floor"]
    rows = [
        [
            f"{point[name]:,}",
            *(report.cell(point["times"][rule]) for rule in contestants.TITLES),
            f"{point['ratios']['ours_over_floor']:.2f}",
        ]
        for point in axis["points"]
    ]
    slopes = (axis["slopes"][rule] for rule in contestants.TITLES)
    rows.append(["slope", *("-" if s is None else f"{s:.2f}" for s in slopes), ""])
    return report.table(header, rows)


def _footnotes(about: Measured, axes: dict[str, Measured]) -> list[str]:
    lines = [
        FIXED,
        "Slope: of log time against log size, over the upper half of the axis.",
        report.machine(about),
    ]
    for name, axis in axes.items():
        lines += [f"{name}: without {rival}: {why}" for rival, why in axis["left_out"].items()]
        if axis["too_large"]:
            sizes = ", ".join(f"{size:,}" for size in axis["too_large"])
            lines.append(f"{name}: too large, over {about['most']:,} numbers: {sizes}")
    return lines


def _draw(axes: dict[str, Measured], out: Path) -> None:
    figure = report.figure(11, 4)
    if figure is None:
        return
    for panel, (name, axis) in zip(figure.subplots(1, len(axes)), axes.items(), strict=True):
        for (rule, title), style in zip(contestants.TITLES.items(), report.STYLES, strict=True):
            known = [p for p in axis["points"] if "seconds" in p["times"][rule]]
            panel.plot(
                [point[name] for point in known],
                [point["times"][rule]["seconds"] for point in known],
                label=title,
                linewidth=1,
                **style,
            )
        ours, floor = axis["slopes"]["ours"], axis["slopes"]["floor"]
        if ours is not None and floor is not None:
            panel.set_title(f"slope of ours {ours:.2f}, of the floor {floor:.2f}", fontsize=9)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel(name)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    figure.axes[0].set_ylabel("seconds")
    report.save(figure, "scaling", out)


if __name__ == "__main__":
    sys.exit(main())
