"""FLUTE's seams in a host of our own, in this process or in several."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

HOST = Path(__file__).parent / "host"
SCRIPT = HOST / "e2e_trainer.py"
LIMIT = 120  # seconds that one run may take on a busy machine


def settings(**server: Any) -> dict[str, Any]:
    """A user's config."""
    return {
        "strategy": "CRAFT",
        "model_config": {},
        "client_config": {"type": "optimization"},
        "server_config": {
            "optimizer_config": {"type": "sgd", "lr": 1.0},
            "annealing_config": {"type": "step_lr", "step_size": 100, "gamma": 1.0},
            "max_iteration": 3,
            "num_clients_per_iteration": 4,
            "initial_lr_client": 0.1,
            "resume_from_checkpoint": False,
            **server,
        },
    }


class Folder:
    """A run's config and output."""

    def __init__(self, path: Path) -> None:
        self.models = path / "models"
        self._config = path / "config.yaml"
        self.arguments = ["-config", str(self._config), "-outputPath", str(path)]

    def write(self, config: Mapping[str, Any]) -> None:
        self._config.write_text(json.dumps(config))  # JSON is YAML

    def model(self, name: str) -> dict[str, torch.Tensor]:
        saved = torch.load(self.models / f"{name}_model.tar", weights_only=True)
        state: dict[str, torch.Tensor] = saved["model_state_dict"]
        return state

    def reports(self) -> list[dict[str, Any]]:
        lines = (self.models / "craft_report.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def processes(self, config: Mapping[str, Any], *script: str, count: int = 2) -> str:
        """Run the host's script in several processes; what the server printed."""
        self.write(config)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        common = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        running = [
            subprocess.Popen(
                [sys.executable, *script, *self.arguments],
                env={**os.environ, **common, "RANK": str(rank), "WORLD_SIZE": str(count)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(count)
        ]
        try:
            printed = [process.communicate(timeout=LIMIT)[0] for process in running]
        finally:
            for process in running:
                process.kill()
        assert [process.returncode for process in running] == [0] * count, "\n".join(printed)
        return printed[0]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host's modules can be imported, for one run of one process, and are gone afterwards."""
    monkeypatch.syspath_prepend(str(HOST))
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    forget()
    yield
    forget()


def forget() -> None:
    names = ("core", "utils", "e2e_trainer", "craft_adapters.flute.auto")
    for module in [*sys.modules]:
        if module in names or module.startswith("core."):
            del sys.modules[module]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the processes of a run have it: sums have the same order, and bits can be compared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
