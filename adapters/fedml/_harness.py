"""Drives FedML's own server step in one process, for the conformance kit.

The objects are FedML's: ``FedMLAggregator`` of cross-silo runs with the ServerAggregator that
FedML makes for a model, and ``FedAvgAPI`` of the single-process simulator. The transport between
processes is left out, and clients that answer with recorded models stand for clients that train.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import nn

from craft_adapters import ClientUpdate
from craft_adapters.testing import Harness

from ._install import install

__all__ = ["CrossSiloHarness", "SpHarness"]

_WAITS = "FedML's cross-silo server waits until every one of a fixed number of clients has sent"
_CPU = torch.device("cpu")


def _config(rule: str, folder: Path, **more: Any) -> SimpleNamespace:
    """A user's config, flattened as FedML does it."""
    return SimpleNamespace(
        federated_optimizer="FedAvg",
        dataset="recorded",
        client_num_in_total=Harness.clients,
        client_num_per_round=Harness.clients_per_round,
        frequency_of_the_test=1,
        using_gpu=False,
        using_mlops=False,
        enable_wandb=False,
        enable_craft=True,
        craft_aggregator=rule,
        craft_state_path=str(folder / "state.safetensors"),
        **more,
    )


def _upload(reply: ClientUpdate) -> tuple[int, OrderedDict[str, Any]]:
    return int(reply.num_examples), OrderedDict(reply.values)


def _drawing(replies: Sequence[ClientUpdate]) -> Any:
    """While FedML draws a round's clients from numpy, it draws these."""
    clients = [int(reply.client_id) for reply in replies]
    return mock.patch("numpy.random.choice", return_value=clients)


class CrossSiloHarness(Harness):
    """Cross-silo, horizontal."""

    host_modules: ClassVar[tuple[str, ...]] = ("fedml",)
    expected_failures: ClassVar[Mapping[str, str]] = {
        "changing-number": _WAITS,
        "no-replies": _WAITS,
    }

    def start(self, rule: str, model: nn.Module, folder: Path) -> _CrossSiloServer:
        """A server with FedML's default ServerAggregator."""
        install()
        args = _config(
            rule,
            folder,
            training_type="cross_silo",
            scenario="horizontal",
            backend="GRPC",
            round_idx=0,
        )
        return _CrossSiloServer(model, args)


class _CrossSiloServer:
    def __init__(self, model: nn.Module, args: SimpleNamespace) -> None:
        from fedml.cross_silo.server.fedml_aggregator import FedMLAggregator
        from fedml.ml.aggregator.aggregator_creator import create_server_aggregator

        user = create_server_aggregator(model, args)
        workers = args.client_num_per_round
        self.server = FedMLAggregator([], [], 0, {}, {}, {}, workers, _CPU, args, user)
        self.args = args

    def round(self, replies: Sequence[ClientUpdate]) -> Mapping[str, Any]:
        """As ``FedMLServerManager`` does it when all models are there."""
        if len(replies) != self.args.client_num_per_round:
            raise RuntimeError(f"{len(replies)} models: {_WAITS}")
        with _drawing(replies):
            self.server.data_silo_selection(
                self.args.round_idx, self.args.client_num_in_total, len(replies)
            )
        for worker, reply in enumerate(replies):
            count, values = _upload(reply)
            self.server.add_local_trained_result(worker, values, count)
        new_model: Mapping[str, Any]
        try:
            new_model, _, _ = self.server.aggregate()
        finally:
            self.args.round_idx += 1
        return new_model


class SpHarness(Harness):
    """The single-process simulator."""

    host_modules: ClassVar[tuple[str, ...]] = ("fedml",)

    def start(self, rule: str, model: nn.Module, folder: Path) -> _SpServer:
        """A simulator without data."""
        install()
        args = _config(rule, folder, training_type="simulation", backend="sp", comm_round=1)
        return _SpServer(model, args)


class _SpServer:
    def __init__(self, model: nn.Module, args: SimpleNamespace) -> None:
        from fedml.simulation.sp.fedavg.fedavg_api import FedAvgAPI

        nothing: dict[int, list[Any]] = {client: [] for client in range(Harness.clients)}
        counts = dict.fromkeys(nothing, 0)
        dataset = [0, 0, [], [], counts, nothing, nothing, 2]
        self.simulator = FedAvgAPI(args, _CPU, dataset, model)
        self.simulator._local_test_on_all_clients = lambda round_idx: None  # there is no data
        self.args = args

    def round(self, replies: Sequence[ClientUpdate]) -> Mapping[str, Any]:
        """A run of one round."""
        from fedml.core.mlops import MLOpsStore

        self.simulator.client_list = [_Client(reply) for reply in replies]
        self.args.client_num_per_round = len(replies)
        # fedml.init leaves the config there; without it FedML goes and asks the vendor's server.
        with _drawing(replies), mock.patch.object(MLOpsStore, "mlops_args", self.args):
            self.simulator.train()
        new_model: Mapping[str, Any] = self.simulator.model_trainer.get_model_params()
        return new_model


class _Client:
    """Stands for FedML's ``Client``: answers with a model that was recorded."""

    def __init__(self, reply: ClientUpdate) -> None:
        self._count, self._values = _upload(reply)

    def update_local_dataset(self, *data: Any) -> None:
        pass

    def get_sample_number(self) -> int:
        return self._count

    def train(self, w_global: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._values
