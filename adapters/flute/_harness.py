"""Drives FLUTE's server loop in one process, for the conformance kit.

``CRAFT_FLUTE_HOME`` names a checkout of FLUTE: then the loop, the optimizer and the checkpoints are
its own, ``core.server.OptimizationServer.train``. Without it, a stand-in of a few lines plays the
calls of that loop in their order. Both halves of the strategy run either way; clients that answer
with recorded models stand for clients that train.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import nn

from craft_adapters import ClientUpdate
from craft_adapters.testing import Harness, Server

from ._config import CLIENT_ID
from ._strategy import craft_strategy

__all__ = ["HOME", "CheckoutHarness", "StandInHarness", "new_harness"]

HOME = "CRAFT_FLUTE_HOME"

_NO_NAMES = "FLUTE's clients send a list of tensors without names"
_ROUNDED = "FLUTE's optimizer takes the step as a gradient, which float16 entries round once more"
_NO_BUFFERS = "FLUTE's clients send parameters; BatchNorm statistics and counters stay with them"


def new_harness() -> Harness:
    """The checkout's if there is one, else the stand-in's."""
    home = os.environ.get(HOME)
    return CheckoutHarness(Path(home)) if home else StandInHarness()


class StandInHarness(Harness):
    """The calls of FLUTE's server loop, in their order."""

    host = f"a stand-in for FLUTE's server loop (set {HOME} to drive a checkout)"
    host_modules: ClassVar[tuple[str, ...]] = ("core",)
    expected_failures: ClassVar[Mapping[str, str]] = {
        "buffers": _NO_BUFFERS,
        "extra-entry": _NO_NAMES,
        "result": _ROUNDED,
    }

    def start(self, rule: str, model: nn.Module, folder: Path) -> Server:
        """A server without a checkpoint of its own: the kit gives the model after a restart."""
        return _StandInServer(_config(rule), model, folder)


class CheckoutHarness(StandInHarness):
    """FLUTE's own server.

    Args:
        home: The checkout.

    Raises:
        ImportError: it is none, or what FLUTE imports is not there.
    """

    def __init__(self, home: Path) -> None:
        from ._install import install

        self.host = f"FLUTE in {home}"
        sys.path.insert(0, os.fspath(home.resolve()))
        install()

    def start(self, rule: str, model: nn.Module, folder: Path) -> Server:
        """An ``OptimizationServer`` without data."""
        return _CheckoutServer(_config(rule), model, folder)


def _config(rule: str) -> dict[str, Any]:
    """A user's config, as far as FLUTE's server reads it."""
    return {
        "strategy": "CRAFT",
        "model_config": {"model_type": "recorded"},
        "client_config": {
            "type": "optimization",
            "data_config": {"train": {"list_of_train_data": None}},
        },
        "server_config": {
            "type": "model_optimization",
            "craft": {"aggregator": rule},
            "resume_from_checkpoint": True,
            "max_iteration": 0,
            "num_clients_per_iteration": Harness.clients_per_round,
            "val_freq": sys.maxsize,
            "rec_freq": sys.maxsize,
            "initial_val": False,
            "initial_rec": False,
            "aggregate_median": "mean",
            "initial_lr_client": 1.0,
            "best_model_criterion": "loss",
            "fall_back_to_best_model": False,
            "data_config": {"val": {}, "test": {}},
            "optimizer_config": {"type": "sgd", "lr": 1.0},
            "annealing_config": {"type": "step_lr", "gamma": 1.0, "step_size": 100},
        },
    }


class _StandInServer:
    def __init__(self, config: dict[str, Any], model: nn.Module, folder: Path) -> None:
        self.config, self.model = config, model
        self.strategy = craft_strategy("server", config, os.fspath(folder))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.number = 0
        (folder / "latest_model.tar").touch()

    def round(self, replies: Sequence[ClientUpdate]) -> Mapping[str, Any]:
        """One iteration of FLUTE's loop."""
        number = self.number
        self.number += 1
        self.model.zero_grad()
        payloads = [_payload(self.config, self.model, reply) for reply in replies]
        taken = [self.strategy.process_individual_payload(self, each) for each in payloads]
        self.strategy.combine_payloads(
            worker_trainer=self,
            curr_iter=number,
            num_clients_curr_iter=sum(taken),
            total_clients=Harness.clients,
            client_stats=None,
        )
        return self.model.state_dict()

    def update_model(self) -> None:
        """As FLUTE's ModelUpdater, which this object stands for too."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run_lr_scheduler(self, force_run_val: bool) -> tuple[None, None]:
        """No schedule."""
        return None, None


class _CheckoutServer:
    def __init__(self, config: dict[str, Any], model: nn.Module, folder: Path) -> None:
        utils = importlib.import_module("utils")
        server = importlib.import_module("core.server").OptimizationServer
        self.config, self.model = config, model
        self.number = 0
        self.server = server(
            num_clients=Harness.clients,
            model=model,
            optimizer=utils.make_optimizer(config["server_config"]["optimizer_config"], model),
            ss_scheduler=None,
            data_path=None,
            model_path=os.fspath(folder),
            server_train_dataloader=None,
            config=config,
            idx_val_clients=[],
            idx_test_clients=[],
            single_worker=None,
        )
        self.server.process_clients = self._answer
        self.server.evaluation = SimpleNamespace(run=lambda modes, metrics, metric_logger: metrics)
        self.replies: Sequence[ClientUpdate] = ()

    def round(self, replies: Sequence[ClientUpdate]) -> Mapping[str, Any]:
        """A run of one iteration."""
        self.replies = replies
        self.server.cur_iter_no, self.server.max_iteration = self.number, self.number + 1
        self.server.num_clients_per_iteration = [len(replies)]
        self.number += 1
        with mock.patch.dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1"):
            self.server.train()
        return self.model.state_dict()

    def _answer(self, clients: Any, server_data: Any, single_worker: Any) -> Iterator[Any]:
        nothing = torch.zeros(())
        for reply in self.replies:
            yield {
                "ts": time.time(),
                "cs": {"full cost": 0.0, "training": 0.0, "setup": 0.0},
                "tl": 0.0,
                "mg": nothing,
                "ng": nothing,
                "vg": nothing,
                "rg": nothing,
                "ns": reply.num_examples,
                "pl": _payload(self.config, self.model, reply),
            }


def _payload(config: dict[str, Any], model: nn.Module, reply: ClientUpdate) -> dict[str, Any]:
    """What the client half makes of a client that has trained to the recorded model."""
    start = model.state_dict()
    buffers = {name for name, _ in model.named_buffers()}
    trained = [
        (name, _trained(start.get(name), value))
        for name, value in reply.values.items()
        if name not in buffers
    ]
    trainer = SimpleNamespace(
        model=SimpleNamespace(
            named_parameters=lambda: trained, parameters=lambda: [each for _, each in trained]
        ),
        num_samples=reply.num_examples,
        step=reply.local_steps,
    )
    client = craft_strategy("client", {**config, CLIENT_ID: reply.client_id})
    payload: dict[str, Any] = client.generate_client_payload(trainer)
    return payload


def _trained(start: Any, value: torch.Tensor) -> nn.Parameter:
    """A client's parameter with its pseudo-gradient, old - new; of another shape, what it is."""
    parameter = nn.Parameter(value.detach().clone(), requires_grad=False)
    fits = isinstance(start, torch.Tensor) and start.shape == value.shape
    parameter.grad = start - parameter.data if fits else parameter.data.clone()
    return parameter
