"""A run: its folder, and that it ends where it ends however often it is killed."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from craft_adapters import available_aggregators
from craft_adapters.aggregators import FedAvg
from craft_adapters.errors import CheckpointError, OptionError
from craft_adapters.simulation import Run, RunFolder, load_dataset, read_config, read_lines

BASE: dict[str, Any] = {
    "rounds": 4,
    "clients_per_round": 5,
    "evaluate_every": 2,
    "partition": {"clients": 20, "alpha": 0.3},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"engine": "loop", "lr": 0.05, "decay": 0.99},
    "aggregator": {"name": "craft", "server_lr": 0.1},
}
DITTO = {**BASE, "method": {"name": "ditto", "lam": 0.5}}


def play(config: dict[str, Any], folder: Path, *overrides: str, until: int | None = None) -> Run:
    run = Run(read_config(config, overrides), str(folder))
    for done in run:
        if done.round == until:
            break
    return run


def contents(folder: Path) -> dict[str, Any]:
    """Every file that a run leaves; of safetensors files what they hold, not in which order.

    Without the times, which no two runs have in common, and the length of their file.
    """

    def read(path: Path) -> Any:
        if path.name in ("rounds.jsonl", "checkpoint.json"):
            return re.sub(rb'"(aggregate_seconds|rounds.jsonl)": [0-9.e-]+', b"", path.read_bytes())
        if path.suffix != ".safetensors":
            return path.read_bytes()
        with safe_open(path, framework="np") as file:
            names = file.keys()
            return file.metadata(), {name: file.get_tensor(name).tobytes() for name in names}

    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): read(path) for path in files}


def test_what_a_run_leaves(tmp_path: Path) -> None:
    run = play(DITTO, tmp_path)
    assert run.round == 4
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "checkpoint.json",
        "clients",
        "config.json",
        "metrics.jsonl",
        "model-000004.safetensors",
        "partition.json",
        "rounds.jsonl",
        "rule-000004.safetensors",
        "run.json",
    ]
    assert not set('<>:"/\\|?*') & set("".join(contents(tmp_path)).replace("/", ""))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["training"]["batch_size"] == 20, "defaults are filled in"
    assert config["aggregator"]["server_lr"] == 0.1
    assert config["method"]["name"] == "ditto"
    environment = json.loads((tmp_path / "run.json").read_text())
    assert environment["torch"] == torch.__version__
    assert environment["clients"] == 20
    assert environment["status"] == "finished"
    metrics = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [(m["round"], m["model"]) for m in metrics] == [
        (round, model) for round in (0, 2, 4) for model in ("global", "personal")
    ]
    last = metrics[-2]
    assert set(last) >= {"mean", "std", "best10", "worst10", "loss", "mean_weighted"}
    assert len(last["client_accuracy"]) == len(last["client_loss"]) == 20
    rounds = list(read_lines(tmp_path / "rounds.jsonl"))
    assert [r["round"] for r in rounds] == [0, 1, 2, 3]
    assert all(len(r["clients"]) == 5 for r in rounds)
    assert set(rounds[-1]["groups"]) == {"hidden.0", "head"}
    assert all(r["aggregate_seconds"] > 0 for r in rounds)
    taken = {client for r in rounds for client in r["clients"]}
    assert len(list((tmp_path / "clients").iterdir())) == len(taken)


def test_metrics_are_those_of_the_model_that_is_saved(tmp_path: Path) -> None:
    run = play(BASE, tmp_path)
    record = list(read_lines(tmp_path / "metrics.jsonl"))[-1]
    scores = run.federation.evaluate(run.state)
    assert record["client_accuracy"] == {str(k): v for k, v in scores.accuracy.items()}
    assert record["mean"] > next(read_lines(tmp_path / "metrics.jsonl"))["mean"]


@pytest.mark.parametrize("config", [BASE, DITTO], ids=["shared", "ditto"])
@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_stopped_at_any_round_it_ends_the_same(
    config: dict[str, Any], stop: int, tmp_path: Path
) -> None:
    play(config, tmp_path / "whole")
    play(config, tmp_path / "parts", until=stop)
    play(config, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_dropout_batch_norm_and_augmentation_resume_too(tmp_path: Path) -> None:
    index = tmp_path / "index.json"
    index.write_text(json.dumps([list(range(12 * k, 12 * k + 12)) for k in range(6)]))
    config = {
        **DITTO,
        "rounds": 3,
        "training": {"augment": "crop_flip", "momentum": 0.5, "steps": 2},
        "model": {"name": "resnet20", "norm": "batch"},
        "partition": {"name": "file", "path": str(index)},
        "clients_per_round": 2,
        "evaluate_every": 3,
        "checkpoint_every": 2,
        "method": {"name": "ditto", "store": "disk"},
    }
    play(config, tmp_path / "whole")
    play(config, tmp_path / "parts", until=1)
    play(config, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def start(folder: Path, *when: str) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("killed.py")
    command = [sys.executable, str(script), str(folder), json.dumps(DITTO), *when]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_the_same(tmp_path: Path) -> None:
    """SIGKILL before and after writes of every kind, then one from outside; then to the end."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    play(DITTO, whole)
    for when in (("1", "after"), ("5", "before"), ("14", "after"), ("9", "before")):
        with start(killed, *when) as process:
            process.communicate(timeout=120)
        assert process.returncode == -9, "it was killed, it did not end"
    with start(killed) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    with start(killed) as process:
        process.communicate(timeout=120)
    assert process.returncode == 0
    left = {name: data for name, data in contents(killed).items() if not is_temporary(name)}
    assert left == contents(whole)


def is_temporary(name: str) -> bool:
    """A file that was being written when the process died; its name begins with a dot."""
    return Path(name).name.startswith(".")


@pytest.mark.parametrize("rule", ["fedavg", "craft", "config", "fedavgm", "afl", "fednova"])
def test_any_registered_rule_by_name(rule: str, tmp_path: Path) -> None:
    if rule not in available_aggregators():
        pytest.skip(f"rule {rule} is not registered")
    config = {**BASE, "rounds": 2, "aggregator": rule}
    if rule == "afl":  # weights all clients
        config["clients_per_round"] = 1.0
    run = play(config, tmp_path)
    assert all(torch.isfinite(value).all() for value in run.state.values())
    assert next(read_lines(tmp_path / "rounds.jsonl"))["rule"] == rule


def test_more_rounds_go_on(tmp_path: Path) -> None:
    play(BASE, tmp_path / "whole", "rounds=4")
    play(BASE, tmp_path / "longer", "rounds=2")
    play(BASE, tmp_path / "longer", "rounds=4")
    assert contents(tmp_path / "longer") == contents(tmp_path / "whole")


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    play(BASE, tmp_path, until=1)
    before = contents(tmp_path)
    with pytest.raises(OptionError, match=r"\(training\.lr: 0\.05 there, 0\.1 here\)"):
        play(BASE, tmp_path, "training.lr=0.1")
    assert contents(tmp_path) == before


def test_a_folder_that_leaves_open_what_the_rule_takes_is_gone_on_with(tmp_path: Path) -> None:
    """As config.json was written before: an option that is None is what the rule makes of it."""
    play(BASE, tmp_path, "aggregator.server_lr=null", until=1)
    saved = json.loads((tmp_path / "config.json").read_text())
    saved["aggregator"]["server_lr"] = None
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(OptionError, match=r"\(aggregator\.server_lr: 0\.1 there, 0\.3 here\)"):
        play(BASE, tmp_path, "aggregator.server_lr=0.3")
    assert play(BASE, tmp_path, "aggregator.server_lr=0.1").round == 4


def test_a_folder_of_a_rule_that_is_not_here_is_compared_as_it_is(tmp_path: Path) -> None:
    saved = read_config(BASE).resolved()
    saved["aggregator"] = {"name": "a_strangers", "server_lr": None}
    RunFolder(tmp_path).write("config.json", saved)
    with pytest.raises(OptionError, match=r"aggregator\.name: 'a_strangers' there, 'craft' here"):
        play(BASE, tmp_path)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    play(BASE, tmp_path, until=1)
    model = next(tmp_path.glob("model-*"))
    good = model.read_bytes()
    model.write_bytes(good[:-1])
    with pytest.raises(CheckpointError, match="model-000001"):
        play(BASE, tmp_path)
    model.write_bytes(good)
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: shorter than"):
        play(BASE, tmp_path)


def test_a_missing_personal_model_is_refused(tmp_path: Path) -> None:
    play(DITTO, tmp_path, until=1)
    next((tmp_path / "clients").iterdir()).unlink()
    with pytest.raises(CheckpointError, match="a client's model is missing"):
        play(DITTO, tmp_path)


def test_an_engine_once_chosen_is_kept(tmp_path: Path) -> None:
    run = play(BASE, tmp_path, "training.engine=auto", until=1)
    chosen = run.federation.engine
    assert RunFolder(tmp_path).read("checkpoint.json")["engine"] == chosen
    again = Run(read_config(BASE, ["training.engine=auto"]), str(tmp_path))
    assert again.federation.engine == chosen
    assert RunFolder(tmp_path).read("config.json")["training"]["engine"] == "auto"


def test_clients_that_never_answer(tmp_path: Path) -> None:
    play(BASE, tmp_path, "drop_rate=0.6")
    assert {len(r["clients"]) for r in read_lines(tmp_path / "rounds.jsonl")} == {2}


def status(folder: Path) -> tuple[str, str | None]:
    about = RunFolder(folder).read("run.json")
    return about["status"], about["diverged"]


def test_a_round_in_which_no_client_stays_finite_ends_the_run(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="round 0: .* the global model stays as it is"):
        run = play(BASE, tmp_path, "training.lr=1e38", "training.epochs=2")
    initial = run.config.model(load_dataset())
    assert all(torch.equal(run.state[n], v) for n, v in initial.state_dict().items())
    assert next(read_lines(tmp_path / "rounds.jsonl")).keys() == {"round", "clients"}
    assert run.diverged == "round 1: no client's training stayed finite"
    assert status(tmp_path) == ("diverged", run.diverged)


def test_a_model_that_is_not_finite_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aggregate = FedAvg.aggregate

    def overflow(self: FedAvg, *args: Any, round: int) -> Any:
        result = aggregate(self, *args, round=round)
        if round == 2:
            result.state["head.bias"][0] = math.inf
        return result

    monkeypatch.setattr(FedAvg, "aggregate", overflow)
    run = play(BASE, tmp_path, "aggregator.name=fedavg")
    assert run.diverged == "round 3: entry 'head.bias' of the global model is not finite"
    assert [r["round"] for r in read_lines(tmp_path / "metrics.jsonl")] == [0, 2]
    before = contents(tmp_path)
    again = play(BASE, tmp_path, "aggregator.name=fedavg")
    assert again.diverged == run.diverged, "started again, it diverges at the same place"
    assert contents(tmp_path) == before
    monkeypatch.undo()
    mended = play(BASE, tmp_path, "aggregator.name=fedavg")
    assert (mended.round, status(tmp_path)) == (4, ("finished", None))


def test_a_loss_that_is_finite_nowhere_ends_the_run(tmp_path: Path) -> None:
    run = play(DITTO, tmp_path, "training.epochs=40", "method.lam=1e4", "clients_per_round=1.0")
    assert run.diverged == "round 2: no client's loss of the personal model is finite"


def test_more_rounds_after_the_end(tmp_path: Path) -> None:
    play(BASE, tmp_path, "rounds=2")
    play(BASE, tmp_path, "rounds=4", until=3)
    assert status(tmp_path) == ("running", None)


def test_sinks_get_each_record(tmp_path: Path) -> None:
    class Memory(list[Any]):
        def write(self, record: Any) -> None:
            self.append(record)

    memory = Memory()
    list(Run(read_config(BASE), str(tmp_path), sinks=[memory]))
    written = [*read_lines(tmp_path / "metrics.jsonl"), *read_lines(tmp_path / "rounds.jsonl")]
    assert len(memory) == len(written) == 7


def test_lines_that_are_being_written_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"round": 0}\n{"rou')
    assert list(read_lines(path)) == [{"round": 0}]
    assert list(read_lines(tmp_path / "none.jsonl")) == []
