"""How the conformance kit drives Ditto: recorded answers in the place of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from torch import nn

from craft_adapters import ClientUpdate
from craft_adapters.simulation import Job, LocalTraining, Trained
from craft_adapters.testing import Harness

from ._ditto import Ditto

__all__ = ["DittoHarness"]


class _Recorded:
    """In the place of a Federation: clients answer with what they are given."""

    training = LocalTraining()

    def __init__(self, replies: Sequence[ClientUpdate]) -> None:
        self.replies = {int(reply.client_id): reply for reply in replies}
        self.split = SimpleNamespace(train={client: np.arange(8) for client in self.replies})

    def num_examples(self, client: int) -> int:
        return int(self.replies[client].num_examples)

    def losses(self, models: Callable[[int], Any], clients: Sequence[int]) -> dict[int, float]:
        return {client: self.replies[client].loss or 0.0 for client in clients}

    def train(self, jobs: Sequence[Job], *, training: Any = None, **_: Any) -> list[Trained]:
        shared = training is None  # Ditto gives the personal models' settings
        return [
            Trained(
                client=job.client,
                state=dict(self.replies[job.client].values if shared else job.start),
                steps=self.replies[job.client].local_steps or 0,
                examples=self.num_examples(job.client),
            )
            for job in jobs
        ]


class DittoHarness(Harness):
    """Ditto's rounds, without training."""

    host_modules: ClassVar[tuple[str, ...]] = ("craft_adapters.simulation",)
    expected_failures: ClassVar[Mapping[str, str]] = {
        "extra-entry": "a client sends the entries of the global model, picked by their names",
    }

    def start(self, rule: str, model: nn.Module, folder: Path) -> _DittoServer:
        return _DittoServer(Ditto(rule), model.state_dict())


class _DittoServer:
    def __init__(self, method: Ditto, state: Mapping[str, Any]) -> None:
        self.method, self.state, self.number = method, state, 0

    def round(self, replies: Sequence[ClientUpdate]) -> Mapping[str, Any]:
        clients = [int(reply.client_id) for reply in replies]
        federation: Any = _Recorded(replies)
        result = self.method.round(federation, self.state, clients, self.number)
        self.number += 1
        if result is not None:
            self.state = result.state
        return self.state
