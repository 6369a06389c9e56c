"""``craft-adapters sweep``: a grid of runs, side by side."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from ._progress import display, figures

if TYPE_CHECKING:
    from ..simulation._outcomes import Outcome
    from ..simulation._sweep import Sweep, SweepRun
    from ..simulation._workers import Event

__all__ = ["sweep"]

_OVER = ("finished", "diverged")  # not run again


@click.command()
@click.argument("file", metavar="SWEEP", type=click.Path(dir_okay=False))
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override the base: rounds=50, data.path=mnist.npz. May be repeated.",
)
@click.option(
    "--out", metavar="FOLDER", help="The sweep's folder; default: runs/<name of the file>."
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Processes side by side; default: as many as there are cores.",
)
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
def sweep(
    file: str, overrides: tuple[str, ...], out: str | None, jobs: int | None, quiet: bool
) -> None:
    """Run the grid of runs that the YAML file SWEEP describes, in processes side by side.

    A sweep that was stopped, in whatever way, goes on when the same command is given again: runs
    that are over stay as they are, others go on from their last checkpoint, and failed ones are
    tried again. ``craft-adapters report FOLDER`` compares the rules.
    """
    from ..simulation._outcomes import outcomes
    from ..simulation._sweep import read_sweep
    from ..simulation._workers import cores

    folder = Path(out) if out is not None else Path("runs", Path(file).stem)
    try:
        plan = read_sweep(file, overrides)
        _begin(plan, folder)
    except ImportError as error:
        raise click.ClickException(" ".join(str(error).split())) from error
    try:
        _play(plan, folder, jobs or cores(), quiet)
    except KeyboardInterrupt:
        raise click.ClickException(
            f"stopped; the same command goes on with what is in {folder}"
        ) from None
    finally:
        found = list(outcomes(plan, folder))
        _write_results(folder / "results.csv", plan, folder, found)
    _conclude(found, folder, quiet)


def _begin(plan: Sweep, folder: Path) -> None:
    """Check that the folder is of this sweep and the data are there; note what the sweep is."""
    from ..simulation import RunFolder
    from ..simulation._outcomes import outcomes
    from ..simulation._sweep import look_for_data

    for run in plan.first():
        RunFolder(folder / run.folder).compare(run.config.resolved())
    todo = (one.run for one in outcomes(plan, folder) if one.status not in _OVER)
    look_for_data(run.config for run in todo)
    RunFolder(folder).write("sweep.json", plan.resolved())


def _play(plan: Sweep, folder: Path, jobs: int, quiet: bool) -> None:
    from ..simulation._outcomes import outcome, then
    from ..simulation._workers import play

    waiting: deque[SweepRun] = deque()
    # Rule -> how many of its first runs are not over; at zero its best point is known.
    left = dict.fromkeys(plan.rules, 0)

    def add(runs: Sequence[SweepRun]) -> int:
        todo = [r for r in runs if outcome(r, folder).status not in _OVER]
        waiting.extend(todo)
        return len(todo)

    first = plan.first()
    for rule in plan.rules:
        left[rule] = add([run for run in first if run.point.rule == rule])
    for rule in plan.rules:
        if not left[rule]:
            add(then(plan, rule, folder))
    later = len(plan.rules) * (len(plan.seeds) - 1) if plan.select else 0
    with _display(len(first) + later, quiet) as shown:
        over = len(first) - sum(left.values())
        for event in play(waiting, folder, jobs):
            if event.over:
                over += 1
                rule = event.run.point.rule
                left[rule] -= 1
                if left[rule] == 0:
                    add(then(plan, rule, folder))
                shown.over(outcome(event.run, folder), over)
            else:
                shown.round(event)


_FIGURES = ("mean", "worst10", "best10", "std", "mean_weighted", "min", "max", "loss")


def _write_results(path: Path, plan: Sweep, folder: Path, outcomes: Sequence[Outcome]) -> None:
    """A line per run. A value of the grid that a rule does not have is an empty field."""
    from ..simulation._outcomes import best

    keys = list(dict.fromkeys(key for point in plan.points for key in point.values))
    chosen = [best(plan, rule, folder) for rule in plan.rules] if plan.select else plan.points

    def row(one: Outcome) -> dict[str, Any]:
        point = one.run.point
        return {
            "rule": point.rule,
            **{key: point.values.get(key) for key in keys},
            "seed": one.run.seed,
            "chosen": int(point in chosen),
            "status": one.status,
            "reason": one.reason,
            "model": one.metrics.get("model"),
            "round": one.round,
            **{figure: one.metrics.get(figure) for figure in _FIGURES},
            "folder": one.run.folder,
        }

    rows = [row(one) for one in outcomes]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _conclude(outcomes: Sequence[Outcome], folder: Path, quiet: bool) -> None:
    count = {status: 0 for status in ("finished", "diverged", "failed")}
    for one in outcomes:
        count[one.status] = count.get(one.status, 0) + 1
    if not quiet:
        click.echo(", ".join(f"{number} {status}" for status, number in count.items() if number))
        click.echo(f"written: {folder}")
    failed = [one for one in outcomes if one.status == "failed"]
    if failed:
        listed = "".join(f"\n  {folder / one.run.folder}: {one.reason}" for one in failed)
        raise click.ClickException(
            f"{len(failed)} of {len(outcomes)} runs failed (their error.txt says how):{listed}"
        )


class _Display(Protocol):
    def round(self, event: Event) -> None: ...
    def over(self, outcome: Outcome, count: int) -> None: ...


class _Quiet:
    def round(self, event: Event) -> None:
        pass

    def over(self, outcome: Outcome, count: int) -> None:
        pass


class _Lines:
    """For a file or a pipe: a line per run."""

    def __init__(self, total: int) -> None:
        self.total = total

    def round(self, event: Event) -> None:
        pass

    def over(self, outcome: Outcome, count: int) -> None:
        click.echo(f"{count}/{self.total} {_name(outcome.run)}: {_said(outcome)}")


class _Bars:
    """For a terminal: a bar for the sweep, one for each run under way, a line per run above."""

    def __init__(self, progress: Any, total: int) -> None:
        self.progress = progress
        self.whole = progress.add_task("runs", total=total)
        self.tasks: dict[str, Any] = {}

    def round(self, event: Event) -> None:
        run = event.run
        if run.folder not in self.tasks:
            total = run.config.general.rounds
            self.tasks[run.folder] = self.progress.add_task(_name(run), total=total)
        self.progress.update(self.tasks[run.folder], completed=event.round)

    def over(self, outcome: Outcome, count: int) -> None:
        if (task := self.tasks.pop(outcome.run.folder, None)) is not None:
            self.progress.remove_task(task)
        self.progress.update(self.whole, completed=count)
        self.progress.console.print(f"{_name(outcome.run)}: {_said(outcome)}")


def _display(total: int, quiet: bool) -> AbstractContextManager[_Display]:
    if quiet:
        return nullcontext(_Quiet())
    return display(lambda: _Lines(total), lambda progress: _Bars(progress, total))


def _name(run: SweepRun) -> str:
    return ", ".join(filter(None, (run.point.rule, run.point.label, f"seed {run.seed}")))


def _said(outcome: Outcome) -> str:
    if outcome.status == "finished":
        return figures(outcome.metrics)
    return f"{outcome.status} ({outcome.reason})" if outcome.reason else outcome.status
