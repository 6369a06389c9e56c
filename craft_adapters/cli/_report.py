"""``craft-adapters report``: runs side by side, as a table, as files, and as pictures."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..simulation import Series
    from ..simulation._outcomes import Compared

__all__ = ["report"]

_TOGETHER = 7  # curves in a panel, before they hide each other
_COLUMNS = {"mean": "mean", "worst10": "worst 10 %", "best10": "best 10 %", "std": "std"}


@dataclass(frozen=True, slots=True)
class _Row:
    """A series, or a rule of a sweep of which nothing has finished; what a sweep adds."""

    label: str
    series: Series | None
    sweep: Compared | None = None


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path())
@click.option("--csv", "csv_path", metavar="FILE", type=click.Path(), help="Write a CSV file.")
@click.option("--markdown", metavar="FILE", type=click.Path(), help="Write a Markdown table.")
@click.option("--pictures", metavar="FOLDER", type=click.Path(), help="Draw pictures there.")
@click.option(
    "--format",
    "ending",
    type=click.Choice(["png", "pdf", "svg"]),
    default="png",
    show_default=True,
    help="Of the pictures.",
)
def report(
    runs: tuple[str, ...],
    csv_path: str | None,
    markdown: str | None,
    pictures: str | None,
    ending: str,
) -> None:
    """Compare RUNS: run folders, folders with runs in them, or folders of sweeps.

    Seeds are put together. Of a sweep, each rule is shown at its best point.
    """
    rows = _rows(runs)
    _print(rows)
    failed = sum(row.sweep.count.get("failed", 0) for row in _once(rows) if row.sweep)
    if failed:
        click.echo(f"failed runs: {failed}; their folders hold an error.txt")
    written: list[Path] = []
    if csv_path is not None:
        written.append(_write(csv_path, _csv([_fields(row) for row in rows])))
    if markdown is not None:
        written.append(_write(markdown, _markdown(rows)))
    if pictures is not None:
        try:
            written += _draw(rows, Path(pictures), ending)
        except ImportError as error:
            raise click.ClickException(" ".join(str(error).split())) from error
    for path in written:
        click.echo(f"written: {path}")


def _rows(paths: Sequence[str]) -> list[_Row]:
    from ..simulation import collect
    from ..simulation._outcomes import compare

    sweeps = [path for path in paths if Path(path, "sweep.json").is_file()]
    plain = [path for path in paths if path not in sweeps]
    rows = [_Row(one.label, one) for one in collect(plain)] if plain else []
    for path in sweeps:
        prefix = f"{Path(path).resolve().name}: " if len(paths) > 1 else ""
        for rule in compare(path):
            for one in rule.series:
                rows.append(_Row(prefix + rule.rule, one, rule))
            if not rule.series:
                rows.append(_Row(prefix + rule.rule, None, rule))
    return rows


def _once(rows: Sequence[_Row]) -> list[_Row]:
    """One row of each rule: the model that counts, which comes first."""
    return list({row.label: row for row in reversed(rows)}.values())[::-1]


def _fields(row: _Row) -> dict[str, Any]:
    """One line of the CSV file; a figure that is missing is an empty field."""
    series, sweep = row.series, row.sweep
    config = {} if series is None else series.config
    fields: dict[str, Any] = {
        "label": row.label,
        "rule": config.get("aggregator.name"),
        "method": config.get("method.name"),
        "model": series and series.model,
        "seeds": 0 if series is None else len(series.runs),
        "round": series and series.last_round,
    }
    for figure in (*_COLUMNS, "loss", "mean_weighted", "min", "max"):
        fields[figure] = series and series.last(figure)
        fields[f"{figure}_over_seeds"] = series and series.spread(figure)
    for figure in ("conflicts_before", "aggregate_seconds"):
        fields[figure] = series and series.per_round(figure)
    fields["point"] = sweep and sweep.best and sweep.best.label
    fields["points"] = sweep and sweep.points
    for status in ("finished", "diverged", "failed", "unfinished"):
        fields[status] = sweep and sweep.count.get(status, 0)
    return fields


def _table(rows: Sequence[_Row]) -> tuple[list[str], list[list[str]]]:
    head = ["run", "model", "seeds", "round", *_COLUMNS.values(), "conflicts", "s / aggregate"]
    if any(row.sweep for row in rows):
        head += ["best point", "points", "diverged"]
    return head, [_cells(row)[: len(head)] for row in rows]


def _cells(row: _Row) -> list[str]:
    series, sweep = row.series, row.sweep
    if series is None:
        cells = [row.label, "-", "0", "-", *["-"] * (len(_COLUMNS) + 2)]
    else:
        cells = [
            row.label,
            series.model,
            str(len(series.runs)),
            str(series.last_round),
            *(_figure(series, figure) for figure in _COLUMNS),
            _number(series.per_round("conflicts_before"), ".0f"),
            _number(series.per_round("aggregate_seconds"), ".3g"),
        ]
    if sweep is None:
        return [*cells, "", "", ""]
    point = "-" if sweep.best is None else sweep.best.label
    return [*cells, point, str(sweep.points), str(sweep.count.get("diverged", 0))]


def _figure(series: Series, figure: str) -> str:
    value, spread = series.last(figure), series.spread(figure)
    return _number(value, ".3f") + ("" if spread is None else f" ± {spread:.3f}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _print(rows: Sequence[_Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    head, lines = _table(rows)
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:  # a pipe or a file: no line is broken
        console = Console(markup=False, highlight=False, width=10_000)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        text = name in ("run", "best point")
        table.add_column(
            name, justify="left" if text else "right", no_wrap=not text, overflow="fold"
        )
    for line in lines:
        table.add_row(*line)
    console.print(table)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _markdown(rows: Sequence[_Row]) -> str:
    head, cells = _table(rows)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *cells]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def _write(path: str, text: str) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def _draw(rows: Sequence[_Row], folder: Path, ending: str) -> list[Path]:
    """Draw what there is to draw; returns the files. Of a sweep, the model that counts."""
    from .. import plots

    def file(name: str) -> Path:
        return folder / f"{name}.{ending}"

    compared = _once([row for row in rows if row.sweep]) + [row for row in rows if not row.sweep]
    shown = {row.label: row.series for row in compared if row.series is not None}
    if not shown:
        raise click.ClickException("nothing has finished yet that could be drawn")
    figures = {"mean": "mean", "best 10 %": "best10", "worst 10 %": "worst10"}
    before = {"initial model": next(iter(shown.values())).clients(first=True)}
    written = [
        plots.accuracy_over_rounds(
            _panels({label: _curves(s) for label, s in shown.items()}), file("accuracy")
        ),
        plots.client_histogram(
            before | {k: s.clients() for k, s in shown.items()}, file("clients")
        ),
        plots.radar(
            _panels(
                {
                    label: {name: s.last(key) for name, key in figures.items()}
                    for label, s in shown.items()
                }
            ),
            file("radar"),
        ),
        plots.std_bars(_by_model(shown), file("std")),
    ]
    # The rule sees the shared model's updates, whatever model counts.
    if conflicts := {label: c for label, s in shown.items() if (c := s.conflicts())}:
        written.append(plots.conflicts_per_layer(conflicts, file("conflicts")))
    for title, grid in _grids(rows).items():
        name = "-".join(re.findall(r"[A-Za-z0-9+]+", title)).lower()
        written.append(plots.heat_map(grid, file(f"grid-{name}"), title=title))
    return written


def _panels(drawn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rules in one panel; many, each in its own beside the first one."""
    if len(drawn) <= _TOGETHER:
        return drawn
    first, *others = drawn
    return {label: {"the rule": drawn[label], first: drawn[first]} for label in others}


def _curves(series: Series) -> dict[str, Any]:
    curves: dict[str, Any] = {}
    for figure in ("mean", "worst10"):
        curves["rounds"], curves[figure], band = series.curve(figure)
        if len(series.runs) > 1:
            curves[f"{figure}_band"] = band
    return curves


def _by_model(shown: Mapping[str, Series]) -> dict[str, dict[str, float | None]]:
    """Rule -> (model of its config -> std): runs of one rule at several depths come together."""
    models = {s.config["model.name"] for s in shown.values()}
    bars: dict[str, dict[str, float | None]] = {}
    for label, s in shown.items():
        model = str(s.config["model.name"])
        if len(models) > 1:
            for text in (f", name {model}", f"name {model}, ", f" (name {model})", f" {model}"):
                label = label.replace(text, "")
        bars.setdefault(label, {})[model] = s.last("std")
    return bars


def _grids(rows: Sequence[_Row]) -> dict[str, dict[tuple[float, float], float | None]]:
    """Title -> a figure over (server lr, client lr), where it is known at several."""
    grids: dict[str, dict[tuple[float, float], float | None]] = {}
    for row in rows:
        if row.sweep is not None:
            title = f"{row.label}: {_COLUMNS.get(row.sweep.figure, row.sweep.figure)}"
            grids[title] = dict(row.sweep.grid)
        elif row.series is not None:
            s = row.series
            server, client = s.config.get("aggregator.server_lr"), s.config["training.lr"]
            if isinstance(server, int | float):
                title = f"{s.config['method.name']}, {s.config['aggregator.name']}, {s.model}"
                grids.setdefault(title, {})[float(server), float(client)] = s.last("mean")
    return {title: grid for title, grid in grids.items() if len(grid) > 1}
