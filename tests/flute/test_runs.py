"""Whole runs of the small host, unchanged, with ``strategy: CRAFT``."""

from __future__ import annotations

import importlib
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import craft_adapters.flute
from craft_adapters.cli import main as cli
from craft_adapters.errors import NoUsableUpdates, OptionError, UnsupportedSetup
from craft_adapters.flute._strategy import craft_strategy

from .conftest import SCRIPT, Folder, settings

pytestmark = pytest.mark.usefixtures("host")

State = dict[str, torch.Tensor]


def run(folder: Folder, config: dict[str, Any]) -> Folder:
    """In this process."""
    folder.write(config)
    craft_adapters.flute.run_script(SCRIPT, folder.arguments)
    return folder


def plain(folder: Folder, config: dict[str, Any]) -> Folder:
    """In this process, without the adapter."""
    folder.write(config)
    importlib.import_module("e2e_trainer").main(folder.arguments)
    return folder


def within(path: Path) -> Folder:
    path.mkdir()
    return Folder(path)


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def parameters(state: State) -> State:
    return {name: each for name, each in state.items() if not name.startswith("1.running")}


@pytest.mark.slow
def test_one_process_and_three_give_the_same_bits(tmp_path: Path) -> None:
    """So whose update is whose is known in both, and clients do not train on the global model."""
    config = settings(craft={"server_lr": 0.1})
    alone = run(within(tmp_path / "one"), config)
    several = within(tmp_path / "three")
    several.processes(config, "-m", "craft_adapters.flute", str(SCRIPT), count=3)
    for number in range(3):
        assert same(alone.model(f"epoch{number}"), several.model(f"epoch{number}"))
    assert [each["clients"] for each in alone.reports()] == [
        each["clients"] for each in several.reports()
    ]
    assert len({tuple(each["clients"]) for each in alone.reports()}) > 1


@pytest.mark.slow
def test_the_rule_fedavg_is_the_hosts_fedavg(tmp_path: Path) -> None:
    """In two processes: in one, this host, like FLUTE, averages on top of its last client."""
    ours = run(within(tmp_path / "ours"), settings(craft={"aggregator": "fedavg"}))
    theirs = within(tmp_path / "theirs")
    theirs.processes({**settings(), "strategy": "FedAvg"}, str(SCRIPT))
    for number in range(3):
        mine, other = ours.model(f"epoch{number}"), theirs.model(f"epoch{number}")
        for name in parameters(mine):
            torch.testing.assert_close(mine[name], other[name])
    assert not same(ours.model("epoch0"), ours.model("epoch1"))


def test_other_strategies_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {**settings(craft={"server_lr": 0.1}), "strategy": "FedAvg"}
    before = plain(within(tmp_path / "before"), config)
    after = run(within(tmp_path / "after"), config)
    assert same(before.model("latest"), after.model("latest"))
    assert not (after.models / "craft_report.jsonl").exists()
    assert "no rule of craft-adapters is used; set strategy: CRAFT" in caplog.text
    with pytest.raises(ValueError, match="cannot use strategy nothing"):
        run(within(tmp_path / "unknown"), {**settings(), "strategy": "nothing"})


@pytest.mark.parametrize("name", ["CRAFT", "craft", "Craft"])
def test_the_name_in_any_case(name: str, folder: Folder) -> None:
    run(folder, {**settings(max_iteration=1), "strategy": name})
    (report,) = folder.reports()
    assert report["rule"] == "craft" and len(report["clients"]) == 4


@pytest.mark.parametrize("before", [(), ("core.strategies",), ("core.client",), ("e2e_trainer",)])
def test_the_import_may_stand_anywhere(before: tuple[str, ...]) -> None:
    for name in before:
        importlib.import_module(name)
    importlib.import_module("craft_adapters.flute.auto")
    craft_adapters.flute.install()  # once more does nothing
    for name in ("core.strategies", "core.server", "core.client"):
        select = importlib.import_module(name).select_strategy
        assert select("CRAFT") is craft_strategy
        assert select("FedAvg").__name__ == "FedAvg"
        assert not hasattr(select.__wrapped__, "__wrapped__")


def test_from_the_command_line(folder: Folder) -> None:
    folder.write(settings(max_iteration=1))
    done = CliRunner().invoke(cli, ["flute", str(SCRIPT), *folder.arguments])
    assert done.exit_code == 0, done.output
    assert len(folder.reports()) == 1
    folder.write(settings(craft={"sever_lr": 1}))
    done = CliRunner().invoke(cli, ["flute", str(SCRIPT), *folder.arguments])
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: server_config.craft.sever_lr") and "server_lr" in (
        done.stderr
    )


def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    everybody = {"num_clients_per_iteration": 7, "craft": {"server_lr": 0.1}}
    straight = run(within(tmp_path / "straight"), settings(max_iteration=4, **everybody))
    stopped = run(within(tmp_path / "stopped"), settings(max_iteration=2, **everybody))
    again = settings(max_iteration=4, resume_from_checkpoint=True, **everybody)
    assert same(straight.model("latest"), run(stopped, again).model("latest"))
    assert [each["round"] for each in stopped.reports()] == [0, 1, 2, 3]


def test_resuming_without_the_rules_state_is_said(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    run(folder, settings(max_iteration=1))
    (folder.models / "craft_state.safetensors").unlink()
    run(folder, settings(max_iteration=2, resume_from_checkpoint=True))
    assert "the rule starts afresh" in caplog.text


def test_a_new_run_does_not_take_up_an_old_state(folder: Folder) -> None:
    run(folder, settings(max_iteration=1))
    first = folder.model("latest")
    run(folder, settings(max_iteration=1))
    assert same(first, folder.model("latest"))


def test_what_does_not_move(folder: Folder) -> None:
    """A frozen parameter, and the statistics, which stay with the worker."""
    fresh = importlib.import_module("utils").make_model().state_dict()
    run(folder, settings())
    trained = folder.model("latest")
    moved = {name for name in fresh if not torch.equal(fresh[name], trained[name])}
    assert moved == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight"}


def test_a_round_of_idle_clients(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    config = settings(max_iteration=1)
    config["client_config"]["idle"] = list(range(7))
    run(folder, config)
    fresh = importlib.import_module("utils").make_model().state_dict()
    assert same(fresh, folder.model("latest"))
    assert "the model stays as it is" in caplog.text
    assert "skipped" in folder.reports()[0]
    config["server_config"]["craft"] = {"on_empty_round": "raise"}
    with pytest.raises(NoUsableUpdates):
        run(folder, config)


def test_an_idle_client_is_left_out(folder: Folder) -> None:
    config = settings(max_iteration=1, num_clients_per_iteration=7)
    config["client_config"]["idle"] = [2, 5]
    run(folder, config)
    assert folder.reports()[0]["clients"] == [0, 1, 3, 4, 6]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("server_config", "send_dicts", True),
        ("server_config", "fast_aggregation", True),
        ("server_config", "wantRL", True),
        ("server_config", "stale_prob", 0.1),
        ("client_config", "quant_thresh", 0.0),
        ("client_config", "type", "gradient_computation"),
        ("dp_config", "enable_local_dp", True),
        ("dp_config", "enable_global_dp", True),
    ],
)
def test_what_would_not_be_applied_is_refused(
    section: str, key: str, value: Any, folder: Folder
) -> None:
    config = settings()
    config[section] = {**config.get(section, {}), key: value}
    with pytest.raises(UnsupportedSetup, match=rf"{section}\.{key} is {value!r}"):
        run(folder, config)
    assert not list(folder.models.iterdir())


def test_options_that_are_switched_off_are_not_refused(folder: Folder) -> None:
    config = settings(send_dicts=False, stale_prob=0.0, wantRL=False, max_iteration=1)
    config["dp_config"] = {"enable_local_dp": False}
    config["client_config"]["quant_thresh"] = None
    assert len(run(folder, config).reports()) == 1


@pytest.mark.parametrize(
    ("craft", "message"),
    [
        ("craft", "server_config.craft must be a section, got 'craft'"),
        ({"aggregator": "crft"}, "did you mean 'craft'"),
        ({"aggregator": 3}, "server_config.craft.aggregator must be a rule's name, got 3"),
        ({"server_rl": 1}, "server_config.craft.server_rl is neither .* did you mean 'server_lr'"),
        ({"server_lr": "fast"}, "server_config.craft.server_lr must be"),
        ({"on_empty_round": "stop"}, "server_config.craft.on_empty_round must be"),
    ],
)
def test_wrong_options(craft: Any, message: str, folder: Folder) -> None:
    with pytest.raises(OptionError, match=message):
        run(folder, settings(craft=craft))
    assert not list(folder.models.iterdir())


def test_a_rule_that_needs_losses_is_refused(folder: Folder) -> None:
    with pytest.raises(UnsupportedSetup, match="rule 'afl' needs loss from every client"):
        run(folder, settings(craft={"aggregator": "afl"}))


def test_a_rule_that_needs_steps(folder: Folder) -> None:
    run(folder, settings(craft={"aggregator": "fednova"}))
    assert folder.reports()[2]["rule"] == "fednova"


def test_a_script_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match=r"no such script: nowhere\.py"):
        craft_adapters.flute.run_script("nowhere.py")


def test_no_host_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(SCRIPT.parent)])
    with pytest.raises(ImportError, match="it is no package but a repository"):
        craft_adapters.flute.install()


def test_a_package_that_the_host_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "utils", None)  # in the place of azureml
    with pytest.raises(ImportError, match=r"FLUTE does not import: .*utils.*azureml"):
        craft_adapters.flute.install()


def test_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    client = importlib.import_module("core.client")
    select = client.select_strategy
    monkeypatch.setitem(sys.modules, "core.server", types.ModuleType("core.server"))
    with pytest.raises(UnsupportedSetup, match=r"core\.server has no select_strategy"):
        craft_adapters.flute.install()
    assert client.select_strategy is select


def test_progress_is_logged(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run(folder, settings(max_iteration=1))
    assert "craft: round 0: 4 clients, conflicts " in caplog.text
