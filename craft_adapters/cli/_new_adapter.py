"""``craft-adapters new-adapter``: a package to start an adapter from."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from string import Template

import click

__all__ = ["new_adapter"]

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@click.command("new-adapter")
@click.argument("name")
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("."),
    help="Where the package's folder is made; default: here.",
)
def new_adapter(name: str, into: Path) -> None:
    """Write a package for an adapter called NAME, which passes the checks on a toy host.

    Its README says what to change, in which order, until it is your host's.
    """
    if not _NAME.fullmatch(name):
        raise click.UsageError(f"{name!r} is no name: use small letters, digits and single '_'")
    from ..plugins import get_plugin_manager

    manager = get_plugin_manager()
    if name in manager.adapters:
        raise click.UsageError(
            f"the adapter name {name!r} is taken by {manager.adapters.origin(name)}"
        )
    folder = into / f"craft-adapters-{name.replace('_', '-')}"
    if folder.exists():
        raise click.UsageError(f"{folder} is there already; move it away or take another name")
    for path, text in _package(name).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    click.echo(f"{folder} is written. In your environment:")
    click.echo(f"  pip install -e {folder}")
    click.echo(f"  craft-adapters check {name}")


def _package(name: str) -> dict[str, str]:
    """Path in the package -> text. The code is the kit's own toy adapter under another name."""
    package = f"craft_adapters_{name}"
    title = "".join(word.capitalize() for word in name.split("_"))
    renamed = {
        "craft_adapters.testing.toy.host": f"{package}.toy_host",
        "craft_adapters.testing.toy": package,
        "ToyHarness": f"{title}Harness",
        "ToyServer": f"{title}Server",
        'name="toy"': f'name="{name}"',
    }
    toy = files("craft_adapters") / "testing" / "toy"
    written = {}
    for module in ("__init__", "plugin", "adapter", "harness", "host"):
        text = (toy / f"{module}.py").read_text(encoding="utf-8")
        for old, new in renamed.items():
            text = text.replace(old, new)
        target = "toy_host" if module == "host" else module
        written[f"{package}/{target}.py"] = text
    names = {"name": name, "package": package, "title": title, "dist": name.replace("_", "-")}
    for path, template in (
        ("pyproject.toml", _PYPROJECT),
        ("README.md", _README),
        ("tests/test_kit.py", _TEST),
    ):
        written[path] = Template(template).substitute(names)
    return written


_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "craft-adapters-$dist"
version = "0.1.0"
description = "craft-adapters in $name"
requires-python = ">=3.10"
dependencies = ["craft-adapters"]

[project.optional-dependencies]
test = ["pytest>=8"]

[project.entry-points.craft_adapters]
$name = "$package.plugin"

[tool.setuptools]
packages = ["$package"]

[tool.pytest.ini_options]
testpaths = ["tests"]
"""

_TEST = """\
from craft_adapters.testing import AdapterTests


class Test$title(AdapterTests):
    adapter = "$name"
"""

_README = """\
# craft-adapters-$dist

The server step of $name by a rule of craft-adapters.

    pip install -e ".[test]"
    craft-adapters check $name     # the exit code is the verdict
    pytest

Now it is an adapter for a toy host, and passes. To make it yours:

1. `$package/harness.py`: make a server of your host in `start`, and in `round` put the replies into
   your host's own messages, let it do its server step, and return its new global model. Set
   `host_modules` if your host is not an installed distribution. Remove `toy_host.py`.
2. `$package/adapter.py`: turn what your host has into `ClientUpdate`s, call `aggregate`, and put
   `result.state` where your host expects the new global model. Import the host inside functions.
   `craft-adapters check $name --only weights` runs one check while you write.
3. `$package/plugin.py`: the host's distribution, the versions you tested, and in `gives` what your
   host can give. Checks of what it does not give are skipped, and the report says so.
4. What your host cannot do goes into `expected_failures` of the harness, with the reason.
"""
