"""The conformance kit over the strategy, and over the server loop of a host."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from craft_adapters.cli import main as cli
from craft_adapters.flute import _strategy
from craft_adapters.flute._harness import HOME, CheckoutHarness, StandInHarness
from craft_adapters.testing import AdapterTests, check_adapter

from .conftest import HOST


class TestStandIn(AdapterTests):
    adapter = "flute"
    harness = StandInHarness()


@pytest.mark.usefixtures("host")
def test_a_server_loop() -> None:
    """The small host has the modules and seams that the harness for a checkout drives."""
    check_adapter("flute", CheckoutHarness(HOST)).raise_unless_passed()


@pytest.mark.usefixtures("host")
def test_which_host_was_driven_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOME, raising=False)
    done = CliRunner().invoke(cli, ["check", "flute", "--only", "weights"])
    assert "flute on a stand-in for FLUTE's server loop" in done.stdout
    monkeypatch.setenv(HOME, str(HOST))
    done = CliRunner().invoke(cli, ["check", "flute", "--only", "weights"])
    assert f"flute on FLUTE in {HOST}: " in done.stdout


def test_a_checkout_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME, str(HOST.parent))
    monkeypatch.setattr("sys.path", [str(HOST.parent)])
    done = CliRunner().invoke(cli, ["check", "flute"])
    assert done.exit_code == 2 and "FLUTE is not on the path" in done.stderr


@pytest.mark.parametrize(
    ("check", "name", "defect"),
    [
        ("weights", "num_examples", lambda update: 1.0),
        ("client-ids", "client_id", lambda update: int(update.num_examples) % 3),
    ],
)
def test_defects_are_seen(
    check: str, name: str, defect: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness hides nothing: what goes wrong in the adapter is found."""
    import dataclasses

    original = _strategy._update

    def broken(*args: object) -> object:
        update = original(*args)  # type: ignore[arg-type]
        return dataclasses.replace(update, **{name: defect(update)})  # type: ignore[operator]

    monkeypatch.setattr(_strategy, "_update", broken)
    report = check_adapter("flute", StandInHarness(), only=[check])
    assert report[check].status == "failed"
