"""Lets the conformance kit drive tinyfl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import nn

from craft_adapters import ClientUpdate
from craft_adapters.testing import Harness
from craft_adapters_tinyfl.adapter import new_strategy


class TinyHarness(Harness):
    expected_failures: ClassVar[dict[str, str]] = {
        "bfloat16": "tinyfl carries numpy arrays, and numpy has no bfloat16",
    }

    def start(self, rule: str, model: nn.Module, folder: Path) -> TinyServer:
        import tinyfl

        arrays = {name: value.numpy().copy() for name, value in model.state_dict().items()}
        strategy = new_strategy(rule, state_path=folder / "rule.safetensors")
        return TinyServer(tinyfl.Server(arrays, strategy))


class TinyServer:
    def __init__(self, server: Any) -> None:
        self.server = server

    def round(self, replies: Sequence[ClientUpdate]) -> Mapping[str, Any]:
        import tinyfl

        model: Mapping[str, Any] = self.server.run_round(
            tinyfl.Update(f"site-{reply.client_id}", int(reply.num_examples), self._change(reply))
            for reply in replies
        )
        return model

    def _change(self, reply: ClientUpdate) -> dict[str, np.ndarray]:
        """What a client of tinyfl would send: trained minus global."""
        changes = {}
        for name, value in reply.values.items():
            trained, start = value.numpy(), self.server.model.get(name)
            if trained.dtype != bool:
                fits = start is not None and start.shape == trained.shape
                changes[name] = np.asarray(trained - start) if fits else trained.copy()
        return changes
