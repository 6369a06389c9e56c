# ruff: noqa: RUF001 (the letters in the picture are Greek)
"""Draw docs/figures/geometry.svg: what CRAFT does with two clients, computed by the rule itself.

python docs/figures/geometry.py [FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor

from craft_adapters import ClientUpdate, get_aggregator

CLIENTS = torch.tensor([[3.0, 0.6, 0.0], [-1.0, 0.8, 0.0]], dtype=torch.float64)
REFERENCE = torch.tensor([0.12, 0.5, 0.86], dtype=torch.float64)  # the step of the round before
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#007a55", "#666666"
STYLE = {
    "font.size": 9,
    "svg.fonttype": "path",  # the same letters everywhere
    "svg.hashsalt": "geometry",  # the same file from the same numbers
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def step(rule: str, reference: Tensor | None = None, **options: Any) -> Tensor:
    """The direction in which a rule moves the model, of clients with equally many examples."""
    aggregator = get_aggregator(rule, **options)
    if reference is not None:
        aggregator.load_state_dict({"reference": {"w": reference}})
    updates = [ClientUpdate(i, 1, {"w": row}, "update") for i, row in enumerate(CLIENTS)]
    start = {"w": torch.zeros(3, dtype=torch.float64)}
    return -torch.as_tensor(aggregator.aggregate(start, updates).state["w"])


def craft(reference: Tensor | None = None) -> Tensor:
    """CRAFT's step before the server's learning rate."""
    return step("craft", reference, server_lr=1.0)


def arrow(axes: Any, end: Sequence[float], text: str, color: str, offset: tuple[int, int]) -> None:
    """An arrow from the origin, named at its end."""
    axes.annotate("", end, (0, 0), arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.8})
    axes.annotate(text, end, offset, textcoords="offset points", color=color)


def against(axes: Any, row: Tensor, color: str) -> None:
    """Shade where steps point against a client."""
    x, y = (row / row.norm())[:2].tolist()
    far, deep = 10.0, -0.18
    corners = [
        (-y * far, x * far),
        (y * far, -x * far),
        (y * far + x * deep, -x * far + y * deep),
        (-y * far + x * deep, x * far + y * deep),
    ]
    axes.fill(*zip(*corners, strict=True), color=color, alpha=0.18, lw=0)


def frame(axes: Any, title: str, x: tuple[float, float], y: tuple[float, float]) -> None:
    """Limits, equal scales, no ticks."""
    axes.set(title=title, xlim=x, ylim=y, aspect="equal", xticks=[], yticks=[])
    axes.title.set_fontsize(10)


def averaging(axes: Any) -> None:
    """Left: the mean of two updates points against one of them."""
    frame(axes, "Averaging", (-1.7, 3.5), (-1.5, 2.9))
    for i, (row, color) in enumerate(zip(CLIENTS, (BLUE, ORANGE), strict=True), 1):
        against(axes, row, color)
        arrow(axes, row[:2].tolist(), f"g{i}", color, (3, 3))
    mean = step("fedavg")
    arrow(axes, mean[:2].tolist(), "mean", GREY, (-4, 7))
    product = float(mean @ CLIENTS[1] / CLIENTS[1].norm())
    axes.text(
        0.1,
        -1.3,
        f"mean · u2 = {product:.2f}: it points\nagainst client 2 (shaded side)",
        color=GREY,
    )


def first_round(axes: Any) -> None:
    """Middle: the step that has the wanted inner product with both."""
    frame(axes, "CRAFT, first round (r = 0)", (-1.3, 1.7), (-0.85, 1.67))
    for i, (row, color) in enumerate(zip(CLIENTS, (BLUE, ORANGE), strict=True), 1):
        against(axes, row, color)
        unit = row / row.norm()
        arrow(axes, unit[:2].tolist(), f"u{i}", color, (4, 3) if i == 1 else (-15, 0))
        foot, along = 0.5 * unit[:2], torch.stack([-unit[1], unit[0]])
        ends = torch.stack([foot - 9 * along, foot + 9 * along])
        axes.plot(*ends.T.tolist(), color=color, lw=1, ls="--")
    g = craft()
    arrow(axes, g[:2].tolist(), "g", GREEN, (8, -3))
    axes.text(0.76, -0.6, "u1 · g = ρ1", color=BLUE)
    axes.text(-0.45, 1.4, "u2 · g = ρ2", color=ORANGE)


def later_round(axes: Any) -> None:
    """Right: the point of all steps with these inner products that is closest to the reference."""
    frame(axes, "CRAFT, later: closest to r", (-0.55, 1.95), (-0.62, 1.48))
    r = REFERENCE / REFERENCE.norm()
    least, g = craft(), craft(REFERENCE)
    across = least / least.norm()  # the clients' span; up: what they say nothing about

    def place(vector: Tensor) -> list[float]:
        return [float(vector @ across), float(vector[2])]

    wall = place(least)[0]
    axes.axhline(0, color=GREY, lw=0.8)
    axes.axvline(wall, color=GREEN, lw=1, ls="--")
    axes.plot(*zip(place(r), place(g), strict=True), color=GREY, lw=1, ls=":")
    arrow(axes, place(r), "r", GREY, (-3, 5))
    arrow(axes, place(least), "U⁺ρ", GREEN, (-30, -12))
    arrow(axes, place(g), "g", GREEN, (6, 2))
    axes.text(wall + 0.06, 0.25, "all steps\nwith U g = ρ", color=GREEN)
    axes.text(
        -0.5, -0.5, "→ span of the clients' updates\n↑ all that is orthogonal to them", color=GREY
    )


def main(path: Path) -> None:
    """Draw the three panels into a file."""
    with rc_context(STYLE):
        figure = Figure(figsize=(10, 3.3), layout="constrained")
        for axes, draw in zip(
            figure.subplots(1, 3), (averaging, first_round, later_round), strict=True
        ):
            draw(axes)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
