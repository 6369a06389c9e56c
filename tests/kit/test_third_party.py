"""A stranger's adapter, installed like anybody's: found by its entry point, and passing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .packages import command, install, run

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_adapter"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like site-packages with host and adapter installed in it."""
    folder = tmp_path_factory.mktemp("third") / "site"
    install(EXAMPLE / "tinyfl", folder)
    install(EXAMPLE / "craft-adapters-tinyfl", folder)
    return folder


def test_it_is_listed(site: Path) -> None:
    done = command("list", "--json", path=site)
    assert done.returncode == 0, done.stderr
    (found,) = [a for a in json.loads(done.stdout)["adapters"] if a["name"] == "tinyfl"]
    assert (found["plugin"], found["host"], found["found"]) == ("tinyfl", "tinyfl", "2.1")


def test_it_passes_the_kit(site: Path) -> None:
    done = command("check", "tinyfl", "--json", path=site)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] == "pass"
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["bfloat16"]["status"] == "expected failure"
    assert "numpy has no bfloat16" in checks["bfloat16"]["reason"]
    skipped = {name for name, check in checks.items() if check["status"] == "skipped"}
    assert skipped == {"loss", "local-steps"}


def test_its_own_tests_pass(site: Path) -> None:
    tests = EXAMPLE / "craft-adapters-tinyfl" / "tests"
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tests, "-k", "verdict")
    done = run(*words, tests, path=site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_without_its_host_it_is_listed_and_cannot_be_checked(tmp_path: Path) -> None:
    install(EXAMPLE / "craft-adapters-tinyfl", tmp_path / "site")
    done = command("check", "tinyfl", path=tmp_path / "site")
    assert done.returncode == 2
    assert "the host 'tinyfl' of adapter 'tinyfl' is not installed" in done.stderr
