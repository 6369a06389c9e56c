"""How it is shown that runs go on, and their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["display", "figures"]

Display = TypeVar("Display")


@contextmanager
def display(
    lines: Callable[[], Display], bars: Callable[[Progress], Display], *columns: str
) -> Iterator[Display]:
    """Lines for a file or a pipe, bars for a terminal.

    Args:
        lines: Makes what prints lines.
        bars: Makes what moves bars.
        *columns: Formats of what stands between a bar and the time left.
    """
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        yield lines()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        *map(TextColumn, columns),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        yield bars(progress)


def figures(record: Mapping[str, Any]) -> str:
    """A record of metrics.jsonl in a few words.

    >>> figures({"model": "global", "mean": 0.91, "worst10": None})
    'global 0.910, worst 10 % -'
    """

    def text(name: str) -> str:
        return "-" if record[name] is None else f"{record[name]:.3f}"

    return f"{record['model']} {text('mean')}, worst 10 % {text('worst10')}"
