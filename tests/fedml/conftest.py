"""Starting the real FedML in processes of its own, on loopback."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SCRIPT = HERE / "user_script.py"
LIMIT = 180  # seconds that one run may take on a busy machine

BASE: dict[str, dict[str, Any]] = {
    "common_args": {"training_type": "simulation", "random_seed": 0, "using_mlops": False},
    "data_args": {
        "dataset": "digits",
        "data_cache_dir": "",
        "partition_method": "hetero",
        "partition_alpha": 0.3,
    },
    "model_args": {"model": "mlp"},
    "train_args": {
        "federated_optimizer": "FedAvg",
        "client_id_list": "[]",
        "client_num_in_total": 2,
        "client_num_per_round": 2,
        "comm_round": 3,
        "epochs": 1,
        "batch_size": 20,  # leaves no batch of one, which batch norm refuses
        "client_optimizer": "sgd",
        "learning_rate": 0.05,
        "weight_decay": 0.0,
    },
    "validation_args": {"frequency_of_the_test": 1},
    "device_args": {"using_gpu": False, "gpu_id": 0, "worker_num": 2},
    "comm_args": {"backend": "sp"},
    "tracking_args": {"enable_wandb": False},
}
CROSS_SILO = {"training_type": "cross_silo", "scenario": "horizontal"}
MPI_SIMULATION: dict[str, dict[str, Any]] = {
    "comm_args": {"backend": "MPI"},
    "device_args": {"gpu_mapping_key": "none", "gpu_mapping_file": "none"},  # asked for on CPUs too
}
CRAFT = {"enable_craft": True, "craft_server_lr": 0.1}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All but one file of this folder needs FedML; finding it imports nothing."""
    found = importlib.util.find_spec("fedml")
    missing = found is None or found.origin is None  # any folder of that name is a namespace
    for item in items:
        if HERE in Path(item.path).parents and item.path.name != "test_without_host.py":
            item.add_marker(pytest.mark.fedml)
            if missing:
                why = "FedML is not installed (extras fedml and test-fedml; Python 3.11 or earlier)"
                item.add_marker(pytest.mark.skip(reason=why))


class Federation:
    """A folder with a config, and the processes that run in it."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        self.witness = folder / "witness"
        self.witness.mkdir()
        self.config = copy.deepcopy(BASE)
        self.config["craft_args"] = dict(CRAFT)
        # FedML writes to ~/.fedml, and reads settings from there that go over the environment.
        self.environment: dict[str, str] = {"OMP_NUM_THREADS": "1", "HOME": str(home)}
        self._running: list[subprocess.Popen[bytes]] = []

    def write(self, **sections: Mapping[str, Any]) -> Path:
        """The config with some sections changed, as YAML (JSON is YAML)."""
        for section, values in sections.items():
            self.config[section].update(values)
        path = self.folder / "config.yaml"
        path.write_text(json.dumps(self.config, indent=1))
        return path

    def start(self, *command: str, name: str = "run") -> subprocess.Popen[bytes]:
        """A process of its own group; its output goes to NAME.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._running.append(process)
        return process

    def script(self, *extra: str) -> list[str]:
        """The user's script by ``craft-adapters fedml``'s code, with witnesses."""
        words = [sys.executable, "-m", "craft_adapters.fedml", str(SCRIPT)]
        return [*words, "--witness", str(self.witness), "--cf", "config.yaml", *extra]

    def run(self, *command: str, name: str = "run") -> int:
        """Start and wait; a run that hangs is killed and fails the test."""
        process = self.start(*command, name=name)
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{command} hung; its log ends with\n{self.log(name)[-3000:]}")

    def run_grpc(self, *extra: str) -> list[int]:
        """A server and two clients; their exit codes."""
        ports = free_ports(3)
        lines = ["eid,rank,grpc_server_ip,grpc_server_port"]
        lines += [f"{rank},{rank},127.0.0.1,{port}" for rank, port in enumerate(ports)]
        (self.folder / "ipconfig.csv").write_text("\n".join(lines) + "\n")
        self.write(comm_args={"backend": "GRPC", "grpc_ipconfig_path": "ipconfig.csv"})
        names = ["server", "client1", "client2"]
        processes = []
        for rank, name in enumerate(names):
            role = "server" if rank == 0 else "client"
            who = ("--rank", str(rank), "--role", role, "--run_id", "r1")
            processes.append(self.start(*self.script(*extra, *who), name=name))
            if rank == 0:  # FedML's clients do not try again
                wait_for_port(ports[0], processes[0])
        deadline = time.monotonic() + LIMIT
        try:
            return [process.wait(deadline - time.monotonic()) for process in processes]
        except subprocess.TimeoutExpired:
            logs = "\n".join(f"{name}: {self.log(name)[-1500:]}" for name in names)
            pytest.fail(f"a process hung; the logs end with\n{logs}")

    def log(self, name: str = "run") -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What the witnesses of all processes noted, in the order of each process."""
        lines = [
            json.loads(line)
            for path in sorted(self.witness.glob("*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        return [event for event in lines if event["event"] == kind]

    def stop(self) -> None:
        for process in self._running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def federation(tmp_path: Path, home: Path) -> Iterator[Federation]:
    made = Federation(tmp_path, home)
    yield made
    made.stop()


@pytest.fixture
def mpiexec() -> Callable[[int], list[str]]:
    """The launch line for n processes: mpiexec of the openmpi package, no system package."""

    def launch(processes: int) -> list[str]:
        program = str(Path(sys.executable).parent / "mpiexec")
        return [program, "--allow-run-as-root", "--oversubscribe", "-n", str(processes)]

    return launch


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until something listens there, or the process that should is gone."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Consecutive ports on loopback that are free now; others for test processes side by side."""
    for base in range(20000 + 100 * os.getpid() % 10000, 60000, 10):
        try:
            for port in range(base, base + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return list(range(base, base + count))
    raise RuntimeError("no free ports on loopback")
