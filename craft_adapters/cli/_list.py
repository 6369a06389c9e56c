"""``craft-adapters list``: what is there, and what is broken."""

from __future__ import annotations

import contextlib
import json
import math
import reprlib
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from .._options import Option
    from ..plugins import PluginManager

__all__ = ["list_plugins"]


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--plugins",
    metavar="A,B",
    help="Load only these plug-ins (names of entry points); default: $CRAFT_ADAPTERS_PLUGINS.",
)
def list_plugins(as_json: bool, plugins: str | None) -> None:
    """List rules and their options, host adapters, and broken plug-ins."""
    from ..plugins import PluginManager

    # What a plug-in prints when it is imported must not end up in the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        found = _collect(PluginManager(only=plugins or None))
    if as_json:
        click.echo(json.dumps(found, indent=2, allow_nan=False))
    else:
        _print(found)


# --- What there is, as plain data -------------------------------------------------------------


def _collect(manager: PluginManager) -> dict[str, Any]:
    from .. import __version__
    from .._options import describe

    rules, adapters = manager.aggregators, manager.adapters
    return {
        "version": __version__,
        "aggregators": [
            {
                "name": name,
                "plugin": rules.origin(name).plugin,
                "distribution": rules.origin(name).distribution,
                "options": [_option(option) for option in describe(factory)],
            }
            for name, factory in rules.items()
        ],
        "adapters": [
            {
                "name": name,
                "plugin": adapters.origin(name).plugin,
                "distribution": adapters.origin(name).distribution,
                "host": adapter.distribution,
                "found": adapter.found,
                "tested": list(adapter.tested),
                "extra": adapter.extra,
                "gives": sorted(adapter.gives),
                "summary": adapter.summary,
            }
            for name, adapter in adapters.items()
        ],
        "broken": [
            {"name": plugin.name, "distribution": plugin.distribution, "reason": plugin.reason}
            for plugin in manager.broken
        ],
    }


def _option(option: Option) -> dict[str, Any]:
    return {
        "name": option.name,
        "type": option.type,
        "required": option.required,
        "default": None if option.required else _plain(option.default),
        "choices": [_plain(choice) for choice in option.choices],
        "python_only": option.python_only,
    }


def _plain(value: object) -> str | int | float | bool | None:
    """What JSON can say, else the text of it: of a function its name, without an address."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else _REPR.repr(value)  # a repr that fails is survived


_REPR = reprlib.Repr()
_REPR.maxother = 80


# --- The same for people ----------------------------------------------------------------------


_UNLIMITED = 10_000  # for a pipe or a file: no line is broken, whatever its length
_NAMES = ("option", "adapter", "host", "install")  # columns to be copied: never broken


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console

    # Types and reasons contain brackets, which are markup to rich.
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, emoji=False, highlight=False, width=_UNLIMITED)
    _heading(console, "Aggregation rules")
    for rule in found["aggregators"]:
        console.print(f"  {rule['name']}  (plug-in {rule['plugin']!r} of {rule['distribution']})")
        options = [(option["name"], _type(option), _default(option)) for option in rule["options"]]
        _table(console, ("option", "type", "default"), options)
    _heading(console, "Host adapters")
    columns = ("adapter", "host", "found", "tested", "install", "summary")
    _table(console, columns, map(_row, found["adapters"]))
    if found["broken"]:
        _heading(console, "Broken plug-ins, left out")
    for plugin in found["broken"]:
        console.print(f"  {plugin['name']} of {plugin['distribution']}: {plugin['reason']}")
    console.print("Meanings: docs/rules.md")


def _heading(console: Console, text: str) -> None:
    console.print(text, style="bold")


def _type(option: dict[str, Any]) -> str:
    return f"{option['type']} (in Python only)" if option["python_only"] else str(option["type"])


def _default(option: dict[str, Any]) -> str:
    return "(required)" if option["required"] else str(option["default"])


def _row(adapter: dict[str, Any]) -> tuple[str, ...]:
    found, tested = adapter["found"], adapter["tested"]
    if found is None and adapter["host"]:
        found = "not installed"
    elif found is None:  # no host, or one that has no distribution: then tested says which
        ours = adapter["distribution"] == "craft-adapters" and not tested
        found = "bundled" if ours else "-"
    elif found not in tested:
        found += " (not tested)"
    return (
        adapter["name"],
        adapter["host"] or "-",
        found,
        ", ".join(tested) or "-",
        f"craft-adapters[{adapter['extra']}]" if adapter["extra"] else "-",
        adapter["summary"],
    )


def _table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.padding import Padding
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="italic")
    for column in columns:
        table.add_column(column, no_wrap=column in _NAMES, overflow="fold")
    for row in rows:
        table.add_row(*row)
    if not table.row_count:
        console.print("    none")
        return
    console.print(Padding(table, (0, 0, 0, 4), expand=False))
