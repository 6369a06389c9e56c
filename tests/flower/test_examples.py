"""The apps of examples/flower: in this process, and one of them on Flower's own engine."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")

from flwr.app import ArrayRecord
from flwr.server import Server, SimpleClientManager
from flwr.server.client_proxy import ClientProxy

from craft_adapters import ClientUpdate, get_aggregator
from craft_adapters.flower import CraftStrategy

from .conftest import EXAMPLES, Clients

State = dict[str, torch.Tensor]
Example = Callable[[str], ModuleType]
NOBODY: Any = None


def test_the_app_learns(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    app = example("app")
    app.main(Clients(app.client_app, app.CLIENTS), NOBODY)
    found = [float(number) for number in re.findall(r"accuracy (\S+)", capsys.readouterr().out)]
    assert len(found) == app.ROUNDS
    assert found[-1] > 0.7 > 0.3 > untrained(example)


def untrained(example: Example) -> float:
    task = example("task")
    contexts = Clients(None, 3).contexts.values()
    model = task.new_model()
    return max(task.accuracy(model, task.own_examples(context)[1]) for context in contexts)


def test_the_wrapped_app_goes_on_after_a_stop(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = example("wrapped")

    def run(folder: str, *rounds: int) -> State:
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        for number in rounds:
            monkeypatch.setattr(app, "ROUNDS", number)
            app.main(Clients(app.client_app, app.CLIENTS), NOBODY)
        state: State = app.load_file(app.MODEL)
        return state

    straight, stopped, fewer = run("a", 3), run("b", 1, 2), run("c", 2)
    for name, value in straight.items():
        assert torch.equal(value, stopped[name])
    assert distance(straight, fewer) > 0.01


def distance(one: State, other: State) -> float:
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


class InProcess(ClientProxy):
    """A client of the legacy app."""

    def __init__(self, cid: str, client: Any) -> None:
        super().__init__(cid)
        self.client = client

    def fit(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        return self.client.fit(ins)

    def evaluate(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        return self.client.evaluate(ins)

    def get_parameters(self, ins: Any, timeout: Any, group_id: Any) -> Any:
        raise NotImplementedError

    get_properties = reconnect = get_parameters


def test_the_legacy_app_takes_the_rules_steps(example: Example) -> None:
    app, task = example("legacy"), example("task")
    contexts = Clients(None, app.CLIENTS).contexts
    manager = SimpleClientManager()
    for node, context in contexts.items():
        manager.register(InProcess(str(node), app.client_fn(context)))
    server = Server(client_manager=manager, strategy=app.server_fn(NOBODY).strategy)
    history, _ = server.fit(num_rounds=2, timeout=None)
    assert len(history.losses_distributed) == 2

    rule = get_aggregator("craft", server_lr=0.1)
    state: State = task.new_model().state_dict()
    for _round in range(2):
        updates = []
        for node, context in contexts.items():
            model = task.new_model()
            model.load_state_dict(state)
            examples, _ = task.own_examples(context)
            for batch in task.batches(examples):
                task.step(model, batch)
            updates.append(ClientUpdate(node, len(examples.labels), model.state_dict()))
        state = rule.aggregate(state, updates).state
    model = task.new_model()
    app.set_parameters(model, app_arrays(server))
    assert distance(state, model.state_dict()) < 1e-5


def app_arrays(server: Server) -> Any:
    from flwr.common import parameters_to_ndarrays

    return parameters_to_ndarrays(server.parameters)


# --- Ditto -----------------------------------------------------------------------------------


class Recording(Clients):
    """Notes down the shared model that goes out in each round; ``forgets``: drops all contexts."""

    def __init__(self, app: Any, forgets: bool = False) -> None:
        super().__init__(app, 3)
        self.received: list[State] = []
        self.forgets = forgets

    def send_and_receive(self, messages: Any, **options: Any) -> list[Any]:
        messages = list(messages)
        if messages and messages[0].metadata.message_type == "train":
            self.received.append(messages[0].content["arrays"].to_torch_state_dict())
            if self.forgets:
                for context in self.contexts.values():
                    context.state.clear()
        answers: list[Any] = super().send_and_receive(messages, **options)
        return answers

    def personal(self) -> list[State]:
        states = [context.state["personal"] for context in self.contexts.values()]
        return [dict(record.to_torch_state_dict()) for record in states]


def run(module: ModuleType, grid: Clients) -> State:
    """The app's shared model after three rounds."""
    strategy = CraftStrategy("craft", server_lr=0.1, fraction_evaluate=0.0, min_train_nodes=3)
    start = ArrayRecord(module.new_model().state_dict())
    return dict(strategy.start(grid, start, num_rounds=3).arrays.to_torch_state_dict())


def test_personal_models_persist_and_are_dittos(example: Example) -> None:
    ditto, task = example("ditto"), example("task")
    grid = Recording(ditto.client_app)
    run(ditto, grid)
    assert len(grid.received) == 3
    for context, personal in zip(grid.contexts.values(), grid.personal(), strict=True):
        expected = task.new_model()
        optimizer = torch.optim.SGD(expected.parameters(), lr=task.LEARNING_RATE)
        examples, _ = task.own_examples(context)
        for received in grid.received:
            for batch in task.batches(examples):
                away = [(v - received[n]).square().sum() for n, v in expected.named_parameters()]
                pull = ditto.LAMBDA / 2 * torch.stack(away).sum()
                loss = nn.functional.cross_entropy(expected(batch.images), batch.labels) + pull
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        assert distance(personal, expected.state_dict()) < 1e-4

    forgetful = Recording(ditto.client_app, forgets=True)
    run(ditto, forgetful)
    for one, other in zip(grid.personal(), forgetful.personal(), strict=True):
        assert distance(one, other) > 0.01


def test_no_personal_model_touches_the_shared_one(example: Example) -> None:
    app, ditto = example("app"), example("ditto")
    without, with_ditto = (
        run(app, Clients(app.client_app, 3)),
        run(ditto, Recording(ditto.client_app)),
    )
    assert all(torch.equal(value, with_ditto[name]) for name, value in without.items())


# --- On Flower's engine ----------------------------------------------------------------------

MARK = "CRAFT_TEST_RUN"
# typer, which flwr imports, uses what click deprecates.
_WARNINGS = ["error", "ignore:'click.utils:DeprecationWarning"]


def scores(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?:shared|personal) ([\d.]+)", text)]


@pytest.mark.slow
def test_ditto_on_ray(example: Example, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (extra flower-sim)")
    mark = str(uuid.uuid4())
    done = subprocess.run(
        [
            sys.executable,
            *(f"-W{each}" for each in _WARNINGS),
            str(EXAMPLES / "ditto.py"),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            MARK: mark,
            "FLWR_HOME": str(tmp_path / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # otherwise Ray warns
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert running_with(f"{MARK}={mark}") == []
    ditto = example("ditto")
    ditto.main(Clients(ditto.client_app, ditto.CLIENTS), NOBODY)
    here, there = scores(capsys.readouterr().out), scores(done.stdout)
    assert len(there) == 2 * ditto.ROUNDS
    # The order of the clients, and so the rounding, follows Flower's random node ids.
    assert there == pytest.approx(here, abs=0.02)


def running_with(mark: str) -> list[str]:
    """Command lines of processes that have this in their environment and do not end soon."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            if mark.encode() in environment and not ends(int(folder.name), within=30):
                found.append(command)
        except OSError:  # it has ended meanwhile
            continue
    return found


def ends(process: int, within: float) -> bool:
    descriptor = os.pidfd_open(process)
    try:
        return bool(select.select([descriptor], [], [], within)[0])
    finally:
        os.close(descriptor)
