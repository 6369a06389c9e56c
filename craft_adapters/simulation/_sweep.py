"""A grid of runs, read from a file."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .._options import coerce
from ..errors import OptionError, nearest
from ._config import (
    RUN_KEYS,
    SWEEP_KEYS,
    RunConfig,
    combine,
    load_file,
    override,
    read_config,
)
from ._results import SELECTABLE

__all__ = ["Point", "Sweep", "SweepRun", "look_for_data", "read_sweep"]


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a rule's grid.

    Attributes:
        rule: The rule's label.
        values: Dotted key -> value, as text.
        config: The configuration of its runs, but for the seed.
    """

    rule: str
    values: Mapping[str, str]
    config: RunConfig

    @property
    def label(self) -> str:
        """The values in words."""
        return ", ".join(f"{name} {value}" for name, value in _short(self.values).items())


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep: a point with a seed, and the name of its folder."""

    point: Point
    seed: int
    config: RunConfig
    folder: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """A grid of runs for each rule; :func:`read_sweep` makes one.

    Attributes:
        source: Where it came from, for error messages.
        base: What all runs have in common.
        seeds: At least one.
        select: The figure by which the best point of a rule is chosen, on the first seed, to be
            run with the other seeds; None: every point is run with every seed.
        points: The points, rule by rule.
    """

    source: str
    base: Mapping[str, Any]
    seeds: tuple[int, ...]
    select: str | None
    points: tuple[Point, ...]

    @property
    def rules(self) -> tuple[str, ...]:
        """The labels."""
        return tuple(dict.fromkeys(point.rule for point in self.points))

    def of(self, rule: str) -> tuple[Point, ...]:
        """The points of a rule."""
        return tuple(point for point in self.points if point.rule == rule)

    def runs(self, point: Point, seeds: Iterable[int]) -> tuple[SweepRun, ...]:
        """A point's runs with these seeds."""
        return tuple(
            SweepRun(point, seed, point.config.with_seed(seed), _folder(point, seed))
            for seed in seeds
        )

    def first(self) -> tuple[SweepRun, ...]:
        """What is run in any case: every point, with the first seed or with all."""
        return tuple(r for point in self.points for r in self.runs(point, self.seeds_of_first))

    @property
    def seeds_of_first(self) -> tuple[int, ...]:
        """The seeds that every point is run with."""
        return self.seeds[:1] if self.select else self.seeds

    def resolved(self) -> dict[str, Any]:
        """The sweep as JSON, which :func:`read_sweep` reads back."""
        rules: dict[str, Any] = {}
        for point in self.points:
            entry = {"values": dict(point.values), "config": point.config.resolved()}
            rules.setdefault(point.rule, {"points": []})["points"].append(entry)
        return {
            "source": self.source,
            "base": dict(self.base),
            "seeds": list(self.seeds),
            "select": self.select,
            "rules": rules,
        }


def read_sweep(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Sweep:
    """Read and check a sweep's file, or the sweep.json of a sweep's folder.

    ======== =====================================================================================
    base     a configuration of a run, or the name of its file, relative to the sweep's file
    seeds    whole numbers; [0] unless given
    select   the figure by which a rule's best point is chosen on the first seed ("mean",
             "worst10", ...); without it every point is run with every seed
    rules    label -> sections over those of the base, and ``grid``: dotted key -> list of values;
             or the name of a file with that
    ======== =====================================================================================

    Args:
        path: A YAML or JSON file.
        overrides: "key=value" or "section.key=value" for the base.

    Raises:
        OptionError: what is wrong, where, and what is allowed; every point is checked.
    """
    source = os.fspath(path)
    raw = load_file(path)
    if Path(source).name == "sweep.json":
        return _saved(raw)
    if unknown := [key for key in raw if key not in SWEEP_KEYS]:
        tail = nearest(str(unknown[0]), SWEEP_KEYS)
        if unknown[0] in RUN_KEYS and "rules" not in raw:
            tail = f"this is the config of a run: craft-adapters run {source}"
        raise OptionError(f"{source}: no key {unknown[0]!r}; {tail}")

    def part(key: str) -> Mapping[str, Any]:
        value = raw.get(key)
        if isinstance(value, str) and value:
            value = load_file(Path(source).parent / value)
        return _mapping(value, f"{source}: {key}")

    whole = combine({}, part("base"), f"{source}: base")
    for text in overrides:
        override(whole, text)
    seeds = _seeds(source, raw.get("seeds", [0]))
    select = raw.get("select") or None
    if select is not None and select not in SELECTABLE:
        raise OptionError(f"{source}: select: {select!r}; {nearest(str(select), SELECTABLE)}")
    points = [
        point
        for label, rule in part("rules").items()
        for point in _points(source, str(label), whole, _mapping(rule, f"{source}: {label}"))
    ]
    sweep = Sweep(source, whole, seeds, select, tuple(points))
    _check(sweep)
    return sweep


def look_for_data(configs: Iterable[RunConfig]) -> None:
    """Load every data set that these name, once: what is missing is said before any run.

    Raises:
        DatasetNotFound: files are missing.
        OptionError: they are not what they should be.
        ImportError: an optional package is missing.
    """
    found: list[Any] = []
    for config in configs:
        data = config.names["data"], config.sections["data"]
        if data not in found:
            found.append(data)
            # The processes of the runs have the devices to themselves.
            replace(config, general=replace(config.general, device="cpu")).dataset()


def _points(
    source: str, label: str, base: Mapping[str, Any], rule: Mapping[str, Any]
) -> Iterator[Point]:
    where = f"{source}: {label}"
    own = {key: value for key, value in rule.items() if key != "grid"}
    whole = combine(base, own, where)
    grid = _mapping(rule.get("grid", {}), f"{where}: grid")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise OptionError(f"{where}: grid: {key} must be a list of values, got {values!r}")
        if key == "seed":
            raise OptionError(f"{where}: grid: seeds are given in the key seeds")
    for values in itertools.product(*grid.values()):
        config = whole
        for key, value in zip(grid, values, strict=True):
            section, dot, option = str(key).partition(".")
            config = combine(config, {section: {option: value} if dot else value}, where)
        named = dict(zip(grid, map(_text, values), strict=True))
        yield Point(label, named, read_config(config, source=where))


def _check(sweep: Sweep) -> None:
    folders: dict[str, Point] = {}
    for run in sweep.first():
        other = folders.setdefault(run.folder.lower(), run.point)
        if other is not run.point:
            raise OptionError(
                f"{sweep.source}: {other.rule} ({other.label}) and {run.point.rule} "
                f"({run.point.label}) would have the same folder, {run.folder}"
            )
    if not folders:
        raise OptionError(f"{sweep.source}: rules: there is none to run")


def _saved(raw: Mapping[str, Any]) -> Sweep:
    source = str(raw["source"])
    points = [
        Point(rule, entry["values"], read_config(entry["config"], source=f"{source}: {rule}"))
        for rule, saved in raw["rules"].items()
        for entry in saved["points"]
    ]
    seeds = tuple(raw["seeds"])
    return Sweep(source, raw["base"], seeds, raw["select"], tuple(points))


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None or value == "":
        return {}
    if not isinstance(value, Mapping):
        raise OptionError(f"{where}: expected keys and values, got {value!r}")
    return value


def _seeds(source: str, value: Any) -> tuple[int, ...]:
    def seed(*, seeds: int) -> None: ...

    listed: Sequence[Any] = value if isinstance(value, list) else [value]
    seeds = [coerce(seed, {"seeds": one}, owner=source)["seeds"] for one in listed]
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise OptionError(
            f"{source}: seeds must be different whole numbers, none negative; got {value!r}"
        )
    return tuple(seeds)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    if isinstance(value, Mapping):
        return " ".join(f"{key} {_text(one)}" for key, one in value.items())
    return str(value)


def _short(values: Mapping[str, str]) -> dict[str, str]:
    """Keys without their section, where that leaves them different."""
    ends = [key.rpartition(".")[2] for key in values]
    return {
        end if ends.count(end) == 1 else key: value
        for end, (key, value) in zip(ends, values.items(), strict=True)
    }


def _folder(point: Point, seed: int) -> str:
    """A name that is legal on Windows too, of the values: a longer grid keeps the old folders."""
    words = [point.rule, *(f"{key}-{value}" for key, value in _short(point.values).items())]
    return "_".join(_legal(word) for word in (*words, f"seed-{seed}"))


def _legal(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", text).strip("-") or "-"
