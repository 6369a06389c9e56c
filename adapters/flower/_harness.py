"""Drives a Flower strategy as ``Strategy.start`` does, on replies without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from torch import nn

from craft_adapters import ClientUpdate
from craft_adapters.testing import Harness

__all__ = ["FlowerHarness"]


class FlowerHarness(Harness):
    """FedAvg, wrapped."""

    host_modules: ClassVar[tuple[str, ...]] = ("flwr",)
    expected_failures: ClassVar[Mapping[str, str]] = {
        "bfloat16": "Flower's arrays are numpy's, and numpy has no bfloat16",
    }

    def start(self, rule: str, model: nn.Module, folder: Path) -> _Server:
        """A strategy."""
        from flwr.app import ArrayRecord
        from flwr.serverapp.strategy import FedAvg

        from ._strategy import wrap

        path = folder / "rule.safetensors"
        strategy = wrap(
            FedAvg(fraction_evaluate=0.0),
            rule,
            state_path=path,
            loss_key="loss",
            steps_key="steps",
        )
        return _Server(strategy, ArrayRecord(torch_state_dict=dict(model.state_dict())))


class _Server:
    def __init__(self, strategy: Any, arrays: Any) -> None:
        self.strategy, self.arrays = strategy, arrays
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


def _message(reply: ClientUpdate) -> Any:
    """As Flower's own tests make one."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    message = mock.Mock(spec=Message)
    message.has_error.return_value = False
    message.metadata = mock.Mock(src_node_id=int(reply.client_id))
    message.content = RecordDict(
        {
            "arrays": ArrayRecord(torch_state_dict=dict(reply.values)),
            "metrics": MetricRecord(
                {
                    "num-examples": int(reply.num_examples),
                    "loss": reply.loss or 0.0,
                    "steps": reply.local_steps or 0,
                }
            ),
        }
    )
    return message
