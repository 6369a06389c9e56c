"""The configuration: what is wrong, where, and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from craft_adapters.errors import OptionError
from craft_adapters.simulation import load_dataset, read_config
from craft_adapters.simulation._config import settled

CFG_01 = """
rounds: 1e2
seed: 010
clients_per_round: 1_0
training:
  lr: 1e-3
  weight_decay: 1.0e-4
  momentum: .5
  decay: 5e-1
"""


def write(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def test_numbers_of_yaml_1_1(tmp_path: Path) -> None:  # CFG-01
    config = read_config(write(tmp_path, CFG_01))
    assert (config.general.rounds, config.general.seed) == (100, 10)
    assert config.general.clients_per_round == 10
    assert config.training.lr == 0.001
    assert config.training.weight_decay == 0.0001
    assert config.training.momentum == 0.5
    same = ["rounds=1e2", "seed=010", "training.lr=1e-3", "clients_per_round=1_0"]
    same += ["training.weight_decay=1.0e-4", "training.momentum=.5", "training.decay=5e-1"]
    assert read_config(None, same).resolved() == config.resolved()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: no", "data: none is named 'no'; known: cifar10"),
        ("rounds: 12:30", "rounds must be a whole number, got '12:30'"),
        ("rounds: 1.5", "rounds must be a whole number"),
        ("rounds: 0", "rounds must be at least 1, got 0"),
        ("seed: -1", "seed must be at least 0"),
        ("drop_rate: 1", "drop_rate must be at least 0 and below 1"),
        ("clients_per_round: 1.5", "a share of them, above 0 and at most 1.0; got 1.5"),
        ("clients_per_round: 0", "clients_per_round must be a number of clients"),
        ("round: 3", "no key 'round'; did you mean 'rounds'?"),
        ("training: {lrr: 1}", "has no option 'training.lrr'; did you mean 'training.lr'?"),
        ("training: {lr: fast}", "training.lr must be a finite number, got 'fast'"),
        ("training: {lr: -1}", "training: lr must be a finite number > 0, got -1.0"),
        ("training: fast", "training must be a section of options, got 'fast'"),
        ("training: {epochs: yes}", "training.epochs must be a whole number, got 'yes'"),
        ("aggregator: {name: crft}", "did you mean 'craft'"),
        ("aggregator: {name: craft, scale: big}", "aggregator.scale must be 'unit'"),
        ("aggregator: {name: craft, server_lr: 0}", "aggregator: .*server_lr"),
        ("model: {name: mlp, hidden: [a]}", "model: hidden must be whole numbers"),
        ("model: resnet18", "model: none is named 'resnet18'; did you mean 'resnet"),
        ("model: {name: cnn, norm: batch}", "has no option 'model.norm'; it has none"),
        ("partition: {name: dirichlet, alfa: 1}", "did you mean 'partition.alpha'?"),
        ("partition: file", "partition.path must be given"),
        ("method: {name: ditto, lam: -1}", "method: lam must be a finite number >= 0"),
        ("method: {name: ditto, aggregator: craft}", "the section aggregator says it"),
        ("method: fedml", "adapter 'fedml' brings no method for this federation"),
        ("method: dito", "method: none is named 'dito'; did you mean 'ditto'?"),
        (
            "method: fedprox",
            r"none is named 'fedprox'; known: ditto, shared \(fedprox is a rule: aggregator=fedp",
        ),
        ("rules: {A: {}}\nseeds: [0, 1]", "no key 'rules'; this is a sweep: craft-adapters sweep "),
        ("seeds: [0, 1]\nrules: {A: {}}", "no key 'seeds'; this is a sweep: craft-adapters sweep "),
        ("seeds: [0, 1]", "no key 'seeds'; did you mean 'seed'?"),
        ("method: ditto\nlam: 0.1", "no key 'lam'; did you mean 'method.lam'?"),
        ("method: crft\nserver_lr: 1\naggregator: craft", "did you mean 'aggregator.server_lr'?"),
        ("rounds: 1\nrounds: 2", "key 'rounds' comes twice"),
        ("- rounds", "expected keys and values, got list"),
        ("rounds: [", "no YAML"),
        ("rounds: !!python/object/apply:os.getcwd []", "rounds must be a whole number"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(OptionError, match=message) as caught:
        read_config(path)
    assert str(caught.value).startswith(path), "it says where"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rounds", "--set rounds: expected key=value"),
        ("training.=1", "expected key=value or section.key=value"),
        ("trainin.lr=1", "no section 'trainin'; did you mean 'training'?"),
        ("training.lr=0", "training: lr must be a finite number > 0"),
        ("rouns=1", "no key 'rouns'; did you mean 'rounds'?"),
    ],
)
def test_what_is_wrong_on_the_command_line(override: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        read_config(None, [override])


def test_overrides_win_and_know_sections(tmp_path: Path) -> None:
    path = write(tmp_path, "aggregator: {name: craft, server_lr: 0.3}\nmodel: cnn")
    config = read_config(path, ["aggregator.server_lr=0.1", "model=mlp", "model.hidden=8,4"])
    resolved = config.resolved()
    assert resolved["aggregator"]["server_lr"] == 0.1
    assert resolved["model"] == {"name": "mlp", "hidden": "8,4"}
    other = read_config(path, ["aggregator.name=fedavg"])
    assert "server_lr" not in other.resolved()["aggregator"], "it was the other rule's"


def test_an_override_that_names_what_is_there_keeps_its_options(tmp_path: Path) -> None:
    path = write(tmp_path, "aggregator: {name: craft, server_lr: 0.3}\npartition: {clients: 7}")
    for name in ("aggregator=craft", "aggregator.name=craft"):
        assert read_config(path, [name]).resolved()["aggregator"]["server_lr"] == 0.3
    for name in ("partition=dirichlet", "partition.name=dirichlet"):
        assert read_config(path, [name]).resolved()["partition"]["clients"] == 7, "the default"
    other = read_config(path, ["partition=iid"]).resolved()
    assert other["partition"]["clients"] == 100, "of another partition"


def test_a_config_that_is_only_looked_at_leaves_no_folder(tmp_path: Path) -> None:
    options = {"name": "fedfv", "history_folder": str(tmp_path / "kept")}
    resolved = read_config({"aggregator": options}).resolved()
    assert settled(resolved)["aggregator"]["history_limit"] is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("scale", "taken"), [("unit", 0.1), ("steady", 1.0)])
def test_what_the_rule_takes_for_none_is_filled_in(scale: str, taken: float) -> None:
    open_ones = ({}, {"server_lr": None}, {"server_lr": "null"}, {"server_lr": taken})
    for options in open_ones:
        config = read_config({"aggregator": {"name": "craft", "scale": scale, **options}})
        assert config.resolved()["aggregator"]["server_lr"] == taken
    assert read_config({"aggregator": "craft"}).resolved()["aggregator"]["client_length"] is None


def test_a_resolved_configuration_resolves_to_itself() -> None:
    config = read_config({"method": {"name": "ditto", "lam": [0.1, 1]}, "aggregator": "craft"})
    assert read_config(config.resolved()).resolved() == config.resolved()


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        read_config(str(tmp_path / "none.yaml"))
    assert read_config(write(tmp_path, "")).resolved() == read_config().resolved()


def test_partitions_that_cannot_be() -> None:
    digits = load_dataset()
    with pytest.raises(OptionError, match=r"config: partition: 100 clients .* need 2000 examples"):
        read_config().split(digits)
    keys = r"lower partition\.clients or partition\.min_size$"
    with pytest.raises(OptionError, match=keys):
        read_config().split(digits)
    for name in ("iid", "dirichlet"):
        with pytest.raises(OptionError, match=r"partition: partition\.clients must be at least 1"):
            read_config({"partition": {"name": name, "clients": 0}}).split(digits)
    with pytest.raises(OptionError, match="partition: data set 'digits' does not say who wrote"):
        read_config({"partition": "writer"}).split(digits)
    with pytest.raises(OptionError, match=r"clients_per_round: .* must be in 1\.\.5, got 10"):
        read_config().participants(5)
    with pytest.raises(OptionError, match="device: "):
        read_config({"device": "abacus"}).device  # noqa: B018


def test_partitions_by_name(tmp_path: Path) -> None:
    digits = load_dataset()
    for partition in ({"name": "iid", "clients": 7}, {"name": "dirichlet", "clients": 7}):
        split = read_config({"partition": partition}).split(digits)
        together = np.concatenate([*split.train, *split.test])
        assert np.array_equal(np.sort(together), np.arange(1797))
        assert len(split.train) == 7
    path = tmp_path / "index.json"
    path.write_text("[[0, 1, 2], [5]]")
    named: dict[str, Any] = {"name": "file", "path": str(path)}
    split = read_config({"partition": named}).split(digits)
    assert [len(part) for part in split.train] == [2, 1]


@pytest.mark.parametrize("name", ["mlp", "resnet20"])
def test_models_by_name_and_seed(name: str) -> None:
    digits = load_dataset()
    one, again, other = (
        read_config({"model": name, "seed": seed}).model(digits).state_dict() for seed in (1, 1, 2)
    )
    entry = next(iter(one))
    assert (one[entry] == again[entry]).all()
    assert not (one[entry] == other[entry]).all()
