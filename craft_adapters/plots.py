"""Pictures of a comparison, for a screen and for a page printed in black and white.

Drawn with matplotlib's objects alone, never ``pyplot``: no window, no global state, no change of
the caller's settings. The ending of the path picks the format (``.png``, ``.pdf``, ``.svg``, ...).
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .metrics import fairness

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "accuracy_over_rounds",
    "client_histogram",
    "conflicts_per_layer",
    "heat_map",
    "radar",
    "std_bars",
]

Run: TypeAlias = Mapping[str, Sequence[Any]]
Scores: TypeAlias = Mapping[Any, float | None] | Iterable[float | None]
FloatArray: TypeAlias = npt.NDArray[np.float64]

# Okabe and Ito's palette, which colour-blind readers can tell apart; without colour the markers do
# it. Seven and eleven have no common factor: 77 rules before a pair comes again.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*")
_DASHES = (0, (4, 2))
_GREY = "0.35"
_WIDEST = 4  # panels side by side, before they get too small on a page


def accuracy_over_rounds(
    runs: Mapping[str, Run] | Mapping[str, Mapping[str, Run]],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> Path:
    """Draw test accuracy against the round: mean solid, worst 10 % of clients dashed.

    A rule has one colour and one marker in all panels, filled on the mean and hollow on the worst
    10 %. None and NaN leave a gap. The first rule given lies on top.

    Args:
        runs: Label -> run; or, for panels side by side, panel title -> (label -> run). A run maps
            ``"rounds"``, ``"mean"`` and ``"worst10"`` to sequences of the same length, and may map
            ``"mean_band"`` and ``"worst10_band"`` to pairs (lowest, highest) of such sequences:
            what several seeds span is shaded.
        path: The file to write; missing folders are created.
        title: Above the picture.

    Returns:
        ``path``.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no runs, or a run without one of its sequences, or with different lengths.
    """
    return _save(_accuracy_figure(runs, title), path)


def client_histogram(
    runs: Mapping[str, Scores] | Mapping[str, Mapping[str, Scores]],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> Path:
    """Draw how test accuracy is spread over the clients: one small panel per rule.

    All panels share their axes. The mean over clients is marked by a solid line, the mean of the
    worst 10 % by a dashed one. Clients without test data (None, NaN) are left out.

    Args:
        runs: Label -> accuracies by client id or by position; or, for several worlds, world ->
            (label -> accuracies): then each world starts a new row of panels.
        path: The file to write; missing folders are created.
        title: Above the picture.

    Returns:
        ``path``.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no runs, or an accuracy that is infinite or negative.
    """
    return _save(_histogram_figure(runs, title), path)


def radar(
    runs: Mapping[str, Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> Path:
    """Draw a rule's figures on the axes of a star: mean, best and worst clients.

    Args:
        runs: Label -> (name of the figure -> value in [0, 1]), all with the same names, at least
            three of them; or, for stars side by side, panel title -> (label -> figures). None is
            drawn at zero.
        path: The file to write; missing folders are created.
        title: Above the picture.

    Returns:
        ``path``.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no runs, fewer than three figures, or runs with different ones.
    """
    return _save(_radar_figure(runs, title), path)


def std_bars(
    runs: Mapping[str, Mapping[str, float | None]],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> Path:
    """Draw the standard deviation over clients as bars: side by side per rule, for each model.

    Args:
        runs: Label -> (model, "resnet20" -> standard deviation). None leaves a gap.
        path: The file to write; missing folders are created.
        title: Above the picture.

    Returns:
        ``path``.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no runs.
    """
    return _save(_bars_figure(runs, title), path)


def heat_map(
    grid: Mapping[tuple[float, float], float | None],
    path: str | os.PathLike[str],
    *,
    rows: str = "Server learning rate",
    columns: str = "Client learning rate",
    title: str | None = None,
) -> Path:
    """Draw a figure over a grid of two settings, each cell with its number in it.

    Args:
        grid: (row setting, column setting) -> value in [0, 1]; None and missing cells stay empty.
        path: The file to write; missing folders are created.
        rows: Name of the first setting.
        columns: Name of the second one.
        title: Above the picture.

    Returns:
        ``path``.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: the grid is empty.
    """
    return _save(_heat_figure(grid, rows, columns, title), path)


def conflicts_per_layer(
    runs: Mapping[str, Mapping[str, Sequence[float]]],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> Path:
    """Draw how many pairs of clients conflict in each layer, over the rounds: dark is many.

    Args:
        runs: Label -> (layer, in the order of the model -> number per round); one panel each.
        path: The file to write; missing folders are created.
        title: Above the picture.

    Returns:
        ``path``.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no runs, or layers with different numbers of rounds.
    """
    return _save(_conflicts_figure(runs, title), path)


def _accuracy_figure(runs: Mapping[str, Any], title: str | None = None) -> Figure:
    panels = _panels(runs, lambda r: not _is_mapping(r) or not all(map(_is_mapping, r.values())))
    curves = {
        panel: {label: _curves(_place(panel, label), run) for label, run in by_label.items()}
        for panel, by_label in panels.items()
    }
    styles = _styles(panels)
    columns, rows = _evenly(len(panels), _WIDEST)
    width = max(4.8, 2.4 * columns)
    per_line, legend_lines = _per_line([*styles, "mean of clients"], width, more=1)
    figure = _new_figure(width, 2.4 * rows + 0.3 + 0.19 * legend_lines, title)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes, (panel, by_label) in zip(grid.flat, curves.items(), strict=False):
        axes.set_title(panel, fontsize=10)
        axes.set_xlabel("Round", fontsize=9)
        axes.locator_params(axis="x", integer=True)
        for i, (label, run) in enumerate(by_label.items()):
            _draw_run(axes, run, *styles[label], i, len(by_label))
    for row in grid:
        row[0].set_ylabel("Test accuracy", fontsize=9)
    _tidy(figure, grid, used=[i < len(panels) for i in range(grid.size)])
    grid[0, 0].set_ylim(bottom=0)
    lines: list[dict[str, Any]] = [
        {"label": label, "color": colour, "marker": marker, "markersize": 5}
        for label, (colour, marker) in styles.items()
    ]
    lines.append({"label": "mean of clients", "color": _GREY})
    lines.append({"label": "worst 10 %", "color": _GREY, "linestyle": _DASHES})
    _legend(figure, lines, per_line)
    return figure


def _draw_run(
    axes: Axes, run: dict[str, FloatArray], colour: str, marker: str, i: int, n: int
) -> None:
    # About eight markers a line, shifted from rule to rule, or rules that agree would hide each
    # other.
    step = max(1, len(run["rounds"]) // 8)
    common: dict[str, Any] = {
        "color": colour,
        "marker": marker,
        "markersize": 4.5,
        "markevery": (i * step // n, step),
        "zorder": 3 - i / n,
    }
    for name in ("mean", "worst10"):
        if f"{name}_band" in run:
            low, high = run[f"{name}_band"]
            axes.fill_between(run["rounds"], low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(run["rounds"], run["mean"], linewidth=1.6, **common)
    common |= {"linestyle": _DASHES, "markerfacecolor": "white"}
    axes.plot(run["rounds"], run["worst10"], linewidth=1.1, **common)


def _histogram_figure(runs: Mapping[str, Any], title: str | None = None) -> Figure:
    worlds = _panels(runs, lambda r: not _is_mapping(r) or all(map(_is_score, r.values())))
    scores = {
        world: {label: _evaluated(_place(world, label), run) for label, run in by_label.items()}
        for world, by_label in worlds.items()
    }
    styles = _styles(worlds)
    columns, _ = _evenly(max(map(len, worlds.values())), _WIDEST)
    # Row by row: the world it belongs to, and the rules in it.
    rows = [
        (world, list(by_label)[start : start + columns])
        for world, by_label in worlds.items()
        for start in range(0, len(by_label), columns)
    ]
    highest = max([1.0, *(v.max() for by in scores.values() for v in by.values() if len(v))])
    edges = np.linspace(0.0, highest, 21)
    figure = _new_figure(max(3.6, 2.0 * columns), 1.65 * len(rows) + 0.6, title)
    grid = figure.subplots(len(rows), columns, sharex=True, sharey=True, squeeze=False)
    for row, (world, labels) in zip(grid, rows, strict=True):
        row[0].set_ylabel((f"{world}\n" if world else "") + "Clients (%)", fontsize=9)
        for axes, label in zip(row, labels, strict=False):
            _draw_histogram(axes, label, scores[world][label], edges, styles[label][0])
    used = [i < len(labels) for _, labels in rows for i in range(columns)]
    for axes in _tidy(figure, grid, used):
        axes.set_xlabel("Test accuracy", fontsize=9)
    grid[0, 0].set_xlim(edges[0], edges[-1])
    grid[0, 0].xaxis.set_major_formatter("{x:g}")
    black: dict[str, Any] = {"color": "black", "linewidth": 1.3}
    dashed = {**black, "label": "mean of the worst 10 %", "linestyle": _DASHES}
    _legend(figure, [{**black, "label": "mean of clients"}, dashed], 2)
    return figure


def _draw_histogram(
    axes: Axes, label: str, values: FloatArray, edges: FloatArray, colour: str
) -> None:
    axes.set_title(label, fontsize=9, fontweight="bold", loc="left", pad=13)
    note = "no client has test data"
    if len(values):
        summary = fairness(values)
        mean, worst = float(summary.mean_unweighted or 0), float(summary.worst10 or 0)
        # In per cent of the clients, so that worlds of different sizes share an axis.
        share = np.full(len(values), 100 / len(values))
        # Pale, or the lines across them would drown in print.
        bars: dict[str, Any] = {"color": colour, "alpha": 0.55, "edgecolor": "white"}
        axes.hist(values, edges.tolist(), weights=share, linewidth=0.4, **bars)
        # Not clipped: a worst 10 % of exactly 0 lies on the frame.
        axes.axvline(mean, color="black", linewidth=1.3, clip_on=False)
        axes.axvline(worst, color="black", linewidth=1.3, linestyle=_DASHES, clip_on=False)
        note = f"mean {mean:.3f}, worst 10 % {worst:.3f}"
    axes.text(0, 1.03, note, transform=axes.transAxes, fontsize=7, color=_GREY, va="bottom")


def _radar_figure(runs: Mapping[str, Any], title: str | None = None) -> Figure:
    stars = _panels(runs, lambda r: not _is_mapping(r) or all(map(_is_score, r.values())))
    styles = _styles(stars)
    names = list(next(iter(next(iter(stars.values())).values())))
    if len(names) < 3:
        raise ValueError(f"a star needs at least three figures, got {', '.join(names)}")
    angles = np.linspace(0, 2 * math.pi, len(names), endpoint=False)
    columns, rows = _evenly(len(stars), _WIDEST)
    side = 4.6 if len(stars) == 1 else 2.6
    per_line, legend_lines = _per_line(styles, side * columns)
    figure = _new_figure(
        side * columns, 0.8 * side * rows + 0.19 * legend_lines + 0.2 * (len(stars) > 1), title
    )
    grid = figure.subplots(rows, columns, squeeze=False, subplot_kw={"projection": "polar"})
    for axes, (panel, by_label) in zip(grid.flat, stars.items(), strict=False):
        for i, (label, values) in enumerate(by_label.items()):
            if list(values) != names:
                raise ValueError(
                    f"{_place(panel, label)} has {', '.join(values)}; expected {', '.join(names)}"
                )
            colour, marker = styles[label]
            radii = [0.0 if v is None or math.isnan(v) else float(v) for v in values.values()]
            axes.plot(
                [*angles, angles[0]],
                [*radii, radii[0]],
                color=colour,
                marker=marker,
                markersize=5,
                linewidth=1.4,
                linestyle=("-", "--", ":", "-.")[i % 4],
            )
        axes.set_title(panel, fontsize=10)
        axes.set_theta_offset(math.pi / 2)
        axes.set_xticks(angles, names, fontsize=9 if len(stars) == 1 else 7)
        axes.set_ylim(0, 1)
        axes.tick_params(axis="x", pad=12 if len(stars) == 1 else 4)
        axes.tick_params(axis="y", labelsize=7 if len(stars) == 1 else 5)
    for axes in grid.flat[len(stars) :]:
        axes.remove()
    lines = [
        {"label": label, "color": colour, "marker": marker, "markersize": 5}
        for label, (colour, marker) in styles.items()
    ]
    _legend(figure, lines, per_line)
    return figure


# Bars are told apart by these in black and white.
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo")


def _bars_figure(
    runs: Mapping[str, Mapping[str, float | None]], title: str | None = None
) -> Figure:
    styles = _styles(_panels({"": runs}, lambda r: False))
    models = list(dict.fromkeys(model for values in runs.values() for model in values))
    figure = _new_figure(max(3.6, 0.8 + 0.35 * len(models) * (len(runs) + 1)), 2.8, title)
    axes = figure.subplots()
    width = 0.8 / len(runs)
    for i, (label, values) in enumerate(runs.items()):
        heights = [_or_nan(values.get(model)) for model in models]
        places = np.arange(len(models)) + (i - (len(runs) - 1) / 2) * width
        axes.bar(
            places,
            heights,
            width,
            label=label,
            color=styles[label][0],
            alpha=0.75,
            hatch=_HATCHES[i % len(_HATCHES)],
            edgecolor="white",
        )
        for x, y in zip(places, heights, strict=True):
            if not math.isnan(y):
                axes.text(x, y, f"{y:.3f}", ha="center", va="bottom", fontsize=6.5)
    axes.set_xticks(np.arange(len(models)), models)
    axes.set_ylabel("Std over clients", fontsize=9)
    _tidy(figure, np.array([[axes]]), used=[True])
    figure.legend(
        loc="outside lower center",
        ncols=_per_line(runs, figure.get_figwidth())[0],
        fontsize=8,
        frameon=False,
    )
    return figure


def _heat_figure(
    grid: Mapping[tuple[float, float], float | None],
    rows: str,
    columns: str,
    title: str | None = None,
) -> Figure:
    if not grid:
        raise ValueError("the grid is empty: give at least one (row, column) -> value")
    ys, xs = (sorted({key[i] for key in grid}) for i in (0, 1))
    values = np.array([[_or_nan(grid.get((y, x))) for x in xs] for y in ys])
    figure = _new_figure(1.6 + 0.75 * len(xs), 1.3 + 0.55 * len(ys), title)
    axes = figure.subplots()
    # From white for the lowest to a grey on which black can be read for the highest.
    known = values[~np.isnan(values)]
    low, high = (known.min(), known.max()) if len(known) else (0.0, 1.0)
    top = low + 2 * max(high - low, 1e-3)
    axes.imshow(values, cmap="Greys", vmin=low, vmax=top, aspect="auto", origin="lower")
    for (i, j), value in np.ndenumerate(values):
        text = "-" if math.isnan(value) else f"{value:.3f}"
        axes.text(j, i, text, ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(xs)), [f"{x:g}" for x in xs], fontsize=8)
    axes.set_yticks(range(len(ys)), [f"{y:g}" for y in ys], fontsize=8)
    axes.set_xlabel(columns, fontsize=9)
    axes.set_ylabel(rows, fontsize=9)
    return figure


def _conflicts_figure(
    runs: Mapping[str, Mapping[str, Sequence[float]]], title: str | None = None
) -> Figure:
    _panels({"": runs}, lambda r: False)
    tables: dict[str, FloatArray] = {}
    for label, layers in runs.items():
        lengths = {len(counts) for counts in layers.values()}
        if len(lengths) != 1:
            raise ValueError(f"{_place('', label)}: its layers have {sorted(lengths)} rounds")
        tables[label] = np.array(list(layers.values()), dtype=np.float64)
    columns, lines = _evenly(len(runs), 3)
    tallest = max(len(layers) for layers in runs.values())
    figure = _new_figure(max(3.8, 3.2 * columns), lines * (0.9 + 0.16 * tallest), title)
    grid = figure.subplots(lines, columns, squeeze=False)
    highest = max([1.0, *(float(table.max()) for table in tables.values() if table.size)])
    image: Any = None
    for axes, (label, table) in zip(grid.flat, tables.items(), strict=False):
        image = axes.imshow(table, cmap="Greys", vmin=0, vmax=highest, aspect="auto")
        axes.set_title(label, fontsize=9)
        axes.set_yticks(range(len(runs[label])), list(runs[label]), fontsize=6)
        axes.locator_params(axis="x", integer=True)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_xlabel("Round", fontsize=9)
    for axes in grid.flat[len(tables) :]:
        axes.remove()
    bar = figure.colorbar(image, ax=list(grid.flat[: len(tables)]), shrink=0.8)
    bar.set_label("Conflicting pairs", fontsize=8)
    return figure


def _panels(
    runs: Mapping[str, Any], is_run: Callable[[Any], bool]
) -> Mapping[str, Mapping[str, Any]]:
    """The runs panel by panel; runs given flat are one panel without a title."""
    panels: Mapping[str, Any] = {"": runs} if any(map(is_run, runs.values())) else runs
    if not panels or not all(panels.values()):
        raise ValueError("no runs to draw: give at least one label -> run (in each panel)")
    return panels


def _place(panel: str, label: str) -> str:
    return f"run {label!r} of {panel!r}" if panel else f"run {label!r}"


def _curves(where: str, run: Run) -> dict[str, FloatArray]:
    names = ("rounds", "mean", "worst10")
    if missing := [name for name in names if name not in run]:
        raise ValueError(f"{where} has no {', '.join(missing)}; it has {', '.join(map(str, run))}")
    # dtype float turns None into NaN, and matplotlib leaves a gap there.
    curves = {name: np.array(run[name], dtype=np.float64) for name in names}
    bands = {
        name: np.array(run[name], dtype=np.float64)
        for name in ("mean_band", "worst10_band")
        if name in run
    }
    one = curves["rounds"].shape
    if any(c.shape != one for c in curves.values()) or any(
        b.shape != (2, *one) for b in bands.values()
    ):
        shapes = ", ".join(f"{name} {curve.shape}" for name, curve in (curves | bands).items())
        raise ValueError(f"{where}: one value per round is needed, but the shapes are {shapes}")
    return curves | bands


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_score(value: Any) -> bool:
    return value is None or isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0


def _evaluated(where: str, run: Scores) -> FloatArray:
    given = list(run.values() if isinstance(run, Mapping) else run)
    values = np.array([v for v in map(_or_nan, given) if not math.isnan(v)], dtype=np.float64)
    if len(values) and not (values.min() >= 0 and math.isfinite(values.max())):
        raise ValueError(f"{where}: accuracies must be finite and >= 0, or None without test data")
    return values


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _styles(panels: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Label -> colour and marker, the same in every panel."""
    labels = dict.fromkeys(label for by_label in panels.values() for label in by_label)
    return {
        label: (_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)])
        for i, label in enumerate(labels)
    }


def _evenly(items: int, at_most: int) -> tuple[int, int]:
    """Columns and rows for so many items, the rows as full as each other: 5 as 3 + 2."""
    rows = -(-items // at_most)
    return -(-items // rows), rows


def _per_line(labels: Iterable[str], width: float, more: int = 0) -> tuple[int, int]:
    """Columns and rows of a legend in so many inches, at the size of its letters."""
    known = list(labels)
    widest = 0.55 + 0.068 * max(map(len, known))
    return _evenly(len(known) + more, max(1, int(width / widest)))


def _new_figure(width: float, height: float, title: str | None) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"pictures need matplotlib ({error}): pip install 'craft-adapters[plots]'"
        ) from error
    figure = Figure(figsize=(width, height + (0.3 if title else 0)), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _tidy(figure: Figure, grid: Any, used: Sequence[bool]) -> list[Axes]:
    """Remove the unused axes and take ink away; return the lowest axes of each column."""
    lowest: dict[int, Axes] = {}
    for i, (axes, keep) in enumerate(zip(grid.flat, used, strict=True)):
        if keep:
            lowest[i % grid.shape[1]] = axes
        else:
            axes.remove()
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.grid(axis="y", color="0.88", linewidth=0.6)
        axes.set_axisbelow(True)
    # Shared axes have numbers in the last row only, which may end before the last column.
    for axes in lowest.values():
        axes.tick_params(labelbottom=True)
    return list(lowest.values())


def _legend(figure: Figure, lines: Iterable[Mapping[str, Any]], per_line: int) -> None:
    from matplotlib.lines import Line2D

    figure.legend(
        handles=[Line2D([], [], **line) for line in lines],
        loc="outside lower center",
        ncols=per_line,
        fontsize=8,
        frameon=False,
        handlelength=2.6,
    )


def _save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    return path
