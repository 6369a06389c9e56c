"""docs/federation.md against the code that reads its keys and writes its files."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from craft_adapters._options import Option, describe
from craft_adapters.aggregators._gram_rule import GramRule
from craft_adapters.ditto import Ditto
from craft_adapters.plugins import get_plugin_manager
from craft_adapters.simulation import LocalTraining, Run, read_config
from craft_adapters.simulation._config import (
    _MODELS,
    _PARTITIONS,
    _SECTIONS,
    SWEEP_KEYS,
    _General,
    _methods,
)
from craft_adapters.simulation._folder import read_lines
from craft_adapters.simulation._results import SELECTABLE
from craft_adapters.simulation._sources import SOURCES
from craft_adapters.simulation._sweep import read_sweep

pytest.importorskip("yaml", reason="reads the configurations of the page")

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "federation.md").read_text(encoding="utf-8")
YAML = re.findall(r"^```yaml\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)

Row = list[str]


def table(text: str, heading: str) -> list[Row]:
    """The rows of the one table under a heading of any level, without its head."""
    parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
    assert parts.count(heading) == 1, heading
    lines = [line for line in parts[parts.index(heading) + 1].splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(cells) > 2 and set("".join(cells[1])) == {"-"}, heading
    assert len({len(row) for row in cells}) == 1, heading
    return cells[2:]


def plain(cell: str) -> str:
    """The words of a cell without their backticks."""
    return cell.replace("`", "")


def shown(default: Any) -> str:
    """A default as the page writes it; `none` in backticks is the word."""
    if default is inspect.Parameter.empty:
        return "must be given"
    if default is None:
        return "none"
    if isinstance(default, bool):
        return f"`{default}`".lower()
    if isinstance(default, float):
        return f"`{default:g}`"
    return f"`{list(default) if isinstance(default, tuple) else default}`"


def keys(factory: Callable[..., object]) -> Iterator[Option]:
    """What a configuration can say to it."""
    return (option for option in describe(factory) if option.name != "aggregator")


def compare(rows: list[Row], options: list[Option]) -> None:
    """Rows of key, default and meaning are these options; a meaning names the words allowed."""
    assert [(plain(key), default.partition(";")[0]) for key, default, _ in rows] == [
        (option.name, shown(option.default)) for option in options
    ]
    for (key, _, meaning), option in zip(rows, options, strict=True):
        words = [word for word in option.choices if f"`{word}`" not in meaning]
        assert not words, f"{key}: {words} not named in {meaning!r}"


def test_general_keys() -> None:
    compare(table(PAGE, "General keys"), list(keys(_General)))


def test_keys_of_training() -> None:
    compare(table(PAGE, "training"), list(keys(LocalTraining)))


def test_options_of_ditto() -> None:
    text = (DOCS / "hosts" / "ditto.md").read_text(encoding="utf-8")
    compare(table(text, "The options"), list(keys(Ditto)))


def test_options_of_every_rule() -> None:
    text = (DOCS / "rules.md").read_text(encoding="utf-8")
    rows = table(text, "Options of every rule")
    compare(rows, list(describe(GramRule)))
    manager = get_plugin_manager()
    whole = [
        name
        for name in manager.aggregators
        if any(
            (option.name, option.default) == ("granularity", "model")
            for option in describe(manager.aggregator_factory(name))
        )
    ]
    assert rows[0][1] == f"`layer`; {', '.join(f'`{name}`' for name in sorted(whole))}: `model`"


def test_sections() -> None:
    rows = table(PAGE, "Sections")
    assert {plain(section): plain(name) for section, name, _ in rows} == _SECTIONS


@pytest.mark.parametrize(
    ("section", "kinds"), [("data", SOURCES), ("partition", _PARTITIONS), ("model", _MODELS)]
)
def test_keys_by_name(section: str, kinds: Mapping[str, Callable[..., object]]) -> None:
    found: dict[str, dict[str, Row]] = {}
    for names, *row in table(PAGE, section):
        for name in kinds if names == "all" else plain(names).split(", "):
            known = found.setdefault(name, {})
            if key := plain(row[0]):
                assert key not in known, (name, key)
                known[key] = row
    assert found.keys() == kinds.keys()
    for name, factory in kinds.items():
        options = list(keys(factory))
        assert found[name].keys() == {option.name for option in options}, name
        compare([found[name][option.name] for option in options], options)


def test_methods() -> None:
    assert [plain(name) for name, _ in table(PAGE, "method")] == _methods()


def test_keys_of_a_sweep() -> None:
    rows = {plain(key): meaning for key, _, meaning in table(PAGE, "A sweep")}
    assert rows.keys() == set(SWEEP_KEYS)
    assert re.findall(r"`(\w+)`", rows["select"]) == list(SELECTABLE)


def test_defaults_of_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text("rules: {one: {}}", encoding="utf-8")
    sweep = read_sweep(tmp_path / "sweep.yaml")
    defaults = {plain(key): default for key, default, _ in table(PAGE, "A sweep")}
    assert defaults["base"] == "none" and not sweep.base
    assert defaults["seeds"] == shown(sweep.seeds)
    assert defaults["select"] == shown(sweep.select)


@pytest.mark.parametrize("text", YAML)
def test_configurations_of_the_page_are_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text, encoding="utf-8")
    if "\nrules:" in text:
        assert len(read_sweep(path).first()) == 6
    else:
        read_config(path)


def test_files_and_columns_of_a_run(tmp_path: Path) -> None:
    small = ["rounds=1", "clients_per_round=2", "partition.clients=5", "model.hidden=4"]
    run = Run(read_config(None, small), str(tmp_path / "run"))
    assert len(list(run)) == 2
    patterns = [plain(name) for name, _ in table(PAGE, "What a run leaves")]
    files = sorted(path.name for path in run.folder.path.iterdir() if path.is_file())
    assert len(files) == len(patterns)
    for name in files:
        assert any(fnmatch(name, pattern) for pattern in patterns), name
    for lines in ("metrics.jsonl", "rounds.jsonl"):
        (*_, record) = read_lines(run.folder / lines)
        assert [plain(column) for column, _ in table(PAGE, lines)] == list(record), lines
