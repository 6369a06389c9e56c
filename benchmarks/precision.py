"""How far aggregate() is from its targets, and its Gram matrix from a float64 one.

    python benchmarks/precision.py [--quick] [--most NUMBERS] [--minutes M] [--out DIR]

Over width, number of clients and the cosine between any two of them; the published rule, in
float32 by pinv, stands beside it where it does not take long.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report
import rivals
import torch
from federations import after_first_round, federation, layers
from oracle import gram_error, miss
from timing import Measured

from craft_adapters.aggregators import Combination, Craft, Grams

WIDTHS = (10**3, 10**4, 10**5, 10**6, 10**7)
CLIENTS = (2, 10, 50, 100, 200, 500)
COSINES = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)
BAR = 1e-5
QUICK = 1_000_000
# The published rule's SVD takes seconds from about here on: numbers, and numbers times clients.
PUBLISHED, PUBLISHED_WORK = 20_000_000, 1_000_000_000
WHAT = {
    "missed": "Target missed by: |U g - rho| / max(rho), ours",
    "gram": "Error of our Gram matrix: |G - D D^T| / (|d_i| |d_j|)",
    "published": "Target missed by: the published rule",
}


class Watched(Craft):
    """CRAFT that shows the Gram matrices it worked with."""

    products: torch.Tensor

    def combine(self, grams: Grams) -> Combination:
        self.products = grams.products.clone()
        return super().combine(grams)


def main(argv: list[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--minutes", type=float, default=2.0, metavar="M", help="largest sizes last, while they fit"
    )
    options = report.with_most(parser).parse_args(argv)
    most = report.most(options, QUICK)
    about = {**report.about(torch.device("cpu")), "most": most, "minutes": options.minutes}
    points, left = _measure(most, 60 * options.minutes)
    about["load_after"] = report.load()
    worst = max(point["missed"] for point in points)
    text = "\n".join(
        [
            *(f"{title}\n\n{_table(points, what)}\n" for what, title in WHAT.items()),
            "'-': not measured.",
            f"ours, target missed by: {worst:.0e}, wanted at most {BAR:g}, "
            + ("met" if worst <= BAR else "MISSED"),
            report.machine(about),
            *(f"{why}: {'; '.join(sizes)}" for why, sizes in left.items() if sizes),
        ]
    )
    numbers = {"about": about, "points": points, "left_out": left, "worst": worst, "bar": BAR}
    report.publish("precision", text, numbers, options.out)
    if options.out:
        _draw(points, options.out)
    return 0


def _measure(most: int, seconds: float) -> tuple[list[Measured], dict[str, list[str]]]:
    """All points that fit, from the smallest size on; and what was left out."""
    started = time.perf_counter()
    points: list[Measured] = []
    left: dict[str, list[str]] = {"too large": [], "out of time": []}
    each = math.inf  # the least seconds for a number so far
    for numbers, clients, width in sorted((m * d, m, d) for m in CLIENTS for d in WIDTHS):
        begun = time.perf_counter()
        name = f"{clients} x {width:,}"
        if points and numbers > most:
            left["too large"].append(name)
        elif points and begun - started + each * numbers > seconds:
            left["out of time"].append(name)
        else:
            report.progress(name)
            points += [_point(clients, width, cosine) for cosine in COSINES]
            each = min(each, (time.perf_counter() - begun) / numbers)
    return points, left


def _point(clients: int, width: int, cosine: float) -> Measured:
    given = federation(layers(1, width), clients, cosine=cosine)
    aggregator = Watched(device="cpu")
    after_first_round(aggregator, given.state)
    reference = aggregator.state_dict()["reference"]
    aggregator.aggregate(given.state, given.updates)
    point: Measured = {
        "clients": clients,
        "width": width,
        "cosine": cosine,
        "missed": miss(given, aggregator.state_dict()["reference"]),
        "gram": gram_error(given, aggregator.products),
    }
    numbers = clients * width
    if numbers <= PUBLISHED and clients * numbers <= PUBLISHED_WORK:
        _, steps = rivals.published(given, reference)()
        point["published"] = miss(given, steps)
    return point


def _table(points: Sequence[Measured], what: str) -> str:
    sizes = dict.fromkeys((point["clients"], point["width"]) for point in sorted(points, key=_size))
    values = {(p["clients"], p["width"], p["cosine"]): p.get(what) for p in points}
    header = ["clients x columns", *(f"cosine {cosine:g}" for cosine in COSINES)]
    rows = [
        [f"{m} x {d:,}", *(_error(values[m, d, cosine]) for cosine in COSINES)] for m, d in sizes
    ]
    return report.table(header, rows)


def _size(point: Measured) -> tuple[int, int]:
    return point["clients"], point["width"]


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.0e}"


def _draw(points: Sequence[Measured], out: Path) -> None:
    """Errors over width: a column of panels for each number of clients, a line for each cosine."""
    columns = sorted({point["clients"] for point in points})
    figure = report.figure(1.5 + 2.1 * len(columns), 5)
    if figure is None:
        return
    panels = figure.subplots(2, len(columns), sharex=True, sharey="row", squeeze=False)
    for place, clients in enumerate(columns):
        above, below = panels[:, place]
        above.set_title(f"{clients} clients", fontsize=9)
        above.axhline(BAR, color="black", linestyle=":", linewidth=1)
        for i, cosine in enumerate(COSINES):
            line = [p for p in points if (p["clients"], p["cosine"]) == (clients, cosine)]
            style: dict[str, Any] = {"linewidth": 1, "markersize": 4, **report.STYLES[i]}
            label = f"cosine {cosine:g}"
            _plot(above, line, "missed", label=label, **style)
            _plot(above, line, "published", linestyle="--", alpha=0.5, **style)
            _plot(below, line, "gram", **style)
        below.set_xlabel("columns")
    panels[0, 0].set_ylabel("target missed by\n(dashed: published)")
    panels[1, 0].set_ylabel("error of the Gram matrix")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    report.save(figure, "precision", out)


def _plot(axes: Any, line: Sequence[Measured], what: str, **style: Any) -> None:
    known = [point for point in line if point.get(what)]
    axes.loglog([point["width"] for point in known], [point[what] for point in known], **style)


if __name__ == "__main__":
    sys.exit(main())
