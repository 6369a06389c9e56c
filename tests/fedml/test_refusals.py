"""Setups in which the server step cannot be replaced are refused before anything is trained."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from craft_adapters import Aggregator, get_aggregator
from craft_adapters.errors import OptionError, UnsupportedSetup

SP = {"training_type": "simulation", "backend": "sp"}
MPI = {"training_type": "simulation", "backend": "MPI"}
SILO = {"training_type": "cross_silo", "scenario": "horizontal", "backend": "GRPC"}


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    with warnings.catch_warnings():  # FedML's, at its import
        warnings.simplefilter("ignore")
        import craft_adapters.fedml as adapter

        adapter.install()
    yield
    adapter.uninstall()


def config(platform: dict[str, Any], **changes: Any) -> SimpleNamespace:
    base = {"enable_craft": True, "federated_optimizer": "FedAvg", "rank": 0, "role": "server"}
    return SimpleNamespace(**{**base, **platform, **changes})


def by_init(args: SimpleNamespace) -> None:
    import fedml

    fedml.init(args)


def by_runner(args: SimpleNamespace) -> None:
    import fedml

    fedml.FedMLRunner(args, None, None, None)


REFUSED = [
    (SP, {"federated_optimizer": "FedOpt"}, "server optimizer of its own"),
    (SP, {"federated_optimizer": "FedNova"}, "not their models"),
    (SP, {"federated_optimizer": "SCAFFOLD"}, "not their models"),
    (SP, {"federated_optimizer": "Mime"}, "not their models"),
    (SP, {"federated_optimizer": "FedDyn"}, "not their models"),
    (SP, {"federated_optimizer": "HierarchicalFL"}, "group models"),
    (SP, {"federated_optimizer": "turbo_aggregate"}, "shares"),
    (SP, {"federated_optimizer": "classical_vertical"}, "does not average client models"),
    (SP, {"federated_optimizer": "CRAFT"}, 'use federated_optimizer: "FedAvg" or "FedProx"'),
    (MPI, {"federated_optimizer": "FedAvg_seq"}, "sum over several clients"),
    (MPI, {"federated_optimizer": "FedOpt_seq"}, "sum over several clients"),
    (MPI, {"federated_optimizer": "FedOpt"}, "server optimizer of its own"),
    (MPI, {"federated_optimizer": "FedProx"}, "outside the sp simulator"),
    (MPI, {"federated_optimizer": "FedNova"}, "not their models"),
    (MPI, {"federated_optimizer": "Async_FedAvg"}, "no round"),
    (MPI, {"enable_defense": True, "defense_type": "krum"}, "FedMLDefender.defend"),
    (MPI, {"backend": "NCCL"}, "without this backend"),
    (SILO, {"federated_optimizer": "LSA"}, "masked"),
    (SILO, {"federated_optimizer": "SA"}, "masked"),
    (SILO, {"scenario": "hierarchical"}, "scenario: horizontal"),
    (SILO, {"training_type": "cross_device"}, "MNN"),
    (SILO, {"training_type": "cross_cloud"}, "vendor's cloud"),
    (SILO, {"training_type": "elsewhere"}, "not known to this adapter"),
    (SILO, {"ml_engine": "tf"}, "use ml_engine: torch"),
    (SILO, {"ml_engine": "jax"}, "use ml_engine: torch"),
    (SILO, {"ml_engine": "mxnet"}, "use ml_engine: torch"),
    (SILO, {"enable_fhe": True}, "ciphertexts"),
    (SILO, {"enable_defense": True, "defense_type": "cclip"}, "random guess"),
    (SILO, {"enable_defense": True, "defense_type": "rfa"}, "geometric median"),
    (SILO, {"enable_defense": True, "defense_type": "geo_median"}, "geometric median"),
    (SILO, {"enable_defense": True, "defense_type": " wise_median "}, "coordinate-wise median"),
]


@pytest.mark.parametrize("entrance", [by_init, by_runner])
@pytest.mark.parametrize(("platform", "changes", "reason"), REFUSED)
def test_refused_with_its_reason(
    entrance: Callable[[SimpleNamespace], None],
    platform: dict[str, Any],
    changes: dict[str, Any],
    reason: str,
) -> None:
    with pytest.raises(UnsupportedSetup) as raised:
        entrance(config(platform, **changes))
    message = str(raised.value)
    assert reason in message
    assert "use " in message  # what would work
    *_, (key, value) = changes.items()
    assert (key if value is True else str(value).strip()) in message


@pytest.mark.parametrize(
    ("name", "platform", "optimizer"),
    [
        ("fedml.simulation.SimulatorSingleProcess", SP, "FedOpt"),
        ("fedml.simulation.SimulatorMPI", MPI, "FedAvg_seq"),
        ("fedml.simulation.SimulatorNCCL", {**MPI, "backend": "NCCL"}, "FedAvg"),
        ("fedml.cross_silo.Server", SILO, "LSA"),
        ("fedml.cross_silo.Client", SILO, "LSA"),
        ("fedml.cross_cloud.Server", SILO, "FedAvg"),
        ("fedml.cross_cloud.Client", SILO, "FedAvg"),
    ],
)
def test_classes_used_directly_refuse_too(
    name: str, platform: dict[str, Any], optimizer: str
) -> None:
    import importlib

    module, _, cls = name.rpartition(".")
    entrance = getattr(importlib.import_module(module), cls)
    with pytest.raises(UnsupportedSetup):
        entrance(config(platform, federated_optimizer=optimizer), None, None, None)


@pytest.mark.parametrize("cls", ["Server", "Client"])
def test_serving_classes_used_directly_refuse_too(cls: str) -> None:
    import fedml.serving

    serving = {**SILO, "training_type": "fedml_serving", "ml_engine": "tf"}
    with pytest.raises(UnsupportedSetup, match="torch"):
        getattr(fedml.serving, cls)(config(serving), "endpoint", "model", "v1")


def test_serving_through_the_runner_is_refused() -> None:
    args = config({**SILO, "training_type": "fedml_serving"})
    with pytest.raises(UnsupportedSetup, match=r"use fedml\.serving\.Server and \.Client"):
        by_runner(args)


def test_algorithm_flow_is_refused() -> None:
    import fedml

    with pytest.raises(UnsupportedSetup, match="algorithm_flow"):
        fedml.FedMLRunner(config(SP), None, None, None, algorithm_flow=object())


def test_groups_of_hierarchical_fl_are_refused_by_their_class() -> None:
    """Scripts may build FedML's trainers without any of its entrances."""
    from fedml.simulation.sp.fedavg.fedavg_api import FedAvgAPI

    class Grouped(FedAvgAPI):
        def _setup_clients(self, *args: Any) -> None:
            pass

    args = config(SP, dataset="digits")
    with pytest.raises(UnsupportedSetup, match="Grouped derives from FedAvgAPI"):
        Grouped(args, None, [0, 0, None, None, {}, {}, {}, 10], __import__("torch").nn.Linear(1, 1))


def test_one_liners_are_refused_by_what_they_set_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    import fedml

    args = config({}, federated_optimizer="FedOpt")
    monkeypatch.setattr(fedml, "_global_training_type", "simulation")
    monkeypatch.setattr(fedml, "_global_comm_backend", "sp")
    with pytest.raises(UnsupportedSetup, match='"FedAvg" or "FedProx"'):
        by_init(args)


# --- Keys and values -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"craft_sever_lr": 0.1}, "did you mean 'craft_server_lr'"),
        ({"craft_stat_path": "x"}, "did you mean 'craft_state_path'"),
        ({"craft_agregator": "craft"}, "did you mean 'craft_aggregator'"),
        ({"craft_aggregator": "crft"}, "did you mean 'craft'"),
        ({"craft_aggregator": 3}, "craft_aggregator must be a rule's name"),
        ({"craft_server_lr": "fast"}, "craft_server_lr must be a finite number"),
        ({"craft_server_lr": -1}, "server_lr"),
        ({"craft_scale": "units"}, "did you mean 'unit'"),
        ({"craft_on_empty_round": "stop"}, "craft_on_empty_round must be 'keep' or 'raise'"),
        ({"craft_force": "perhaps"}, "craft_force must be true or false"),
        ({"craft_state_path": 7}, "craft_state_path must be"),
        ({"enable_craft": "perhaps"}, "enable_craft must be true or false"),
        ({"craft_aggregator": "fedavg", "craft_server_lr": 0.1}, "rule 'fedavg'"),
    ],
)
def test_wrong_keys_and_values_are_refused_by_init(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as raised:
        by_init(config(SP, **changes))
    assert message in str(raised.value)


def test_keys_without_the_switch_are_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    from craft_adapters.fedml._config import warn_if_forgotten

    args = config(SP, craft_server_lr=0.1)
    warn_if_forgotten(args)
    assert not caplog.records
    del args.enable_craft
    with caplog.at_level(logging.WARNING):
        warn_if_forgotten(args)
    assert "enable_craft" in caplog.text


def test_rules_that_need_more_than_fedml_has_are_refused() -> None:
    from craft_adapters.fedml._config import Settings
    from craft_adapters.fedml._server_step import ServerStep

    class Needy(type(get_aggregator("fedavg"))):  # type: ignore[misc]
        name = "needy"
        requires = frozenset({"loss", "local_steps"})

    rule: Aggregator = Needy()
    with pytest.raises(UnsupportedSetup, match="'needy' needs local_steps and loss") as refusal:
        ServerStep(Settings(rule))
    named = str(refusal.value).rpartition("needs no more: ")[2].split(", ")
    assert {"craft", "fedavg", "config", "fedadam"} <= set(named)
    assert not {"fedfv", "fednova"} & set(named)


# --- Coming and going ----------------------------------------------------------------------------


def test_install_is_idempotent_and_uninstall_restores() -> None:
    import fedml
    from fedml.core import mlops
    from fedml.simulation.sp.fedavg.fedavg_api import FedAvgAPI

    import craft_adapters.fedml as adapter

    def methods() -> list[Any]:
        return [fedml.init, FedAvgAPI.__init__, FedAvgAPI._aggregate, mlops.fetch_config]

    replaced = methods()
    adapter.install()
    assert methods() == replaced
    adapter.uninstall()
    originals = methods()
    assert all(new.__wrapped__ is old for new, old in zip(replaced, originals, strict=True))
    adapter.uninstall()
    adapter.install()
    assert all(new.__wrapped__ is old for new, old in zip(methods(), originals, strict=True))


def test_another_fedml_is_refused_and_left_as_it_was() -> None:
    from craft_adapters.fedml._patches import Patches

    class Host:
        def known(self) -> int:
            return 1

    patches = Patches()
    patches.replace(Host, "known", lambda original: lambda self: 2)
    assert Host().known() == 2
    with pytest.raises(UnsupportedSetup, match=r"no .*Host\.gone"):
        patches.replace(Host, "gone", lambda original: original)
    assert Host().known() == 1
