"""What came out of runs, read from their folders."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ._config import settled
from ._folder import RunFolder, flat, read_lines

__all__ = ["SELECTABLE", "Series", "collect", "find_runs", "gather", "what_counts"]

SELECTABLE = ("mean", "worst10", "best10", "mean_weighted", "min")
"""Figures of which more is better."""
# What tells runs of one series apart, or does not change what is learnt.
_SEEDS = {"seed", "rounds", "evaluate_every", "checkpoint_every", "device", "training.engine"}


@dataclass(frozen=True, slots=True)
class _Folder:
    path: Path
    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    rounds: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Runs that differ in their seed only, and one kind of model in them.

    Attributes:
        label: What it is called: a rule's label, or rule, method, and what else differs.
        model: "global" or "personal".
        config: Option -> value, sections and options joined by a dot.
        runs: Per run the records of metrics.jsonl of this kind of model.
        rounds: Per run the records of rounds.jsonl.
    """

    label: str
    model: str
    config: Mapping[str, Any]
    runs: tuple[tuple[Mapping[str, Any], ...], ...]
    rounds: tuple[tuple[Mapping[str, Any], ...], ...]

    @property
    def last_round(self) -> int:
        """The last round that all runs have evaluated."""
        return int(min(run[-1]["round"] for run in self.runs))

    def last(self, figure: str) -> float | None:
        """Mean over the seeds of a figure at :attr:`last_round`; None if nobody was evaluated."""
        return self._mean(figure, self.last_round)

    def spread(self, figure: str) -> float | None:
        """Sample standard deviation over the seeds at :attr:`last_round`; None for one seed."""
        values = self._values(figure, self.last_round)
        return statistics.stdev(values) if len(values) > 1 else None

    def per_round(self, figure: str) -> float | None:
        """Median of a figure of rounds.jsonl, over the rounds of all seeds; None without any."""
        found = (record.get(figure) for run in self.rounds for record in run)
        values = [value for value in found if value is not None]
        return statistics.median(values) if values else None

    def curve(self, figure: str) -> tuple[list[int], list[float | None], list[list[float | None]]]:
        """Rounds, means over the seeds, and (lowest, highest)."""
        common = set.intersection(*({r["round"] for r in run} for run in self.runs))
        rounds = sorted(common)
        found = [self._values(figure, round) for round in rounds]
        means = [statistics.fmean(v) if v else None for v in found]
        low = [min(v) if v else None for v in found]
        high = [max(v) if v else None for v in found]
        return rounds, means, [low, high]

    def clients(self, *, first: bool = False) -> list[float | None]:
        """Every client's accuracy at the last (or first) round, of all seeds together."""
        scores: list[float | None] = []
        for run in self.runs:
            wanted = run[0]["round"] if first else self.last_round
            scores += _at(run, wanted)["client_accuracy"].values()
        return scores

    def conflicts(self) -> dict[str, list[float]]:
        """Layer -> conflicting pairs per round, of the first seed."""
        played = [record["groups"] for record in self.rounds[0] if "groups" in record]
        names = list(dict.fromkeys(name for groups in played for name in groups))
        return {
            name: [groups.get(name, {}).get("conflicts_before", 0) for groups in played]
            for name in names
        }

    def _values(self, figure: str, round: int) -> list[float]:
        found = (_at(run, round)[figure] for run in self.runs)
        return [value for value in found if value is not None]

    def _mean(self, figure: str, round: int) -> float | None:
        values = self._values(figure, round)
        return statistics.fmean(values) if values else None


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The run folders among and below these folders, in the order of their names.

    Raises:
        OptionError: a folder that does not exist, or holds no run.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        below = sorted(config.parent for config in path.rglob("config.json"))
        below = [folder for folder in below if (folder / "metrics.jsonl").is_file()]
        if not below:
            raise OptionError(f"{path}: no run is here (a folder with config.json, metrics.jsonl)")
        found += [folder for folder in below if folder not in found]
    return found


def collect(paths: Iterable[str | os.PathLike[str]]) -> list[Series]:
    """Read runs, put together those that differ in their seed only, and name them.

    Raises:
        OptionError: a folder without a run, or runs without any evaluation.
    """
    folders = [_read(path) for path in find_runs(paths)]
    groups: dict[str, list[_Folder]] = {}
    for folder in folders:
        same = {key: value for key, value in folder.config.items() if key not in _SEEDS}
        groups.setdefault(repr(sorted(same.items())), []).append(folder)
    labels = _labels([members[0].config for members in groups.values()])
    return [
        one
        for label, members in zip(labels, groups.values(), strict=True)
        for one in _series(label, members)
    ]


def gather(label: str, paths: Iterable[str | os.PathLike[str]]) -> list[Series]:
    """The series of these run folders, which differ in their seed only: one per kind of model."""
    return _series(label, [_read(Path(path)) for path in paths])


def _series(label: str, members: Sequence[_Folder]) -> list[Series]:
    made = []
    kinds = dict.fromkeys(record["model"] for record in members[0].metrics)
    for model in kinds:
        runs = (tuple(r for r in m.metrics if r["model"] == model) for m in members)
        made.append(
            Series(
                label=label if len(kinds) == 1 else f"{label}, {model}",
                model=model,
                config=members[0].config,
                runs=tuple(run for run in runs if run),
                rounds=tuple(tuple(m.rounds) for m in members),
            )
        )
    return made


def what_counts(kinds: Iterable[str]) -> str:
    """Which kind of model a method is about: the personal one where there is one."""
    return "personal" if "personal" in set(kinds) else "global"


def _read(path: Path) -> _Folder:
    metrics = list(read_lines(path / "metrics.jsonl"))
    if not metrics:
        raise OptionError(f"{path}: nothing has been evaluated yet")
    config = flat(settled(RunFolder(path).read("config.json")))
    return _Folder(path, config, metrics, list(read_lines(path / "rounds.jsonl")))


def _labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rule and method, and then every option in which series of the same rule differ."""

    def base(config: Mapping[str, Any]) -> str:
        rule, method = str(config["aggregator.name"]), str(config["method.name"])
        return rule if method == "shared" else f"{method}+{rule}"

    labels = []
    for config in configs:
        alike = [other for other in configs if base(other) == base(config)]
        keys = dict.fromkeys(key for other in alike for key in other if key not in _SEEDS)
        differ = [k for k in keys if any(o.get(k) != config.get(k) for o in alike)]
        details = ", ".join(f"{k.partition('.')[2] or k} {config.get(k)}" for k in differ)
        labels.append(f"{base(config)} ({details})" if details else base(config))
    return labels


def _at(run: Sequence[Mapping[str, Any]], round: int) -> Mapping[str, Any]:
    return next(record for record in run if record["round"] == round)
