"""The aggregator in NVFlare's own FedAvg controller, and what it refuses."""

from __future__ import annotations

import doctest
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from craft_adapters import ClientUpdate, OptionError, UnsupportedSetup, get_aggregator

pytest.importorskip("nvflare", reason="NVFlare is not installed (extra nvflare)")

from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_opt.pt.lazy_tensor_dict import LazyTensorDict

from craft_adapters.nvflare import CraftAggregator
from craft_adapters.nvflare._harness import NVFlareHarness, _Server

STEPS = "NUM_STEPS_CURRENT_ROUND"
START = {
    "body.weight": torch.tensor([[1.0, -1.0], [0.5, 2.0]]),
    "norm.running_mean": torch.zeros(2),
    "norm.num_batches_tracked": torch.tensor(3),
}
SITES = {"boston": 1, "delhi": 2, "aachen": 3}


def trained(number: int, state: Any = START) -> dict[str, torch.Tensor]:
    return {
        "body.weight": state["body.weight"] + 0.1 * number * torch.tensor([[1.0, 2], [-1, number]]),
        "norm.running_mean": state["norm.running_mean"] + number,
        "norm.num_batches_tracked": state["norm.num_batches_tracked"] + number,
    }


def alone(rule: str, rounds: int = 1, **options: Any) -> dict[str, Any]:
    """What the rule itself says."""
    aggregator, state = get_aggregator(rule, **options), dict(START)
    for _ in range(rounds):
        updates = [ClientUpdate(site, 10 * n, trained(n, state)) for site, n in SITES.items()]
        state = aggregator.aggregate(state, updates).state
    return state


def same(found: Any, expected: Any) -> bool:
    return list(found) == list(expected) and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value)
        for name, value in expected.items()
    )


class Job:
    """A job whose sites answer what a test says, in NVFlare's controller."""

    def __init__(self, aggregator: CraftAggregator, folder: Path, state: Any = START) -> None:
        self.server = _Server(aggregator, state, folder, NVFlareHarness())
        self.controller = self.server.controller
        self._update = self.controller.update_model
        self.controller.update_model = self._note

    def _note(self, model: FLModel, result: FLModel) -> FLModel:
        self.result = result
        return self._update(model, result)

    def round(self, replies: dict[str, FLModel]) -> FLModel:
        """One round; what the aggregator gave the controller."""
        self.server.play(list(replies.items()))
        return self.result

    def train(self, rounds: int = 1) -> dict[str, Any]:
        for _ in range(rounds):
            self.round({s: reply(trained(n, self.server.model), n) for s, n in SITES.items()})
        return self.server.model


def reply(params: Any, number: int = 1, **more: Any) -> FLModel:
    return FLModel(params=params, **{"meta": {STEPS: 10 * number}, **more})


def test_a_run_is_what_the_rule_says(tmp_path: Path) -> None:
    job = Job(CraftAggregator("craft", {"server_lr": 0.5}), tmp_path)
    assert same(job.train(rounds=3), alone("craft", rounds=3, server_lr=0.5))


def test_order_of_arrival_changes_no_bit(tmp_path: Path) -> None:
    replies = {site: reply(trained(n), n, metrics={"acc": n / 7}) for site, n in SITES.items()}
    results = []
    for seed in range(3):
        shuffled = random.Random(seed).sample(list(replies.items()), k=len(replies))
        results.append(Job(CraftAggregator(), tmp_path / str(seed)).round(dict(shuffled)))
    assert all(same(result.params, results[0].params) for result in results)
    assert all(result.metrics == results[0].metrics for result in results)


def test_differences_and_full_models_may_be_mixed(tmp_path: Path) -> None:
    replies = {site: reply(trained(n), n) for site, n in SITES.items()}
    difference = {name: value - START[name] for name, value in trained(2).items()}
    replies["delhi"] = reply(difference, 2, params_type=ParamsType.DIFF)
    result = Job(CraftAggregator("fedavg"), tmp_path).round(replies)
    assert result.params_type == ParamsType.FULL
    for name, value in alone("fedavg").items():
        torch.testing.assert_close(result.params[name], value)
        assert result.params[name].dtype == value.dtype


def test_values_on_disk_are_read_one_at_a_time(tmp_path: Path) -> None:
    """NVFlare's own references, with ``enable_tensor_disk_offload``."""
    replies = {}
    for site, n in SITES.items():
        folder = tmp_path / site
        folder.mkdir()
        save_file(trained(n), folder / "0.safetensors")
        files = {name: (str(folder / "0.safetensors"), name) for name in START}
        stored = LazyTensorDict(files, str(folder))
        replies[site] = reply({name: stored.make_lazy_ref(name) for name in START}, n)
    result = Job(CraftAggregator("craft"), tmp_path).round(replies)
    assert same(result.params, alone("craft"))
    assert not any(hasattr(value, "materialize") for value in result.params.values())


def test_arrays_come_back_as_arrays(tmp_path: Path) -> None:
    start = {"w": np.ones((2, 3), np.float16), "n": np.asarray(4), "extra": "text"}
    sent = {"w": np.full((2, 3), 2, np.float16), "n": np.int64(6), "extra": "other"}
    for value in start.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False  # as received ones are
    job = Job(CraftAggregator("fedavg"), tmp_path, start)
    found = job.round({"aachen": reply(sent), "boston": reply(start)}).params
    assert found["w"].dtype == np.float16 and (found["w"] == 1.5).all()
    assert isinstance(found["n"], np.ndarray) and found["n"].dtype == np.int64 and found["n"] == 6
    assert found["extra"] == "text"


def test_weights(tmp_path: Path) -> None:
    """NVFlare's key, a key of the clients' own, and none."""
    start = {"w": torch.zeros(1)}

    def mean(aggregator: CraftAggregator, meta: dict[str, dict[str, Any]]) -> float:
        job = Job(aggregator, tmp_path, start)
        replies = {
            site: FLModel(params={"w": torch.tensor([float(SITES[site])])}, meta=given)
            for site, given in meta.items()
        }
        return float(job.round(replies).params["w"])

    meta = {"boston": {STEPS: 1, "examples": 3}, "delhi": {STEPS: 1, "examples": 1}}
    assert mean(CraftAggregator("fedavg"), meta) == 1.5
    assert mean(CraftAggregator("fedavg", weight_key="examples"), meta) == 1.25
    assert mean(CraftAggregator("fedavg", weight_key=None), {"boston": {}, "delhi": {}}) == 1.5
    with pytest.raises(RuntimeError, match=r"boston: 'NUM_STEPS_CURRENT_ROUND' is needed"):
        mean(CraftAggregator("fedavg"), {"boston": {"examples": 3}})
    with pytest.raises(RuntimeError, match=r"'boston': num_examples must be a number, got 'many'"):
        mean(CraftAggregator("fedavg"), {"boston": {STEPS: "many"}})


def test_metrics_are_averaged_by_weight(tmp_path: Path) -> None:
    replies = {
        site: reply(trained(n), n, metrics={"accuracy": n / 10, "confusion": {"a": 1}})
        for site, n in SITES.items()
    }
    result = Job(CraftAggregator("fedavg"), tmp_path).round(replies)
    assert result.metrics == {"accuracy": pytest.approx((1 * 1 + 2 * 2 + 3 * 3) / 60)}
    replies["delhi"].metrics = None
    assert Job(CraftAggregator("fedavg"), tmp_path).round(replies).metrics is None


def test_early_stopping_sees_the_metrics(tmp_path: Path) -> None:
    job = Job(CraftAggregator("fedavg"), tmp_path)
    job.controller.stop_condition = ("accuracy", 0.9, float.__ge__)
    result = job.round({"delhi": reply(trained(2), metrics={"accuracy": 0.95})})
    assert job.controller.is_curr_model_better(result)
    assert job.controller.should_stop(result.metrics)


def test_what_a_rule_needs(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSetup, match=r"needs local_steps from every client.*steps_key"):
        CraftAggregator("fednova")
    with pytest.raises(UnsupportedSetup, match=r"needs loss from every client.*loss_key"):
        CraftAggregator("afl")
    job = Job(CraftAggregator("fednova", steps_key=STEPS), tmp_path)
    assert not same(job.train(), START)
    job = Job(CraftAggregator("afl", loss_key="loss"), tmp_path / "afl")
    with pytest.raises(RuntimeError, match=r"aachen: 'loss' is needed"):
        job.train()


def test_state_is_in_the_jobs_run_directory_and_resumed(tmp_path: Path) -> None:
    first = Job(CraftAggregator("craft"), tmp_path).train()
    assert (tmp_path / "craft_state.safetensors").is_file()
    second = Job(CraftAggregator("craft"), tmp_path, first)
    assert same(second.train(), alone("craft", rounds=2))
    elsewhere = tmp_path / "kept.safetensors"
    job = Job(CraftAggregator("craft", state_path=str(elsewhere)), tmp_path / "job")
    job.train()
    assert elsewhere.is_file()
    Job(CraftAggregator("craft", state_path=None), tmp_path / "none").train()
    assert not (tmp_path / "none").exists()
    with pytest.raises(RuntimeError, match=r"Not a directory|File exists"):
        Job(CraftAggregator("craft", state_path=str(elsewhere / "state")), tmp_path)


def test_a_foreign_state_ends_the_run(tmp_path: Path) -> None:
    Job(CraftAggregator("fedavgm"), tmp_path).train()
    with pytest.raises(RuntimeError, match="state of rule 'fedavgm', not 'craft'"):
        Job(CraftAggregator("craft"), tmp_path)


def test_a_round_without_a_usable_client(tmp_path: Path) -> None:
    idle = {"delhi": reply(trained(2), 0)}
    assert same(Job(CraftAggregator("craft"), tmp_path).round(idle).params, START)
    job = Job(CraftAggregator("craft", on_empty_round="raise"), tmp_path)
    with pytest.raises(RuntimeError, match="sample counts of all 1 clients are zero"):
        job.round(idle)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="did you mean 'craft'"):
        CraftAggregator("crft")
    with pytest.raises(OptionError, match="sever_lr"):
        CraftAggregator("craft", {"sever_lr": 1})
    with pytest.raises(OptionError, match="on_empty_round must be"):
        CraftAggregator(on_empty_round="stop")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedSetup, match="fired no _before_train_task"):
        CraftAggregator().aggregate_model()
    job = Job(CraftAggregator("fedavg"), tmp_path)
    job.train()
    job.server.aggregator.accept_model(reply(START))  # as ScatterAndGather does it
    with pytest.raises(UnsupportedSetup, match="without the site's name"):
        job.server.aggregator.aggregate_model()
    nested = {"dense": [np.ones(2), np.ones(2)]}  # Keras
    job = Job(CraftAggregator("fedavg"), tmp_path, nested)
    with pytest.raises(RuntimeError, match="entry 'dense' of the global model is a list"):
        job.round({"delhi": reply(nested)})


@pytest.mark.parametrize("path", ["CraftAggregator", "_aggregator.CraftAggregator"])
def test_the_line_that_an_operator_adds(path: str, tmp_path: Path) -> None:
    from nvflare.apis.fl_exception import UnsafeComponentError
    from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer

    file = tmp_path / "resources.json"
    site = SimpleNamespace(get_resources_file_path=lambda: str(file))
    config = {"path": f"craft_adapters.nvflare.{path}"}
    file.write_text(json.dumps({"class_allow_list": ["nvflare."]}))
    with pytest.raises(UnsafeComponentError, match="not in allow_list"):
        ComponentPathAuthorizer().authorize_component_config(config, workspace=site)
    file.write_text(json.dumps({"class_allow_list": ["nvflare.", "craft_adapters."]}))
    ComponentPathAuthorizer().authorize_component_config(config, workspace=site)


def test_the_docstrings_example() -> None:
    import craft_adapters.nvflare._aggregator as module

    assert doctest.testmod(module) == doctest.TestResults(failed=0, attempted=2)


def test_the_configuration_holds_what_was_given() -> None:
    """NVFlare reads a component's arguments off its attributes."""
    from nvflare.job_config.fed_job_config import FedJobConfig

    given = {
        "aggregator": "fednova",
        "options": {"server_momentum": 0.5},
        "weight_key": "examples",
        "loss_key": "loss",
        "steps_key": STEPS,
        "state_path": None,
        "on_empty_round": "raise",
    }
    reader = FedJobConfig("job", min_clients=1)
    assert reader._get_args(CraftAggregator(**given), "custom") == given
    assert reader._get_args(CraftAggregator(), "custom") == {}
