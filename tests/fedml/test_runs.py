"""Whole runs of real FedML: ways in, the switch, failures, restarts, telemetry."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .conftest import CROSS_SILO, HERE, LIMIT, MPI_SIMULATION, SCRIPT, Federation

EXAMPLES = HERE.parents[1] / "examples" / "fedml"


# --- The three ways in ---------------------------------------------------------------------------


def test_the_examples_run_in_all_three_ways(federation: Federation) -> None:
    """By the launcher, by one line, explicitly; the first two come to the same."""
    command = str(Path(sys.executable).parent / "craft-adapters")
    ways = {
        "command": [command, "fedml", "main.py"],
        "one line": [sys.executable, "one_line.py"],
        "explicit": [sys.executable, "explicit.py"],
    }
    reports: dict[str, list[dict[str, Any]]] = {}
    for way, words in ways.items():
        for old in federation.folder.glob("craft_*"):
            old.unlink()
        shutil.copytree(EXAMPLES, federation.folder, dirs_exist_ok=True)
        code = federation.run(*words, "--cf", "fedml_config.yaml", name=way)
        assert code == 0, federation.log(way)[-3000:]
        lines = (federation.folder / "craft_report.jsonl").read_text().splitlines()
        reports[way] = [{**json.loads(line), "seconds": 0} for line in lines]
        assert [report["round"] for report in reports[way]] == list(range(20))
        assert {report["rule"] for report in reports[way]} == {"craft_balanced"}
        assert all(len(report["clients"]) == 3 for report in reports[way])
    assert reports["command"] == reports["one line"] != reports["explicit"]


def test_a_script_without_the_adapter_is_left_alone(federation: Federation) -> None:
    """Also the launcher: arguments, folder and exit code are the script's own."""
    script = federation.folder / "inner" / "script.py"
    script.parent.mkdir()
    script.write_text("import sys\nprint(sys.argv, sys.path[0], __name__)\nsys.exit(7)\n")
    words = [sys.executable, "-m", "craft_adapters.fedml", str(script), "--help", "a b"]
    assert federation.run(*words) == 7
    expected = f"{[str(script), '--help', 'a b']} {script.parent} __main__"
    assert expected in federation.log()


# --- Without the switch --------------------------------------------------------------------------


def test_without_the_switch_the_bits_are_fedmls(federation: Federation) -> None:
    federation.write(
        train_args={"client_num_in_total": 5, "client_num_per_round": 3},
        craft_args={"enable_craft": False, "craft_server_lr": "not even a number"},
    )
    final = {}
    for name, launcher in {"alone": [], "installed": ["-m", "craft_adapters.fedml"]}.items():
        path = federation.folder / f"{name}.txt"
        words = [sys.executable, *launcher, str(SCRIPT), "--final", str(path)]
        assert federation.run(*words, "--cf", "config.yaml") == 0, federation.log()[-3000:]
        final[name] = path.read_text()
    assert final["alone"] == final["installed"]


# --- Failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["rule", "training"])
@pytest.mark.parametrize("platform", ["simulation", "cross_silo"])
def test_failing_process_ends_the_mpi_job(
    federation: Federation, mpiexec: Callable[[int], list[str]], platform: str, failing: str
) -> None:
    if platform == "simulation":
        federation.write(**MPI_SIMULATION)
    else:
        federation.write(common_args=CROSS_SILO, comm_args={"backend": "MPI"})
    federation.environment["CRAFT_TEST_FAIL"] = failing
    assert federation.run(*mpiexec(3), *federation.script()) != 0
    assert f"the {failing} fails on purpose" in federation.log()
    assert len(federation.events("train")) <= 2


def test_failing_rule_ends_the_grpc_job(federation: Federation) -> None:
    federation.write(common_args=CROSS_SILO)
    federation.environment["CRAFT_TEST_FAIL"] = "rule"
    server, *clients = federation.run_grpc()
    assert server != 0
    assert "the rule fails on purpose" in federation.log("server")
    assert clients == [0, 0]  # FedML's finish message does not say why


def test_refusal_on_one_rank_ends_the_mpi_job(
    federation: Federation, mpiexec: Callable[[int], list[str]]
) -> None:
    """Only the server's process knows that its aggregator has an aggregate of its own."""
    federation.write(common_args=CROSS_SILO, comm_args={"backend": "MPI"})
    assert federation.run(*mpiexec(3), *federation.script("--own-aggregate")) != 0
    assert "overrides aggregate()" in federation.log()
    assert federation.events("train") == []


def test_wrong_key_is_refused_on_all_ranks_before_anything(
    federation: Federation, mpiexec: Callable[[int], list[str]]
) -> None:
    federation.write(craft_args={"craft_sever_lr": 0.1}, **MPI_SIMULATION)
    assert federation.run(*mpiexec(3), *federation.script()) != 0
    assert "did you mean 'craft_server_lr'" in federation.log()
    assert federation.events("train") == []


# --- Restart -------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["sp", "cross_silo"])
def test_killed_server_goes_on_from_its_files(
    federation: Federation, mpiexec: Callable[[int], list[str]], platform: str
) -> None:
    federation.write(
        craft_args={
            "craft_state_path": "./state.safetensors",
            "craft_model_path": "./model.safetensors",
            "craft_report_path": "./report.jsonl",
        }
    )
    words = federation.script()
    if platform == "cross_silo":
        federation.write(common_args=CROSS_SILO, comm_args={"backend": "MPI"})
        words = [*mpiexec(3), *words]
    federation.environment["CRAFT_TEST_KILL"] = "1"
    assert federation.run(*words, name="killed") != 0
    (first,) = federation.events("aggregate")

    del federation.environment["CRAFT_TEST_KILL"]
    assert federation.run(*words, name="again") == 0, federation.log("again")[-3000:]
    rounds = [event for event in federation.events("aggregate") if event != first]
    assert [event["round"] for event in rounds] == [0, 1, 2]  # FedML counts from 0 again
    assert rounds[0]["given"] == first["returned"]
    assert "resumed from" in federation.log("again")
    lines = (federation.folder / "report.jsonl").read_text().splitlines()
    cosines = [
        [group["cosine_to_reference"] for group in json.loads(line)["groups"]] for line in lines
    ]
    assert len(lines) == 4
    assert set(cosines[0]) == {None}  # the very first round has no reference ...
    assert None not in cosines[1]  # ... the first one after the restart has


# --- Telemetry -----------------------------------------------------------------------------------


@contextmanager
def silent_endpoint() -> Iterator[tuple[int, list[object]]]:
    """A port on loopback that accepts and never answers, and who came."""
    visitors: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    visitors.append(listener.accept())
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1], visitors
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    for visit in visitors:
        visit[0].close()  # type: ignore[index]


@pytest.mark.parametrize("platform", ["simulation", "cross_silo"])
def test_init_does_not_wait_for_the_vendors_server(
    federation: Federation, home: Path, tmp_path: Path, platform: str
) -> None:
    federation.write(
        common_args={"training_type": platform, "scenario": "horizontal"},
        comm_args={"backend": "sp" if platform == "simulation" else "GRPC"},
    )
    own_home = tmp_path / "home"
    own_home.mkdir()
    with silent_endpoint() as (port, visitors):
        federation.environment |= {
            "HOME": str(own_home),
            "FEDML_ENV_VERSION": "local",
            "FEDML_ENV_LOCAL_ON_PREMISE_PLATFORM_HOST": "127.0.0.1",
            "FEDML_ENV_LOCAL_ON_PREMISE_PLATFORM_PORT": str(port),
        }
        words = federation.script("--init-only", "--role", "server")
        assert federation.run(*words) == 0, federation.log()[-3000:]
        assert visitors == []

        # And without the switch FedML does call there, and waits.
        federation.write(craft_args={"enable_craft": False})
        process = federation.start(*words, name="control")
        deadline = time.monotonic() + LIMIT
        while not visitors and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert visitors, federation.log("control")[-3000:]
        federation.stop()
