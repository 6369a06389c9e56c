"""The documentation: its code runs, its commands exist, and its pages are all of the site."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

import craft_adapters
from craft_adapters.cli import main
from craft_adapters.plugins import _specs, get_plugin_manager

yaml = pytest.importorskip("yaml", reason="reads mkdocs.yml")

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# README's Python is run by test_readme.py; its commands are looked at here.
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

_FENCE = re.compile(
    r"(?:^<!-- from (?P<source>\S+) -->\n)?"
    r"^```(?P<language>\w*)(?: \{requires=(?P<requires>[\w.]+)\})?[^\n]*\n"
    r"(?P<code>.*?)^```$",
    flags=re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    language: str
    code: str
    line: int  # of its first line of code
    source: str | None  # the file that it shows a part of
    requires: str | None  # the module that it needs


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        groups = match.groupdict()
        yield Block(
            page, groups["language"], groups["code"], line, groups["source"], groups["requires"]
        )


BLOCKS = [block for page in PAGES for block in blocks(page)]


def name(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value or "")


# --- Code ------------------------------------------------------------------------------------

# A page runs once as everybody sees it, and once more for each host that some of its blocks need.
RUNS = sorted(
    {
        (block.page, needs)
        for block in BLOCKS
        if block.language == "python" and not block.source
        for needs in {None, block.requires}
    },
    key=str,
)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "host"), RUNS, ids=name)
def test_code_runs(page: Path, host: str | None, tmp_path: Path) -> None:
    if host is not None and importlib.util.find_spec(host) is None:
        pytest.skip(f"{host} is not installed in this environment")
    code = ""
    for block in blocks(page):
        if block.language == "python" and not block.source and block.requires in (None, host):
            # On the page's own lines, for the traceback.
            code += "\n" * (block.line - 1 - code.count("\n")) + block.code
    script = tmp_path / f"docs_{page.stem}.py"  # a script called fedml.py would hide the host
    script.write_text(code, encoding="utf-8")
    strict = ["-W", "error"] if host is None else []  # hosts warn when they are imported
    done = subprocess.run(
        [sys.executable, *strict, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{page}:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.source}), ids=name)
def test_what_is_shown_of_files_is_in_them(page: Path) -> None:
    for block in blocks(page):
        if block.source:
            assert block.code.strip()
            assert block.code in (ROOT / block.source).read_text(encoding="utf-8"), block


def test_pictures_are_drawn_by_their_scripts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for script in sorted((DOCS / "figures").glob("*.py")):
        runpy.run_path(str(script))["main"](tmp_path / "drawn.svg")
        assert "<path" in (tmp_path / "drawn.svg").read_text(encoding="utf-8")
        assert script.with_suffix(".svg").exists()


# --- Commands --------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[tuple[str, bool]]:
    """Calls of craft-adapters, and whether they are whole (in a block) or only named."""
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        if block.language in ("", "sh", "bash", "console"):
            joined = block.code.replace("\\\n", " ")
            for line in joined.splitlines():
                if (stripped := line.strip().removeprefix("$ ")).startswith("craft-adapters "):
                    yield stripped, True
    for call in re.findall(r"`(craft-adapters [^`]+)`", _FENCE.sub("", text)):
        yield " ".join(call.split()), False


def refuse(call: str, *, whole: bool) -> str | None:
    """What is wrong with a call, or None. Nothing is run."""
    words = shlex.split(re.split(r"\s(?:&&|\||>)\s", call)[0], comments=True)[1:]
    if words[0] in ("--help", "-h", "--version"):
        return None
    command = main.commands.get(words[0])
    if command is None:
        return f"no command {words[0]!r}"
    context = command.context_class(command, info_name=words[0], **command.context_settings)
    try:
        given, extra, _ = command.make_parser(context).parse_args(words[1:])
    except click.UsageError as error:
        return error.format_message()
    if extra:
        return f"too many arguments: {extra}"
    there = {key for key, value in given.items() if isinstance(value, str | tuple) and value}
    missing = [each.name for each in command.params if each.required and each.name not in there]
    return f"missing: {missing}" if whole and missing else None


CALLS = sorted({(page, *call) for page in TEXTS for call in commands(page)})


@pytest.mark.parametrize(("page", "call", "whole"), CALLS, ids=name)
def test_commands_exist(page: Path, call: str, whole: bool) -> None:
    wrong = refuse(call, whole=whole)
    assert wrong is None, f"{page}: {call}: {wrong}"


def test_commands_are_really_looked_at() -> None:
    assert len(CALLS) > 10
    assert refuse("craft-adapters check toy --only weights", whole=True) is None
    assert refuse("craft-adapters fedml main.py --cf x.yaml  # yours", whole=True) is None
    for call in ("nothing", "list --jsn", "check", "check a b", "run a.yaml --out"):
        assert refuse(f"craft-adapters {call}", whole=True), call


# --- The site --------------------------------------------------------------------------------


def pages_of(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for part in entry.values() if isinstance(entry, dict) else entry:
        if not isinstance(entry, str):
            yield from pages_of(part)


def test_every_page_is_in_the_navigation_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = list(pages_of(config["nav"]))
    assert sorted(listed) == [page.relative_to(DOCS).as_posix() for page in PAGES]


def test_every_public_module_has_a_page_of_the_api() -> None:
    shown = {
        module
        for page in (DOCS / "api").glob("*.md")
        for module in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    inside = {module.name for module in pkgutil.iter_modules(craft_adapters.__path__)}
    outside = {path.parent.name for path in (ROOT / "adapters").glob("*/__init__.py")}
    public = {module for module in inside | outside | {"models"} if not module.startswith("_")}
    wanted = {f"craft_adapters.{module}" for module in public - {"cli"}}  # commands, not an API
    assert shown == wanted | {"craft_adapters"}


def test_every_host_is_in_the_table_with_the_versions_it_was_run_on() -> None:
    rows = (DOCS / "hosts" / "index.md").read_text(encoding="utf-8").splitlines()
    adapters = get_plugin_manager().adapters
    ours = [name for name in adapters if adapters.origin(name).distribution == "craft-adapters"]
    assert len(ours) >= 5
    for host in ours:
        row = next((row for row in rows if f"]({host}.md) |" in row), "")
        assert all(version in row for version in adapters[host].tested), (host, row)


def test_every_hook_is_documented_with_its_signature() -> None:
    text = " ".join((DOCS / "extend.md").read_text(encoding="utf-8").split())
    hooks = [
        hook
        for hook in vars(_specs).values()
        if inspect.isfunction(hook) and hasattr(hook, "craft_adapters_spec")
    ]
    assert len(hooks) >= 3
    for hook in hooks:
        signature = str(inspect.signature(hook)).replace("'", "")
        assert f"def {hook.__name__}{signature}" in text
