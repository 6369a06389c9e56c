"""The command line, in fresh processes where it matters what is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from craft_adapters import plugins
from craft_adapters.cli import main
from craft_adapters.errors import UnsupportedSetup
from craft_adapters.plugins import AdapterDescriptor, PluginManager, get_plugin_manager

PLUGIN = """
from typing import Literal
from craft_adapters.plugins import AdapterDescriptor, hookimpl

print("a plug-in that talks")

class Strange:
    def __repr__(self):
        return "[bold]strange[/bold]"

class Stranger:
    def __repr__(self):
        raise RuntimeError("no repr")

def a_rule_with_quite_a_long_name(
    *, alpha: float, bound: float = float("inf"), choice: Literal[1, "two"] = 1,
    what=Strange(), words: dict[str, list[int]] | None = None, more=Stranger(), key=len
): ...

@hookimpl
def craft_register_aggregators(register):
    register("a_rule_with_quite_a_long_name_that_would_not_fit_into_a_narrow_terminal",
             a_rule_with_quite_a_long_name)

@hookimpl
def craft_register_adapters(register):
    register(AdapterDescriptor("here", "click", ("0.0",), "here", "s" * 200, load=dict))
    register(AdapterDescriptor("there", "no-such-host", (), None, "", load=dict))
    register(AdapterDescriptor("nowhere", "", (), None, "", load=dict))
"""

STAND_IN = """
import runpy, sys, types
from craft_adapters.plugins import AdapterDescriptor, hookimpl

def run_script(script, args):
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")

@hookimpl
def craft_register_adapters(register):
    module = types.SimpleNamespace(install=lambda: None, run_script=run_script)
    register(AdapterDescriptor("fedml", None, (), "fedml", "a stand-in", load=lambda: module))
"""


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CRAFT_ADAPTERS_STRICT", "CRAFT_ADAPTERS_PLUGINS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    get_plugin_manager.cache_clear()
    yield
    get_plugin_manager.cache_clear()


@pytest.fixture
def strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Strangers' plug-ins on the path: one works, one is broken, one stands for FedML's adapter."""
    plugins = {"cli_works": PLUGIN, "cli_broken": "1 / 0", "cli_stand_in": STAND_IN}
    for name, body in plugins.items():
        (tmp_path / f"{name}.py").write_text(body)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[craft_adapters]\n{name} = {name}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cli_works", raising=False)
    return tmp_path


def call(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def process(
    *words: str, path: Path | None = None, before: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Call it in a fresh process; the last line of stderr says which packages it imported."""
    code = (
        f"import sys, atexit\n{before}\n"
        "seen = ('torch', 'fedml', 'flwr', 'nvflare', 'rich')\n"
        "atexit.register(lambda: print([n for n in seen if n in sys.modules], file=sys.stderr))\n"
        "from craft_adapters.cli import main\nmain(prog_name='craft-adapters')"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CRAFT_")}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**environment, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


# --- Help and version -------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("--help",), ("list", "--help"), ("fedml", "--help")])
def test_help_imports_nothing_heavy(words: tuple[str, ...]) -> None:
    done = process(*words)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: craft-adapters")
    assert done.stderr == "[]\n"


def test_version() -> None:
    assert call("--version").output.strip().endswith(version("craft-adapters"))


# --- list -------------------------------------------------------------------------------------


def test_list_imports_no_host(strangers: Path) -> None:
    """Even where it could be imported: a stand-in that is first on the path would be seen."""
    for host in ("fedml", "flwr", "nvflare"):
        (strangers / f"{host}.py").write_text("")
    done = process("list", "--json", path=strangers)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "['torch']"
    listed = json.loads(done.stdout)
    assert {"craft", "fedavg"} <= {rule["name"] for rule in listed["aggregators"]}


def test_list_as_json(strangers: Path) -> None:
    done = call("list", "--json")
    assert done.exit_code == 0, done.output
    assert "a plug-in that talks" in done.stderr
    listed = json.loads(done.stdout, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert listed["version"] == version("craft-adapters")
    rules = {rule["name"]: rule for rule in listed["aggregators"]}
    craft = {option["name"]: option for option in rules["craft"]["options"]}
    assert craft["beta"] == {
        "name": "beta",
        "type": "float",
        "required": False,
        "default": 0.9,
        "choices": [],
        "python_only": False,
    }
    assert [name for name, option in craft.items() if option["python_only"]] == [
        "layout",
        "process_group",
    ]
    assert craft["reference"]["choices"] == ["previous", "zero", "ema"]
    (long,) = (name for name in rules if name.startswith("a_rule"))
    options = {option["name"]: option for option in rules[long]["options"]}
    assert options["alpha"]["required"] is True
    assert options["bound"]["default"] == "inf"
    assert options["choice"]["choices"] == [1, "two"]
    assert options["what"]["default"] == "[bold]strange[/bold]"
    assert options["more"]["default"].startswith("<Stranger instance at")
    assert options["key"]["default"] == "len"
    adapters = {adapter["name"]: adapter for adapter in listed["adapters"]}
    assert adapters["here"]["found"] == version("click")
    assert adapters["here"]["tested"] == ["0.0"]
    assert adapters["there"]["found"] is adapters["nowhere"]["found"] is None
    broken = {plugin["name"]: plugin for plugin in listed["broken"]}
    assert broken["cli_broken"]["distribution"] == "cli_broken"
    assert broken["cli_broken"]["reason"].startswith("import failed: ZeroDivisionError")


@pytest.mark.usefixtures("strangers")
def test_list_as_text() -> None:
    done = call("list")
    assert done.exit_code == 0, done.output
    text = done.stdout
    assert "\x1b" not in text
    assert "  a_rule_with_quite_a_long_name_that_would_not_fit_into_a_narrow_terminal  (" in text
    assert "alpha   float" in text and "(required)" in text
    assert "dict[str, list[int]] | None" in text and "[bold]strange[/bold]" in text
    assert "craft_adapters.Layout | None (in Python only)" in text
    assert "'layer' | 'model' | 'tensor' | function" in text and "str | torch.device" in text
    assert "s" * 200 in text
    assert f"{version('click')} (not tested)" in text and "not installed" in text
    assert "cli_broken of cli_broken: import failed: ZeroDivisionError: division by zero" in text


@pytest.mark.usefixtures("strangers")
def test_bundled_is_what_needs_no_host() -> None:
    text = call("list").stdout
    rows = {line.split()[0]: line.split()[1:3] for line in text.splitlines() if line.split()}
    assert rows["ditto"] == ["-", "bundled"]
    assert rows["flute"] == rows["nowhere"] == ["-", "-"], "a host without a distribution"
    assert text.splitlines()[-1] == "Meanings: docs/rules.md"


@pytest.mark.usefixtures("strangers")
def test_a_narrow_terminal_breaks_no_option_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    text = call("list", "--plugins", "craft").stdout
    assert "norm_threshold " in text and "client_length " in text
    assert max(map(len, text.splitlines())) < 200


@pytest.mark.usefixtures("strangers")
def test_list_only_the_named() -> None:
    listed = json.loads(call("list", "--json", "--plugins", "fedavg").stdout)
    assert [rule["name"] for rule in listed["aggregators"]] == ["fedavg"]
    assert listed["adapters"] == listed["broken"] == []
    assert "none" in call("list", "--plugins", "fedavg").stdout
    done = call("list", "--plugins", "fedvag")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: no plug-in is named 'fedvag'")
    assert "did you mean 'fedavg'" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.usefixtures("strangers")
def test_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAFT_ADAPTERS_STRICT", "1")
    done = call("list", "--plugins", "cli_broken")
    assert done.exit_code == 1
    assert done.stderr == (
        "Error: plug-in 'cli_broken' of cli_broken: "
        "import failed: ZeroDivisionError: division by zero\n"
    )


# --- fedml ------------------------------------------------------------------------------------


class Adapter(types.SimpleNamespace):
    """Stands for ``craft_adapters.fedml``."""

    def __init__(self, error: BaseException | None = None, missing: str = "") -> None:
        super().__init__(calls=[], error=error, missing=missing)

    def load(self) -> Adapter:
        return self

    def install(self) -> None:
        if self.missing:
            raise ImportError(self.missing)

    def run_script(self, script: str, args: list[str]) -> None:
        self.calls.append((script, args))
        if self.error is not None:
            raise self.error


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "main.py"
    path.write_text("")
    return str(path)


def use(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> Adapter:
    found = AdapterDescriptor("fedml", "fedml", (), "fedml", "", adapter.load)
    monkeypatch.setattr(plugins, "get_adapter", {"fedml": found}.__getitem__)
    return adapter


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--cf", "config.yaml", "--help"],
        ["-x", "--", "--json", "--version", "-h"],
        ["--rank=0", "train", "--unknown", "-vvv", ""],
    ],
)
def test_arguments_go_to_the_script(
    words: list[str], script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = use(Adapter(), monkeypatch)
    done = call("fedml", script, *words)
    assert (done.exit_code, done.output) == (0, "")
    assert adapter.calls == [(script, words)]


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    done = call("fedml", str(tmp_path / "none.py"))
    assert done.exit_code == 2
    assert "does not exist" in done.stderr


@pytest.mark.parametrize("message", ["FedML is not\ninstalled", "get 'craft-adapters[fedml]'"])
def test_a_missing_host(message: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = use(Adapter(missing=message), monkeypatch)
    done = call("fedml", script)
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1
    assert done.stderr.count("craft-adapters[fedml]") == 1
    assert adapter.calls == []


def test_our_errors_are_one_line(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Adapter(UnsupportedSetup("backend 'X':\nno seam")), monkeypatch)
    done = call("fedml", script)
    assert (done.exit_code, done.stderr) == (1, "Error: backend 'X': no seam\n")


def test_a_host_that_is_really_missing(script: str) -> None:
    done = process("fedml", script, "--cf", "x", before="sys.modules['fedml'] = None")
    assert (done.returncode, done.stdout) == (1, "")
    *_, error, _imported = done.stderr.splitlines()
    assert error.startswith("Error: ") and error.count("craft-adapters[fedml]") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("body", "code", "last"),
    [
        ("import nowhere_to_be_found", 1, "ModuleNotFoundError: No module named 'nowhere_to_be_"),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        # What click would end without a traceback, a broken pipe without a word.
        ("raise BrokenPipeError(errno.EPIPE, 'mine')", 1, "BrokenPipeError: [Errno"),
        ("input()", 1, "EOFError: EOF when reading a line"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("raise click.ClickException('mine')", 1, "click.exceptions.ClickException: mine"),
        ("raise click.Abort", 1, "click.exceptions.Abort"),
    ],
)
def test_the_scripts_own_errors_keep_their_traceback(
    body: str, code: int, last: str, strangers: Path, script: str
) -> None:
    Path(script).write_text(f"import errno, click\n{body}\n")
    only = {"CRAFT_ADAPTERS_PLUGINS": "cli_stand_in"}
    done = process("fedml", script, path=strangers, **only)
    assert done.returncode == code
    lines = done.stderr.splitlines()
    assert "Traceback (most recent call last):" in lines
    assert f'  File "{script}", line 2, in <module>' in lines
    assert lines[-2].startswith(last)


@pytest.mark.parametrize(
    ("body", "code", "error"),
    [
        ("print(sys.argv[1:])", 0, ""),
        ("print(sys.argv[1:]); sys.exit(3)", 3, ""),
        ("print(sys.argv[1:]); sys.exit('bye')", 1, "bye\n"),
    ],
)
def test_the_scripts_own_end(
    body: str, code: int, error: str, strangers: Path, script: str
) -> None:
    Path(script).write_text(f"import sys\n{body}\n")
    only = {"CRAFT_ADAPTERS_PLUGINS": "cli_stand_in"}
    done = process("fedml", script, "--help", "--cf", "x.yaml", path=strangers, **only)
    assert (done.returncode, done.stdout) == (code, "['--help', '--cf', 'x.yaml']\n")
    assert done.stderr == f"{error}[]\n"


def test_without_the_adapter(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "get_adapter", PluginManager([]).get_adapter)
    done = call("fedml", script)
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: no adapter is named 'fedml'; none is registered")
