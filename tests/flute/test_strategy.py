"""Both halves of the strategy, on their own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from craft_adapters import ClientUpdate, get_aggregator
from craft_adapters.errors import CheckpointError, IncompatibleUpdate, UnsupportedSetup
from craft_adapters.flute._strategy import ClientHalf, craft_strategy

from .conftest import settings as config_of


class Updater:
    """FLUTE's ModelUpdater, as far as a strategy sees it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self.optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.1)

    def update_model(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run_lr_scheduler(self, force_run_val: bool) -> tuple[float, float]:
        assert force_run_val is False
        self.schedule.step()
        return 0.5, 0.25


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def client(number: int, **sections: Any) -> Any:
    config = {**config_of(), "craft_client_id": number}
    for section, values in sections.items():
        config[section] = {**config[section], **values}
    return craft_strategy("client", config)


def trained(seed: int, samples: int = 10, steps: int = 2) -> Any:
    """A trainer after its training, with pseudo-gradients."""
    model = network()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return SimpleNamespace(model=model, num_samples=samples, step=steps)


def server(folder: Path, **craft: Any) -> Any:
    return craft_strategy("server", config_of(craft=craft), str(folder))


def combine(half: Any, updater: Updater, payloads: list[dict[str, Any]], round: int = 0) -> Any:
    for payload in payloads:
        assert half.process_individual_payload(updater, payload) is True
    return half.combine_payloads(
        worker_trainer=updater,
        curr_iter=round,
        num_clients_curr_iter=len(payloads),
        total_clients=10,
        client_stats=None,
    )


def test_a_payload_is_the_pseudo_gradient_as_it_is() -> None:
    trainer = trained(0, samples=17, steps=4)
    payload = client(5).generate_client_payload(trainer)
    *gradients, tag = payload["gradients"]
    assert payload["weight"] == 17 and tag.tolist() == [5, 4] and tag.dtype == torch.float32
    for parameter, sent in zip(trainer.model.parameters(), gradients, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, sent)
        parameter.grad.zero_()
        assert sent.abs().sum() > 0


def test_a_layer_that_the_config_freezes() -> None:
    half = client(0, model_config={"freeze_layer": "0.bias"})
    _, bias, *_ = half.generate_client_payload(trained(0))["gradients"]
    assert torch.equal(bias, torch.zeros(2))


@pytest.mark.parametrize("wanted", [True, False])
def test_statistics_of_the_pseudo_gradient(wanted: bool) -> None:
    calls: list[str] = []
    trainer = trained(0)
    trainer.reset_gradient_power = lambda: calls.append("reset")
    trainer.estimate_sufficient_stats = lambda: calls.append("estimate")
    client(0, client_config={"stats_on_smooth_grad": wanted}).generate_client_payload(trainer)
    assert calls == (["reset", "estimate"] if wanted else [])


def test_ids_that_the_transport_would_round() -> None:
    client(2**24)
    with pytest.raises(UnsupportedSetup, match="client 16777217"):
        client(2**24 + 1)


def test_a_mode_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="'client' or 'server', got 'both'"):
        craft_strategy("both", config_of())


@settings(deadline=None, max_examples=25)
@given(
    clients=st.dictionaries(st.integers(0, 2**24), st.integers(1, 1000), min_size=1, max_size=5),
    rule=st.sampled_from(["craft", "fedavg", "fednova"]),
    order=st.randoms(use_true_random=False),
)
def test_the_new_model_is_the_rules(
    clients: dict[int, int], rule: str, order: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With SGD and learning rate 1, in any order of arrival; names, counts and steps as sent."""
    updater = Updater(network())
    start = {name: value.clone() for name, value in updater.model.state_dict().items()}
    names = [name for name, _ in updater.model.named_parameters()]
    trainers = {who: trained(who, count, 1 + who % 3) for who, count in clients.items()}
    payloads = [client(who).generate_client_payload(each) for who, each in trainers.items()]
    order.shuffle(payloads)
    updates = [
        ClientUpdate(
            who,
            clients[who],
            dict(zip(names, (p.grad for p in each.model.parameters()), strict=True)),
            kind="update",
            local_steps=each.step,
        )
        for who, each in trainers.items()
    ]
    expected = get_aggregator(rule).aggregate(start, updates).state
    half = server(tmp_path_factory.mktemp("run"), aggregator=rule)
    assert combine(half, updater, payloads) == (0.5, 0.25)
    for name, value in updater.model.state_dict().items():
        # new = old - (old - new): one rounding of the step.
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def test_the_hosts_optimizer_and_schedule_apply(tmp_path: Path) -> None:
    """The step is scaled by the learning rate, which falls by a factor of ten a round."""
    models = [network(), network()]
    rates = (1.0, 0.25)
    updaters = [
        Updater(model, torch.optim.SGD(model.parameters(), lr=rate))
        for model, rate in zip(models, rates, strict=True)
    ]
    start = network().state_dict()
    for position, updater in enumerate(updaters):
        folder = tmp_path / str(position)
        folder.mkdir()
        half = server(folder, aggregator="fedavg")
        combine(half, updater, [client(0).generate_client_payload(trained(0))])
    whole, part = ({n: v - start[n] for n, v in m.state_dict().items()} for m in models)
    torch.testing.assert_close(part["0.weight"], 0.25 * whole["0.weight"])
    assert updaters[1].optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_adam_takes_the_step_as_its_gradient(tmp_path: Path) -> None:
    model = network()
    updater = Updater(model, torch.optim.Adam(model.parameters(), lr=0.01))
    before = model.state_dict()["0.weight"].clone()
    trainer = trained(3)
    combine(server(tmp_path), updater, [client(3).generate_client_payload(trainer)])
    moved = model.state_dict()["0.weight"] - before
    sent = next(iter(trainer.model.parameters())).grad
    assert sent is not None
    torch.testing.assert_close(moved, -0.01 * sent.sign(), rtol=1e-3, atol=1e-6)


def test_a_frozen_parameter_is_not_touched_by_the_optimizer(tmp_path: Path) -> None:
    model = network()
    frozen = dict(model.named_parameters())["0.bias"].requires_grad_(False)
    before = frozen.detach().clone()
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1))
    combine(server(tmp_path), updater, [client(0).generate_client_payload(trained(0))])
    assert torch.equal(frozen, before)


def test_tied_weights(tmp_path: Path) -> None:
    """One of the names travels; the other stays the same tensor."""

    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        return model

    trainer = SimpleNamespace(model=tied(), num_samples=4, step=1)
    trainer.model[0].weight.grad = torch.ones(2, 2)
    updater = Updater(tied())
    before = updater.model.state_dict()["1.weight"].clone()
    payload = client(0).generate_client_payload(trainer)
    combine(server(tmp_path, aggregator="fedavg"), updater, [payload])
    torch.testing.assert_close(updater.model.state_dict()["1.weight"], before - 1)


def test_clients_without_samples_are_left_to_the_host(tmp_path: Path) -> None:
    half = server(tmp_path)
    payload = client(0).generate_client_payload(trained(0, samples=0))
    assert half.process_individual_payload(None, payload) is False


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (slice(1, None), "client 4: 3 tensors .* 4 parameters; .* does not fit is .*'0.weight'"),
        (slice(0, 3), "client 4: 3 tensors .* 4 parameters$"),
    ],
)
def test_a_payload_of_another_model(cut: slice, message: str, tmp_path: Path) -> None:
    payload = client(4).generate_client_payload(trained(0))
    *gradients, tag = payload["gradients"]
    payload["gradients"] = [*gradients[cut], tag]
    half, updater = server(tmp_path), Updater(network())
    with pytest.raises(IncompatibleUpdate, match=message):
        combine(half, updater, [payload])
    combine(half, updater, [client(0).generate_client_payload(trained(0))])  # and nothing is left


def test_the_state_of_another_rule_is_refused(tmp_path: Path) -> None:
    combine(server(tmp_path), Updater(network()), [client(0).generate_client_payload(trained(0))])
    (tmp_path / "latest_model.tar").touch()
    config = config_of(craft={"aggregator": "fedavgm"}, resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match=r"craft_state\.safetensors"):
        craft_strategy("server", config, str(tmp_path))


def test_half_precision(tmp_path: Path, device: torch.device) -> None:
    model = network().to(device, torch.bfloat16)
    trainer = trained(1)
    trainer.model.to(torch.bfloat16)
    payload = ClientHalf({**config_of(), "craft_client_id": 1}).generate_client_payload(trainer)
    before = model.state_dict()["0.weight"].clone()
    updater = Updater(model)
    combine(server(tmp_path, aggregator="fedavg"), updater, [payload])
    after = model.state_dict()["0.weight"]
    assert after.dtype == torch.bfloat16 and after.device.type == device.type
    expected = before.float().cpu() - payload["gradients"][0].float()
    torch.testing.assert_close(after.float().cpu(), expected, rtol=0.05, atol=0.05)
