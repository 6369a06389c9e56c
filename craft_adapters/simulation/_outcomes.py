"""What came out of a sweep, from its folder; and which point of a rule's grid is the best."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from ._folder import RunFolder, read_lines
from ._results import SELECTABLE, Series, gather, what_counts
from ._sweep import Point, Sweep, SweepRun, read_sweep

__all__ = ["ERROR_FILE", "Compared", "Outcome", "best", "compare", "outcome", "outcomes", "then"]

Status = Literal["finished", "diverged", "failed", "unfinished"]
ERROR_FILE = "error.txt"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run's folder says.

    Attributes:
        run: The run.
        status: "failed" has an error.txt; "unfinished" is running, was stopped, or not begun.
        reason: Why it diverged or failed; empty otherwise.
        metrics: The last evaluation of the model that counts: the personal one where there is one.
        round: Number of rounds of that evaluation.
    """

    run: SweepRun
    status: Status
    reason: str
    metrics: Mapping[str, Any]

    @property
    def round(self) -> int | None:
        """Number of rounds at the evaluation; None before the first."""
        return self.metrics.get("round")


def outcome(run: SweepRun, folder: Path) -> Outcome:
    """What the folder of a run in a sweep's folder says."""
    files = RunFolder(folder / run.folder)
    about, saved = files.read("run.json") or {}, files.read("checkpoint.json") or {}
    error = files / ERROR_FILE
    status: Status = "unfinished"
    reason = ""
    if error.is_file():
        status, reason = "failed", error.read_text("utf-8").strip().splitlines()[-1]
    elif about.get("status") == "diverged":
        status, reason = "diverged", str(about.get("diverged"))
    elif about.get("status") == "finished" and saved.get("round", -1) >= run.config.general.rounds:
        status = "finished"
    records = list(read_lines(files / "metrics.jsonl"))
    kind = what_counts(record["model"] for record in records)
    last: dict[str, Any] = next((r for r in reversed(records) if r["model"] == kind), {})
    return Outcome(run, status, reason, last)


def then(sweep: Sweep, rule: str, folder: Path) -> tuple[SweepRun, ...]:
    """What is run once the first runs of a rule are over: its best point, other seeds."""
    chosen = best(sweep, rule, folder) if sweep.select else None
    return sweep.runs(chosen, sweep.seeds[1:]) if chosen is not None else ()


def best(sweep: Sweep, rule: str, folder: Path, *, so_far: bool = False) -> Point | None:
    """The best point of a rule on what is run of each; None before all of that is over.

    Of equals, the one with the higher mean, and then the first. A point with a run that
    diverged or failed is no candidate; None too if there is no other.

    Args:
        sweep: The sweep.
        rule: The label.
        folder: The sweep's folder.
        so_far: Choose from what has finished, though others have not.
    """
    return _best(sweep, _tried(sweep, rule, folder), so_far)


def _tried(sweep: Sweep, rule: str, folder: Path) -> list[list[Outcome]]:
    """What came out of each point of a rule, with the seeds that all points are run with."""
    return [
        [outcome(run, folder) for run in sweep.runs(point, sweep.seeds_of_first)]
        for point in sweep.of(rule)
    ]


def _best(sweep: Sweep, tried: list[list[Outcome]], so_far: bool) -> Point | None:
    if not so_far and any(one.status == "unfinished" for runs in tried for one in runs):
        return None

    def merit(runs: list[Outcome]) -> tuple[float, ...]:
        names = (sweep.select or SELECTABLE[0], SELECTABLE[0])
        return tuple(fmean(one.metrics.get(name) or 0.0 for one in runs) for name in names)

    finished = [runs for runs in tried if all(one.status == "finished" for one in runs)]
    return max(finished, key=merit)[0].run.point if finished else None


def outcomes(sweep: Sweep, folder: Path) -> Iterator[Outcome]:
    """What came out, of all runs that the sweep asks for so far."""
    yield from (outcome(run, folder) for run in sweep.first())
    for rule in sweep.rules:
        yield from (outcome(run, folder) for run in then(sweep, rule, folder))


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """A rule of a sweep at its best point so far.

    Attributes:
        rule: The rule's label.
        best: The point; None if nothing has finished.
        points: Number of points of its grid.
        count: Status -> number of runs.
        series: What counts first: a series of the runs at the best point that have finished for
            each kind of model.
        grid: (server lr, client lr) -> the figure that the best point is chosen by, where the
            rule has both; None for a point that has not finished.
        figure: Its name.
    """

    rule: str
    best: Point | None
    points: int
    count: Mapping[str, int]
    series: tuple[Series, ...]
    grid: Mapping[tuple[float, float], float | None]
    figure: str


def compare(folder: str | os.PathLike[str]) -> list[Compared]:
    """The rules of a sweep, from its folder; also while it is running.

    Raises:
        OptionError: the folder's sweep.json cannot be read.
    """
    path = Path(folder)
    sweep = read_sweep(path / "sweep.json")
    return [_compared(sweep, rule, path) for rule in sweep.rules]


def _compared(sweep: Sweep, rule: str, folder: Path) -> Compared:
    by_point = _tried(sweep, rule, folder)
    chosen = _best(sweep, by_point, so_far=True)
    tried = [one for runs in by_point for one in runs]
    known = {one.run.folder: one for one in tried}
    runs = sweep.runs(chosen, sweep.seeds) if chosen else ()
    played = [known.get(run.folder) or outcome(run, folder) for run in runs]
    everything = tried + [one for one in played if one.run.folder not in known]
    finished = [folder / one.run.folder for one in played if one.status == "finished"]
    series = gather(rule, finished) if finished else []
    counting = what_counts(one.model for one in series)
    figure = sweep.select or SELECTABLE[0]
    grid: dict[tuple[float, float], list[float | None]] = {}
    for one in tried:
        server = one.run.config.sections["aggregator"].get("server_lr")
        if server is not None:
            value = one.metrics.get(figure) if one.status == "finished" else None
            grid.setdefault((server, one.run.config.training.lr), []).append(value)
    return Compared(
        rule,
        chosen,
        len(sweep.of(rule)),
        Counter(one.status for one in everything),
        tuple(sorted(series, key=lambda one: one.model != counting)),
        {key: _mean(values) for key, values in grid.items()},
        figure,
    )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
