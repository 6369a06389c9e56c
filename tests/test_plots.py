"""The pictures: what is in them, and what drawing them must not do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from craft_adapters.plots import (
    _accuracy_figure,
    _bars_figure,
    _conflicts_figure,
    _heat_figure,
    _histogram_figure,
    _radar_figure,
    accuracy_over_rounds,
    client_histogram,
    conflicts_per_layer,
    heat_map,
    radar,
    std_bars,
)

RUN = {"rounds": [0, 25, 50], "mean": [0.1, 0.5, 0.8], "worst10": [0.0, 0.2, 0.4]}
SCORES = {"a": 0.2, "b": 0.6, "c": None, "d": 1.0}
DRAW = [(accuracy_over_rounds, RUN), (client_histogram, SCORES)]


@pytest.mark.parametrize(("draw", "run"), DRAW)
@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_files(draw: Any, run: Any, ending: str, tmp_path: Path) -> None:
    settings = dict(matplotlib.rcParams)
    path = tmp_path / "new" / f"picture.{ending}"
    assert draw({"craft": run, "fedavg": run}, str(path), title="digits") == path
    head = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[ending]
    assert path.read_bytes().startswith(head)
    assert dict(matplotlib.rcParams) == settings


def test_pyplot_is_never_imported(tmp_path: Path) -> None:
    code = f"""
import sys
from craft_adapters.plots import accuracy_over_rounds, client_histogram
assert "matplotlib" not in sys.modules
accuracy_over_rounds({{"craft": {RUN!r}}}, r"{tmp_path / "a.png"}")
client_histogram({{"craft": {SCORES!r}}}, r"{tmp_path / "h.png"}")
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(("draw", "run"), DRAW)
def test_without_matplotlib(
    draw: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"craft-adapters\[plots\]"):
        draw({"craft": run}, tmp_path / "p.png")


@pytest.mark.parametrize(("draw", "run"), DRAW)
def test_nothing_to_draw(draw: Any, run: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no runs to draw"):
        draw({}, tmp_path / "p.png")
    with pytest.raises(ValueError, match="no runs to draw"):
        accuracy_over_rounds({"world": {"craft": RUN}, "empty": {}}, tmp_path / "p.png")


def test_mean_is_solid_and_worst_dashed_in_the_colour_of_the_rule() -> None:
    figure = _accuracy_figure({"craft": RUN, "fedavg": RUN})
    (axes,) = figure.axes
    means, worsts = axes.lines[::2], axes.lines[1::2]
    assert [line.get_linestyle() for line in means] == ["-", "-"]
    assert [line.get_linestyle() for line in worsts] == ["--", "--"]
    assert [line.get_color() for line in means] == [line.get_color() for line in worsts]
    assert means[0].get_color() != means[1].get_color()
    assert means[0].get_marker() == worsts[0].get_marker() != means[1].get_marker()
    assert np.array_equal(worsts[0].get_ydata(), RUN["worst10"])
    assert axes.get_ylabel() == "Test accuracy"
    assert axes.get_xlabel() == "Round"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["craft", "fedavg", "mean of clients", "worst 10 %"]


def test_missing_figures_leave_a_gap() -> None:
    gaps = {"rounds": [0, 1, 2, 3], "mean": [0.1, None, 0.2, 0.3], "worst10": [float("nan")] * 4}
    (axes,) = _accuracy_figure({"craft": gaps}).axes
    assert np.array_equal(np.isnan(axes.lines[0].get_ydata()), [False, True, False, False])


def test_panels_agree_on_styles_and_scale() -> None:
    panels = {"alpha 0.1": {"craft": RUN, "fedavg": RUN}, "alpha 1": {"fedavg": RUN}}
    left, right = _accuracy_figure(panels).axes
    assert (left.get_title(), right.get_title()) == tuple(panels)
    assert left.lines[2].get_color() == right.lines[0].get_color()
    assert left.lines[2].get_marker() == right.lines[0].get_marker()
    assert left.get_ylim() == right.get_ylim()
    assert len(_accuracy_figure({panel: {"craft": RUN} for panel in "abcde"}).axes) == 5


def test_runs_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"run 'craft' of 'w' has no worst10; it has rounds, mean"):
        _accuracy_figure({"w": {"craft": {"rounds": [0], "mean": [1]}}})
    with pytest.raises(ValueError, match=r"run 'craft': .* rounds \(3,\), mean \(2,\)"):
        _accuracy_figure({"craft": {**RUN, "mean": [1, 2]}})
    with pytest.raises(ValueError, match="run 'craft' has no rounds"):
        _accuracy_figure({"craft": [0.5]})
    with pytest.raises(ValueError, match="run 'craft': accuracies must be finite"):
        _histogram_figure({"craft": [0.5, float("inf")]})


def test_histograms_share_axes_and_mark_mean_and_worst() -> None:
    runs = {"craft": SCORES, "fedavg": [0.0, 0.5], "fedadam": np.array([0.25] * 20)}
    figure = _histogram_figure(runs)
    assert len(figure.axes) == 3
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in figure.axes}) == 1
    craft = figure.axes[0]
    mean, worst = craft.lines
    assert mean.get_xdata()[0] == pytest.approx(0.6)
    assert worst.get_xdata()[0] == pytest.approx(0.2)
    assert (mean.get_linestyle(), worst.get_linestyle()) == ("-", "--")
    assert sum(bar.get_height() for bar in craft.patches) == pytest.approx(100)
    assert craft.get_title(loc="left") == "craft"
    assert craft.texts[0].get_text() == "mean 0.600, worst 10 % 0.200"


def test_each_world_starts_a_row() -> None:
    worlds = {"alpha 0.1": {"craft": SCORES, "fedavg": SCORES}, "alpha 1": {"fedavg": [None]}}
    first, second, third = _histogram_figure(worlds).axes
    assert first.get_ylabel() == "alpha 0.1\nClients (%)"
    assert second.get_ylabel() == ""
    assert third.get_ylabel() == "alpha 1\nClients (%)"
    assert third.texts[0].get_text() == "no client has test data"
    assert second.get_xlabel() == third.get_xlabel() == "Test accuracy"


def test_percentages_fit_on_the_axis() -> None:
    (axes,) = _histogram_figure({"craft": [20.0, 95.0]}).axes
    assert axes.get_xlim() == (0, 95)


STARS = {"mean": 0.8, "best 10 %": 1.0, "worst 10 %": None}
OTHERS = [
    (radar, {"craft": STARS, "fedavg": STARS}),
    (std_bars, {"craft": {"resnet20": 0.1, "resnet56": 0.2}, "fedavg": {"resnet20": None}}),
    (heat_map, {(0.1, 0.01): 0.5, (1.0, 0.05): 0.9}),
    (conflicts_per_layer, {"craft": {"conv": [1, 2, 3], "fc": [0, 0, 9]}}),
]


@pytest.mark.parametrize(("draw", "content"), OTHERS)
def test_other_pictures_are_files(draw: Any, content: Any, tmp_path: Path) -> None:
    settings = dict(matplotlib.rcParams)
    for ending in ("png", "pdf"):
        path = draw(content, tmp_path / "new" / f"p.{ending}", title="digits")
        assert path.stat().st_size > 1000
    assert dict(matplotlib.rcParams) == settings
    with pytest.raises(ValueError, match=r"no runs to draw|the grid is empty"):
        draw({}, tmp_path / "p.png")


def test_seeds_are_a_band() -> None:
    band = {**RUN, "mean_band": [[0.0, 0.4, 0.7], [0.2, 0.6, 0.9]]}
    (axes,) = _accuracy_figure({"craft": band, "fedavg": RUN}).axes
    (shade,) = axes.collections
    assert shade.get_paths()[0].get_extents().bounds == pytest.approx((0, 0, 50, 0.9))
    with pytest.raises(ValueError, match=r"mean_band \(2, 1\)"):
        _accuracy_figure({"craft": {**RUN, "mean_band": [[0.1], [0.2]]}})


def test_a_star_has_an_axis_per_figure() -> None:
    (axes,) = _radar_figure({"craft": STARS, "fedavg": STARS}).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == list(STARS)
    assert axes.lines[0].get_ydata().tolist() == [0.8, 1.0, 0.0, 0.8], "closed, None at zero"
    assert axes.lines[0].get_linestyle() != axes.lines[1].get_linestyle()
    two = _radar_figure({"first": {"craft": STARS}, "second": {"craft": STARS}}).axes
    assert [axes.get_title() for axes in two] == ["first", "second"]
    with pytest.raises(ValueError, match="at least three figures, got a"):
        _radar_figure({"craft": {"a": 1.0}})
    with pytest.raises(ValueError, match="run 'fedavg' has a; expected mean"):
        _radar_figure({"craft": STARS, "fedavg": {"a": 1.0}})


def test_bars_differ_without_colour() -> None:
    (axes,) = _bars_figure(OTHERS[1][1]).axes
    craft, fedavg = axes.containers
    assert [bar.get_height() for bar in craft] == [0.1, 0.2]
    assert craft[0].get_hatch() != fedavg[0].get_hatch()
    assert np.isnan(fedavg[0].get_height())


def test_a_grid_has_its_numbers_in_it() -> None:
    (axes,) = _heat_figure(OTHERS[2][1], "server", "client").axes
    assert [text.get_text() for text in axes.texts] == ["0.500", "-", "-", "0.900"]
    assert axes.get_xlabel() == "client"


def test_layers_are_rows() -> None:
    axes = _conflicts_figure({"craft": {"conv": [1, 2], "fc": [0, 9]}}).axes[0]
    assert axes.images[0].get_array().tolist() == [[1, 2], [0, 9]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["conv", "fc"]
    with pytest.raises(ValueError, match=r"its layers have \[1, 2\] rounds"):
        _conflicts_figure({"craft": {"conv": [1], "fc": [0, 9]}})


def test_conflicts_of_more_rules_than_fill_their_rows(tmp_path: Path) -> None:
    runs = {f"rule {i}": {"conv": [1, 2]} for i in range(4)}
    assert conflicts_per_layer(runs, tmp_path / "c.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("make", "run"),
    [(_accuracy_figure, RUN), (_radar_figure, STARS), (_bars_figure, {"mlp": 0.1})],
)
def test_a_legend_of_long_names_is_inside_the_picture(make: Any, run: Any) -> None:
    figure = make({f"a rule with quite a long name, {i}": run for i in range(12)})
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


def test_cells_are_told_apart_where_they_differ_little() -> None:
    (axes,) = _heat_figure({(1.0, 0.1): 0.90, (1.0, 0.2): 0.91, (1.0, 0.3): None}, "s", "c").axes
    image = axes.images[0]
    low, high, _ = image.norm(image.get_array())[0]
    assert low == 0
    assert 0.4 < high < 0.7, "black can be read on it"
