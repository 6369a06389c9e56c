"""The package that ``craft-adapters new-adapter`` writes passes the kit as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from craft_adapters.cli import main

from .packages import command, install, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like site-packages with the written package installed in it."""
    folder = tmp_path_factory.mktemp("new")
    written = CliRunner().invoke(main, ["new-adapter", "my_host", "--into", str(folder)])
    assert written.exit_code == 0, written.output
    install(folder / "craft-adapters-my-host", folder / "site")
    return folder / "site"


def test_it_passes_the_kit(site: Path) -> None:
    done = command("check", "my_host", "--json", path=site)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["adapter"], report["verdict"]) == ("my_host", "pass")
    assert report["counts"]["skipped"] == 1


def test_its_own_tests_pass(site: Path) -> None:
    tests = site.parent / "craft-adapters-my-host" / "tests"
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tests, "-k", "verdict")
    done = run(*words, tests, path=site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_it_has_its_own_name_everywhere(site: Path) -> None:
    package = site / "craft_adapters_my_host"
    code = {path.name: path.read_text() for path in package.glob("*.py")}
    assert set(code) == {"__init__.py", "plugin.py", "adapter.py", "harness.py", "toy_host.py"}
    for text in code.values():
        assert "testing.toy" not in text and "Toy" not in text
    assert "class MyHostHarness" in code["harness.py"]


def test_names_that_are_none_or_taken(tmp_path: Path) -> None:
    for name, words in (
        ("My-Host", "is no name"),
        ("../x", "is no name"),
        ("fedml", "taken by plug-in 'fedml' of craft-adapters"),
    ):
        done = CliRunner().invoke(main, ["new-adapter", name, "--into", str(tmp_path)])
        assert done.exit_code == 2 and words in done.output
    (tmp_path / "craft-adapters-x").mkdir()
    done = CliRunner().invoke(main, ["new-adapter", "x", "--into", str(tmp_path)])
    assert done.exit_code == 2 and "is there already" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["craft-adapters-x"]
