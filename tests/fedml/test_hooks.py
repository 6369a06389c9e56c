"""FedML's own hooks around the rule, on its real FedMLAggregator, in this process."""

from __future__ import annotations

import copy
import json
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from craft_adapters import ClientUpdate, get_aggregator
from craft_adapters.errors import CheckpointError, NoUsableUpdates, UnsupportedSetup

CLIENTS = 6


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    """FedML warns a lot when it is imported; what the tests call afterwards must not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import craft_adapters.fedml as adapter

        adapter.install()
    yield
    adapter.uninstall()


@pytest.fixture(autouse=True)
def fresh_singletons() -> None:
    from fedml.core.dp.fedml_differential_privacy import FedMLDifferentialPrivacy
    from fedml.core.security.fedml_attacker import FedMLAttacker
    from fedml.core.security.fedml_defender import FedMLDefender

    FedMLDifferentialPrivacy._dp_instance = None
    FedMLAttacker._attacker_instance = None
    FedMLDefender._defender_instance = None


def config(**changes: Any) -> SimpleNamespace:
    base = {
        "training_type": "cross_silo",
        "scenario": "horizontal",
        "backend": "GRPC",
        "federated_optimizer": "FedAvg",
        "dataset": "digits",
        "using_gpu": False,
        "rank": 0,
        "process_id": 0,
        "enable_cuda_rpc": False,
        "worker_num": CLIENTS,
        "using_mlops": False,
        "round_idx": 0,
        "comm_round": 3,
        "frequency_of_the_test": 1,
        "enable_wandb": False,
        "client_num_in_total": CLIENTS,
        "client_num_per_round": CLIENTS,
        "enable_craft": True,
    }
    return SimpleNamespace(**{**base, **changes})


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


class Server:
    """A FedMLAggregator, and what its rule is given."""

    def __init__(
        self, args: SimpleNamespace, model: nn.Module | None = None, aggregator: Any = None
    ) -> None:
        from fedml.cross_silo.server.fedml_aggregator import FedMLAggregator
        from fedml.ml.aggregator.aggregator_creator import create_server_aggregator

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.user = aggregator or create_server_aggregator(model or small_model(), args)
            data = [(torch.zeros(2, 5), torch.zeros(2, dtype=torch.long))]
            self.fedml = FedMLAggregator(
                data, data, 10, {}, {}, {}, CLIENTS, torch.device("cpu"), args, self.user
            )
        self.calls: list[SimpleNamespace] = []
        if hasattr(self.fedml, "_craft_run"):
            self.rule = self.fedml._craft_run.step.rule
            self._watch()

    def _watch(self) -> None:
        aggregate = self.rule.aggregate

        def watched(state: Any, updates: list[ClientUpdate], *, round: int) -> Any:
            call = SimpleNamespace(state=copy.deepcopy(state), updates=updates, round=round)
            self.calls.append(call)
            result = aggregate(state, updates, round=round)
            call.result, call.report = copy.deepcopy(result.state), result.report
            return result

        self.rule.aggregate = watched

    def receive(self, spread: float = 0.1, counts: list[float] | None = None) -> list[OrderedDict]:
        """Uploads near the global model, a different one for each client and round."""
        base = self.user.get_model_params()
        sent = []
        for client in range(CLIENTS):
            torch.manual_seed(100 * self.fedml.args.round_idx + client)
            state = OrderedDict(
                (name, value + spread * (1 + client) * torch.randn(value.shape))
                if value.is_floating_point()
                else (name, value + client)
                for name, value in base.items()
            )
            sent.append(copy.deepcopy(state))
            self.fedml.add_local_trained_result(client, state, (counts or range(10, 16))[client])
        return sent

    def round(self, **options: Any) -> OrderedDict[str, torch.Tensor]:
        self.receive(**options)
        with warnings.catch_warnings():  # FedML's defences warn
            warnings.simplefilter("ignore")
            state, _, _ = self.fedml.aggregate()
        self.fedml.args.round_idx += 1
        return state


def distance(one: Any, other: Any) -> float:
    return float(sum((one[k].double() - other[k].double()).square().sum() for k in other)) ** 0.5


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in other)


# --- Without hooks ----------------------------------------------------------------------------


def test_fedml_gets_what_the_rule_says() -> None:
    server = Server(config(craft_server_lr="2e-1"))
    alone = get_aggregator("craft", server_lr=0.2)
    before = copy.deepcopy(server.user.get_model_params())
    sent = server.receive()
    state, uploads, who = server.fedml.aggregate()
    updates = [ClientUpdate(k, 10 + k, values) for k, values in enumerate(sent)]
    assert type(state) is OrderedDict
    assert same(state, alone.aggregate(before, updates).state)
    assert same(server.user.get_model_params(), state)
    assert who == list(range(CLIENTS))
    assert all(same(values, kept) for (_, values), kept in zip(uploads, sent, strict=True))


def test_batch_norm_counters_stay_integers() -> None:
    torch.manual_seed(0)
    server = Server(config(), nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))
    state = server.round()
    assert state["1.num_batches_tracked"].dtype == torch.int64
    assert state["1.num_batches_tracked"] == CLIENTS - 1
    assert [group.name for group in server.calls[0].report.groups] == ["0", "1"]


def test_layout_comes_from_the_model() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.outer = nn.Linear(4, 4)
            self.outer.weight = self.inner.weight
            self.register_buffer("temperature", torch.ones(()))

    server = Server(config(), Tied())
    server.round()
    assert server.rule.layout.tied == {"outer.weight": "inner.weight"}
    assert server.rule.layout.averaged == ("temperature",)


def test_clients_are_named_by_their_data_silo() -> None:
    server = Server(config(client_num_in_total=50))
    silos = server.fedml.data_silo_selection(3, 50, CLIENTS)
    server.round()
    assert [update.client_id for update in server.calls[0].updates] == list(map(int, silos))
    assert [update.num_examples for update in server.calls[0].updates] == [10, 11, 12, 13, 14, 15]


def test_without_the_switch_nothing_is_touched() -> None:
    quiet = config(enable_craft=False, craft_server_lr="nonsense")
    server = Server(quiet)
    assert "aggregate" not in vars(server.user)
    assert not hasattr(server.fedml, "_craft_run")
    sent = server.receive()
    state, _, _ = server.fedml.aggregate()
    total = sum(range(10, 16))
    for name in state:
        expected = sent[0][name] * (10 / total)
        for k in range(1, CLIENTS):
            expected += sent[k][name] * ((10 + k) / total)
        assert torch.equal(state[name], expected)


def test_each_server_has_its_own_rule() -> None:
    first = Server(config())
    second = Server(config(), aggregator=first.user)
    assert first.rule is not second.rule
    assert first.user.aggregate.step.rule is second.rule


def test_result_is_where_the_uploads_are() -> None:
    """FedML's averaging leaves it there: on a GPU the server's model is elsewhere in round 0."""
    from craft_adapters.fedml._server_step import _on_devices_of

    state = OrderedDict(weight=torch.zeros(2), extra="kept")
    there = OrderedDict(weight=torch.zeros(2, device="meta"))
    moved = _on_devices_of([(1, there)], state)
    assert moved["weight"].device.type == "meta"
    assert moved["extra"] == "kept"


# --- Defences, attacks, privacy, contribution ---------------------------------------------------


def test_norm_clipping_reaches_the_rule() -> None:
    server = Server(config(enable_defense=True, defense_type="norm_diff_clipping", norm_bound=0.3))
    for number in range(2):
        server.round()
        call = server.calls[number]
        lengths = [distance(update.values, call.state) for update in call.updates]
        assert lengths == pytest.approx([0.3] * CLIENTS, rel=1e-4)
        assert call.report.clients == tuple(range(CLIENTS))


@pytest.mark.parametrize(("defence", "kept"), [("krum", 1), ("multikrum", 2)])
def test_krum_leaves_the_rule_its_choice_by_name(defence: str, kept: int) -> None:
    args = config(enable_defense=True, defense_type=defence, byzantine_client_num=1)
    args.krum_param_m = kept
    server = Server(args)
    sent = server.receive()
    server.fedml.aggregate()
    (call,) = server.calls
    assert len(call.updates) == kept
    for update in call.updates:  # the nearest to the others: those with small noise
        assert same(update.values, sent[update.client_id])
    assert {update.client_id for update in call.updates} <= {0, 1, 2, 3}


def test_slsgd_mixes_what_the_rule_returns() -> None:
    args = config(enable_defense=True, defense_type="slsgd", trim_param_b=1, option_type=2)
    args.alpha = 0.25
    server = Server(args)
    state = server.round()
    (call,) = server.calls
    assert {update.client_id for update in call.updates} == {1, 2, 3, 4}  # trimmed by their counts
    for name, value in state.items():
        expected = 0.75 * call.state[name] + 0.25 * call.result[name]
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize(
    ("defence", "options"),
    [
        ("foolsgold", {}),
        ("3sigma", {}),
        ("3sigma_foolsgold", {}),
        ("trimmed_mean", {"beta": 0.2}),
        ("crfl", {"clip_threshold": 50.0}),
    ],
)
def test_other_defences_run(defence: str, options: dict[str, Any]) -> None:
    server = Server(config(enable_defense=True, defense_type=defence, **options))
    for number in range(2):
        state = server.round()
        assert all(bool(value.isfinite().all()) for value in state.values())
        assert len(server.calls) == number + 1
        assert all(isinstance(update.client_id, int) for update in server.calls[-1].updates)


def test_attack_reaches_the_rule() -> None:
    args = config(enable_attack=True, attack_type="byzantine", attack_mode="zero")
    args.byzantine_client_num = 2
    server = Server(args)
    server.round()
    zeroed = [
        update.client_id
        for update in server.calls[0].updates
        if all(not value.any() for value in update.values.values())
    ]
    assert len(zeroed) == 2


def privacy(**changes: Any) -> SimpleNamespace:
    return config(
        enable_dp=True,
        mechanism_type="gaussian",
        epsilon=0.5,
        delta=1e-5,
        sensitivity=1e-3,
        **changes,
    )


def test_central_noise_comes_after_the_rule_and_into_the_saved_model(tmp_path: Path) -> None:
    saved = tmp_path / "model.safetensors"
    server = Server(privacy(dp_solution_type="cdp", craft_model_path=str(saved)))
    state = server.round()
    (call,) = server.calls
    assert 0 < distance(state, call.result) < 1
    from safetensors.torch import load_file

    assert same(load_file(saved), state)
    server.round()
    assert same(server.calls[1].state, state)  # what was sent out, noise included


def test_central_clipping_comes_before_the_rule() -> None:
    server = Server(privacy(dp_solution_type="cdp", max_grad_norm=1.0))
    server.round()
    zero = {name: torch.zeros_like(value) for name, value in server.calls[0].state.items()}
    lengths = [distance(update.values, zero) for update in server.calls[0].updates]
    assert max(lengths) <= 1 + 1e-4


def test_nbafl_is_told_the_counts() -> None:
    from fedml.core.dp.fedml_differential_privacy import FedMLDifferentialPrivacy

    server = Server(privacy(dp_solution_type="nbafl", C=10.0))
    server.round()
    assert FedMLDifferentialPrivacy.get_instance().dp_solution.m == 10
    assert len(server.calls) == 1


def test_contribution_is_assessed_with_fedmls_averaging() -> None:
    from fedml.core import Context
    from fedml.ml.aggregator.agg_operator import FedMLAggOperator

    server = Server(config(enable_contribution=True))
    server.round()

    class Assessor:
        def run(self, *args: Any) -> None:
            _, _, self.aggregation, uploads, *_ = args
            self.aggregation(server.fedml.args, copy.deepcopy(uploads[:2]))

        def get_final_contribution_assignment(self) -> dict[int, float]:
            return {}

    server.user.contribution_assessor_mgr = assessor = Assessor()
    Context().add(Context.KEY_CLIENT_ID_LIST_IN_THIS_ROUND, list(range(CLIENTS)))
    Context().add(Context.KEY_METRICS_ON_LAST_ROUND, (0.1, 0, 0, 0))
    Context().add(Context.KEY_METRICS_ON_AGGREGATED_MODEL, (0.2, 0, 0, 0))
    server.fedml.assess_contribution()
    assert assessor.aggregation is FedMLAggOperator.agg
    assert FedMLAggOperator.agg.__module__ == "fedml.ml.aggregator.agg_operator"
    assert len(server.calls) == 1


# --- Empty rounds, files -------------------------------------------------------------------------


def test_round_without_usable_clients_keeps_the_model(tmp_path: Path) -> None:
    report = tmp_path / "made" / "report.jsonl"
    server = Server(config(craft_report_path=str(report)))
    before = copy.deepcopy(server.user.get_model_params())
    assert same(server.round(counts=[0] * CLIENTS), before)
    assert not same(server.round(), before)
    first, second = map(json.loads, report.read_text().splitlines())
    assert first["round"] == 0
    assert "zero" in first["skipped"]
    assert second["round"] == 1
    assert second["clients"] == list(range(CLIENTS))


def test_round_without_usable_clients_can_stop_the_run() -> None:
    server = Server(config(craft_on_empty_round="raise"))
    with pytest.raises(NoUsableUpdates, match="zero"):
        server.round(counts=[0] * CLIENTS)


def test_restart_goes_on_to_the_bit(tmp_path: Path) -> None:
    files = {
        "craft_state_path": str(tmp_path / "state.safetensors"),
        "craft_model_path": str(tmp_path / "model.safetensors"),
    }
    without_stop = Server(config())
    states = [without_stop.round() for _ in range(3)]

    Server(config(**files)).round()
    again = Server(config(round_idx=1, **files))  # FedML itself would count from 0
    assert same(again.user.get_model_params(), states[0])
    assert same(again.round(), states[1])
    assert same(again.round(), states[2])


@pytest.mark.parametrize("key", ["craft_state_path", "craft_model_path"])
def test_damaged_and_foreign_files_are_refused_before_training(tmp_path: Path, key: str) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"file\.safetensors"):
        Server(config(**{key: str(path)}))
    path.unlink()
    other = Server(config(**{key: str(path)}), nn.Linear(5, 2))
    other.round()
    with pytest.raises(CheckpointError):
        Server(config(**{key: str(path)})).round()


# --- The explicit way ----------------------------------------------------------------------------


def own_aggregator(**changes: Any) -> Any:
    from fedml.ml.aggregator.aggregator_creator import create_server_aggregator

    args = config(**changes)
    if "enable_craft" not in changes:
        del args.enable_craft
    return create_server_aggregator(small_model(), args)


def wrap(*args: Any, **options: Any) -> Any:
    import craft_adapters.fedml

    return craft_adapters.fedml.wrap(*args, **options)


def test_wrap_needs_no_switch_and_takes_options() -> None:
    wrapped = wrap(own_aggregator(), "craft", server_lr=0.3, scale="client_norm")
    server = Server(wrapped.args, aggregator=wrapped)
    assert (server.rule.server_lr, server.rule.scale) == (0.3, "client_norm")
    server.round()
    assert len(server.calls) == 1


def test_wrap_reads_the_config_and_takes_a_rule_object() -> None:
    by_config = wrap(own_aggregator(craft_server_lr=0.7))
    assert by_config.aggregate.step.rule.server_lr == 0.7
    rule = get_aggregator("fedavg")
    by_object = wrap(own_aggregator(craft_server_lr=0.7), rule)
    assert by_object.aggregate.step.rule is rule


def test_wrap_respects_a_config_that_says_no() -> None:
    aggregator = own_aggregator(enable_craft=False)
    assert wrap(aggregator) is aggregator
    assert "aggregate" not in vars(aggregator)


def test_what_is_no_server_aggregator_cannot_be_wrapped() -> None:
    with pytest.raises(TypeError, match=r"takes a fedml\.core\.ServerAggregator.*got NoneType"):
        wrap(None, "craft")


def test_wrapping_twice_is_refused() -> None:
    with pytest.raises(UnsupportedSetup, match="wrapped already"):
        wrap(wrap(own_aggregator()))


@pytest.mark.parametrize("start", [wrap, lambda user: Server(user.args, aggregator=user)])
def test_own_aggregate_is_refused_unless_forced(start: Callable[[Any], Any]) -> None:
    def own(**changes: Any) -> Any:
        user = own_aggregator(enable_craft=True, **changes)

        class Mine(type(user)):  # type: ignore[misc]
            def aggregate(self, raw: Any) -> Any:
                raise AssertionError

        user.__class__ = Mine
        return user

    with pytest.raises(UnsupportedSetup, match=r"Mine overrides aggregate.*craft_force"):
        start(own())
    start(own(craft_force=True))


# --- The MPI simulator's aggregator, without MPI -------------------------------------------------


def mpi_server(args: SimpleNamespace, user: Any = None) -> Any:
    from fedml.ml.aggregator.aggregator_creator import create_server_aggregator
    from fedml.simulation.mpi.fedavg.FedAVGAggregator import FedAVGAggregator

    user = user or create_server_aggregator(small_model(), args)
    server = FedAVGAggregator([], [], 10, {}, {}, {}, CLIENTS, torch.device("cpu"), args, user)
    server.client_sampling(args.round_idx, 50, CLIENTS)
    for worker in range(CLIENTS):
        state = copy.deepcopy(user.get_model_params())
        state["0.bias"] += worker + 1
        server.add_local_trained_result(worker, state, 10 + worker)
    return server


MPI = {"training_type": "simulation", "backend": "MPI"}


def test_mpi_aggregator_names_clients_and_saves_the_model(tmp_path: Path) -> None:
    files = {"craft_model_path": str(tmp_path / "m"), "craft_report_path": str(tmp_path / "r")}
    server = mpi_server(config(**MPI, **files))
    sampled = sorted(map(int, server._craft_run.clients))
    state = server.aggregate()
    assert type(state) is OrderedDict
    report = json.loads((tmp_path / "r").read_text())
    assert report["clients"] == sampled != list(range(CLIENTS))
    again = mpi_server(config(**MPI, **files))
    assert same(again.get_global_model_params(), state)


def test_mpi_aggregator_takes_a_wrapped_object_and_attacks() -> None:
    attack = {"enable_attack": True, "attack_type": "byzantine", "attack_mode": "zero"}
    args = config(**MPI, **attack, byzantine_client_num=CLIENTS)
    args.backend = "sp"  # FedML's attack asks for a device; on MPI that asks for a GPU mapping
    from fedml.ml.aggregator.aggregator_creator import create_server_aggregator

    user = create_server_aggregator(small_model(), args)
    args.backend, args.enable_craft = "MPI", True
    server = mpi_server(args, wrap(user, "fedavg"))
    from fedml.core.security.fedml_attacker import FedMLAttacker

    assert FedMLAttacker.get_instance().is_model_attack()
    state = server.aggregate()
    assert max(float(value.abs().max()) for value in state.values()) < 1e-6


def test_mpi_aggregator_without_the_switch_is_fedmls() -> None:
    server = mpi_server(config(**MPI, enable_craft=False))
    assert not hasattr(server, "_craft_run")
    base = copy.deepcopy(server.get_global_model_params())
    total = sum(range(10, 16))
    expected = sum((base["0.bias"] + k + 1) * (10 + k) / total for k in range(CLIENTS))
    torch.testing.assert_close(server.aggregate()["0.bias"], expected)
