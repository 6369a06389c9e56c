"""Drives Flower's strategies as Flower does, on replies without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import nn

from craft_adapters import ClientUpdate
from craft_adapters.testing import Harness

__all__ = ["FlowerHarness", "LegacyHarness"]

_BFLOAT16 = "Flower's arrays are numpy's, and numpy has no bfloat16"


class FlowerHarness(Harness):
    """The current API: FedAvg, wrapped."""

    host_modules: ClassVar[tuple[str, ...]] = ("flwr",)
    expected_failures: ClassVar[Mapping[str, str]] = {"bfloat16": _BFLOAT16}

    def start(self, rule: str, model: nn.Module, folder: Path) -> _Server:
        """A strategy."""
        from flwr.serverapp.strategy import FedAvg

        return _Server(_wrapped(FedAvg(fraction_evaluate=0.0), rule, folder), model)


class LegacyHarness(Harness):
    """The legacy API: its FedAvg, wrapped."""

    host_modules: ClassVar[tuple[str, ...]] = ("flwr",)
    expected_failures: ClassVar[Mapping[str, str]] = {
        "bfloat16": _BFLOAT16,
        "extra-entry": "a list of arrays has no name for what is too much",
    }

    def start(self, rule: str, model: nn.Module, folder: Path) -> _LegacyServer:
        """A strategy."""
        from flwr.server.strategy import FedAvg

        strategy = FedAvg(fraction_evaluate=0.0)
        return _LegacyServer(_wrapped(strategy, rule, folder, names=model.state_dict()), model)


class _Server:
    def __init__(self, strategy: Any, model: nn.Module) -> None:
        from flwr.app import ArrayRecord

        self.strategy = strategy
        self.arrays = ArrayRecord(torch_state_dict=dict(model.state_dict()))
        self.number = 0

    def round(self, replies: Sequence[ClientUpdate]) -> Mapping[str, Any]:
        """The training half of a round of ``Strategy.start``."""
        from flwr.app import ConfigRecord
        from flwr.serverapp.strategy import FedAvg

        self.number += 1
        # Messages can be made inside a run only; the strategy is told of the model all the same.
        with mock.patch.object(FedAvg, "configure_train", return_value=[]):
            self.strategy.configure_train(self.number, self.arrays, ConfigRecord(), mock.Mock())
        arrays, _ = self.strategy.aggregate_train(self.number, [_message(r) for r in replies])
        if arrays is not None:
            self.arrays = arrays
        new_model: Mapping[str, Any] = self.arrays.to_torch_state_dict()
        return new_model


class _LegacyServer:
    def __init__(self, strategy: Any, model: nn.Module) -> None:
        self.strategy = strategy
        self.names = list(model.state_dict())
        self.parameters = _parameters(model.state_dict())
        self.number = 0

    def round(self, replies: Sequence[ClientUpdate]) -> Mapping[str, Any]:
        """The server's half of ``Server.fit_round``."""
        from flwr.common import Code, FitRes, Status, parameters_to_ndarrays

        self.number += 1
        clients = [mock.Mock(cid=str(reply.client_id)) for reply in replies]
        manager = mock.Mock()
        manager.num_available.return_value = len(clients)
        manager.sample.return_value = clients
        self.strategy.configure_fit(self.number, self.parameters, manager)
        answers = [
            FitRes(
                Status(Code.OK, ""),
                _parameters(reply.values),
                int(reply.num_examples),
                _metrics(reply),
            )
            for reply in replies
        ]
        results = list(zip(clients, answers, strict=True))
        parameters, _ = self.strategy.aggregate_fit(self.number, results, [])
        if parameters is not None:
            self.parameters = parameters
        arrays = map(torch.from_numpy, parameters_to_ndarrays(self.parameters))
        return dict(zip(self.names, arrays, strict=True))


def _wrapped(strategy: Any, rule: str, folder: Path, **options: Any) -> Any:
    from ._front import wrap

    path = folder / "rule.safetensors"
    return wrap(strategy, rule, state_path=path, loss_key="loss", steps_key="steps", **options)


def _parameters(values: Mapping[str, Any]) -> Any:
    from flwr.common import ndarrays_to_parameters

    return ndarrays_to_parameters([value.cpu().numpy() for value in values.values()])


def _metrics(reply: ClientUpdate) -> dict[str, float]:
    return {"loss": reply.loss or 0.0, "steps": reply.local_steps or 0}


def _message(reply: ClientUpdate) -> Any:
    """As Flower's own tests make one."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    message = mock.Mock(spec=Message)
    message.has_error.return_value = False
    message.metadata = mock.Mock(src_node_id=int(reply.client_id))
    metrics = {"num-examples": int(reply.num_examples), **_metrics(reply)}
    message.content = RecordDict(
        {
            "arrays": ArrayRecord(torch_state_dict=dict(reply.values)),
            "metrics": MetricRecord(metrics),
        }
    )
    return message
