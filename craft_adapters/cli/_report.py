"""``craft-adapters report``: runs side by side, as a table, as files, and as pictures."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..simulation import Series

__all__ = ["report"]

_COLUMNS = {"mean": "mean", "worst10": "worst 10 %", "best10": "best 10 %", "std": "std"}


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path())
@click.option("--csv", "csv_path", metavar="FILE", type=click.Path(), help="Write a CSV file.")
@click.option("--markdown", metavar="FILE", type=click.Path(), help="Write a Markdown table.")
@click.option("--pictures", metavar="FOLDER", type=click.Path(), help="Draw pictures there.")
@click.option("--format", "ending", default="png", help="Of the pictures: png, pdf, svg.")
def report(
    runs: tuple[str, ...],
    csv_path: str | None,
    markdown: str | None,
    pictures: str | None,
    ending: str,
) -> None:
    """Compare RUNS: run folders, or folders with runs in them. Seeds are put together."""
    from ..simulation import collect

    series = collect(runs)
    rows = [_row(one) for one in series]
    _print(series)
    written: list[Path] = []
    if csv_path is not None:
        written.append(_write(csv_path, _csv(rows)))
    if markdown is not None:
        written.append(_write(markdown, _markdown(series)))
    if pictures is not None:
        try:
            written += draw(series, Path(pictures), ending)
        except ImportError as error:
            raise click.ClickException(" ".join(str(error).split())) from error
    for path in written:
        click.echo(f"written: {path}")


def _row(series: Series) -> dict[str, Any]:
    """One line of the CSV file; a figure that is missing is an empty field."""
    row: dict[str, Any] = {
        "label": series.label,
        "rule": series.config["aggregator.name"],
        "method": series.config["method.name"],
        "model": series.model,
        "seeds": len(series.runs),
        "round": series.last_round,
    }
    for figure in (*_COLUMNS, "loss", "mean_weighted", "min", "max"):
        row[figure] = series.last(figure)
        row[f"{figure}_over_seeds"] = series.spread(figure)
    return row


def _cell(series: Series, figure: str) -> str:
    value, spread = series.last(figure), series.spread(figure)
    if value is None:
        return "-"
    return f"{value:.3f}" if spread is None else f"{value:.3f} ± {spread:.3f}"


def _table(series: Sequence[Series]) -> tuple[list[str], list[list[str]]]:
    head = ["run", "seeds", "round", *_COLUMNS.values()]
    return head, [
        [
            one.label,
            str(len(one.runs)),
            str(one.last_round),
            *(_cell(one, figure) for figure in _COLUMNS),
        ]
        for one in series
    ]


def _print(series: Sequence[Series]) -> None:
    from rich.console import Console
    from rich.table import Table

    head, rows = _table(series)
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:  # a pipe or a file: no line is broken
        console = Console(markup=False, highlight=False, width=10_000)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _markdown(series: Sequence[Series]) -> str:
    head, rows = _table(series)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def _write(path: str, text: str) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def draw(series: Sequence[Series], folder: Path, ending: str = "png") -> list[Path]:
    """Draw what there is to draw of these series; returns the files."""
    from .. import plots

    def file(name: str) -> Path:
        return folder / f"{name}.{ending}"

    figures = {"mean": "mean", "best 10 %": "best10", "worst 10 %": "worst10"}
    before = {"initial model": series[0].clients(first=True)}
    written = [
        plots.accuracy_over_rounds({s.label: _curves(s) for s in series}, file("accuracy")),
        plots.client_histogram(before | {s.label: s.clients() for s in series}, file("clients")),
        plots.radar(
            {s.label: {name: s.last(key) for name, key in figures.items()} for s in series},
            file("radar"),
        ),
        plots.std_bars(_by_model(series), file("std")),
    ]
    if conflicts := {s.label: c for s in series if s.model == "global" and (c := s.conflicts())}:
        written.append(plots.conflicts_per_layer(conflicts, file("conflicts")))
    for number, (label, grid) in enumerate(_grids(series).items()):
        path = file(f"grid-{number}")
        written.append(plots.heat_map(grid, path, title=label))
    return written


def _curves(series: Series) -> dict[str, Any]:
    curves: dict[str, Any] = {}
    for figure in ("mean", "worst10"):
        curves["rounds"], curves[figure], band = series.curve(figure)
        if len(series.runs) > 1:
            curves[f"{figure}_band"] = band
    return curves


def _by_model(series: Sequence[Series]) -> dict[str, dict[str, float | None]]:
    """Rule -> (model of its config -> std): runs of one rule at several depths come together."""
    models = {s.config["model.name"] for s in series}
    bars: dict[str, dict[str, float | None]] = {}
    for s in series:
        model = str(s.config["model.name"])
        label = s.label
        if len(models) > 1:
            for text in (f", name {model}", f"name {model}, ", f" (name {model})"):
                label = label.replace(text, "")
        bars.setdefault(label, {})[model] = s.last("std")
    return bars


def _grids(series: Sequence[Series]) -> dict[str, dict[tuple[float, float], float | None]]:
    """Rule and kind of model -> mean accuracy over (server lr, client lr), where both vary."""
    grids: dict[str, dict[tuple[float, float], float | None]] = {}
    for s in series:
        server, client = s.config.get("aggregator.server_lr"), s.config["training.lr"]
        if isinstance(server, int | float):
            label = f"{s.config['method.name']}, {s.config['aggregator.name']}, {s.model}"
            grids.setdefault(label, {})[float(server), float(client)] = s.last("mean")
    return {label: grid for label, grid in grids.items() if len(grid) > 1}
