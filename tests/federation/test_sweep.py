"""Sweeps: what is run, what is not run again, what goes wrong apart from the others."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from craft_adapters.cli import main
from craft_adapters.errors import OptionError
from craft_adapters.simulation import RunFolder
from craft_adapters.simulation._outcomes import best, compare, outcome
from craft_adapters.simulation._sweep import Sweep, read_sweep
from craft_adapters.simulation._workers import play

BASE = """
base:
  rounds: 4
  clients_per_round: 5
  evaluate_every: 2
  partition: {name: iid, clients: 20}
  model: {name: mlp, hidden: [8]}
  training: {engine: loop}
seeds: [0, 1]
"""
SMALL = (
    BASE
    + """
select: worst10
rules:
  FedAvg: {aggregator: fedavg, grid: {training.lr: [0.1, 0.3, 1e38]}}
  Ditto+CRAFT: {aggregator: craft, method: {name: ditto}, grid: {aggregator.server_lr: [0.1]}}
"""
)


def write(folder: Path, text: str) -> Path:
    path = folder / "small.yaml"
    path.write_text(text)
    return path


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def results(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def finish(sweep: Sweep, folder: Path, figures: dict[str, dict[str, float]]) -> None:
    """Folders as runs leave them, without running: name -> figures of the last evaluation."""
    for name, found in figures.items():
        files = RunFolder(folder / name)
        files.write("run.json", {"status": "finished"})
        files.write("checkpoint.json", {"round": 4})
        record = {"round": 4, "model": "global", **found}
        (files / "metrics.jsonl").write_text(json.dumps(record) + "\n")


# --- Reading ----------------------------------------------------------------------------------


def test_every_point_and_then_the_best_one_with_the_other_seeds(tmp_path: Path) -> None:
    sweep = read_sweep(write(tmp_path, SMALL))
    assert [run.folder for run in sweep.first()] == [
        "FedAvg_lr-0.1_seed-0",
        "FedAvg_lr-0.3_seed-0",
        "FedAvg_lr-1e38_seed-0",
        "Ditto+CRAFT_server-lr-0.1_seed-0",
    ]
    config = sweep.first()[1].config
    assert (config.training.lr, config.training.engine, config.general.seed) == (0.3, "loop", 0)
    everything = read_sweep(write(tmp_path, SMALL.replace("select: worst10", "")))
    assert len(everything.first()) == 8


def test_a_sweep_reads_back_from_its_folder(tmp_path: Path) -> None:
    sweep = read_sweep(write(tmp_path, SMALL))
    RunFolder(tmp_path).write("sweep.json", sweep.resolved())
    again = read_sweep(tmp_path / "sweep.json")
    assert again.resolved() == sweep.resolved()
    assert [r.folder for r in again.first()] == [r.folder for r in sweep.first()]


def test_base_and_rules_in_files_of_their_own_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("rounds: 7\naggregator: {name: craft, server_lr: 0.3}")
    (tmp_path / "rules.yaml").write_text("CRAFT: {}\nFedAvg: {aggregator: fedavg}")
    text = "base: base.yaml\nrules: rules.yaml"
    sweep = read_sweep(write(tmp_path, text), ["training.lr=0.5", "aggregator.server_lr=0.2"])
    craft, fedavg = (run.config for run in sweep.first())
    assert (craft.general.rounds, craft.training.lr) == (7, 0.5)
    assert craft.sections["aggregator"] == {"server_lr": 0.2}
    assert fedavg.sections["aggregator"] == {}, "another rule's options are not kept"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rule: {}", "no key 'rule'; did you mean 'rules'?"),
        (
            "rounds: 3",
            r"no key 'rounds'; this is the config of a run: craft-adapters run .*\.yaml$",
        ),
        ("rounds: 3\nrules: {A: {}}", "no key 'rounds'; known: base, rules, seeds, select"),
        ("rules: {}", "rules: there is none to run"),
        ("rules: [a]", r"rules: expected keys and values, got \['a'\]"),
        ("rules: {A: {}}\nselect: worst", "select: 'worst'; did you mean 'worst10'?"),
        ("rules: {A: {}}\nseeds: [1, 1]", "seeds must be different whole numbers"),
        ("rules: {A: {}}\nseeds: [-1]", "seeds must be different whole numbers"),
        ("rules: {A: {}}\nseeds: [x]", "seeds must be a whole number, got 'x'"),
        ("rules: {A: {grid: {training.lr: 0.1}}}", "A: grid: training.lr must be a list"),
        ("rules: {A: {grid: {training.lr: []}}}", "A: grid: training.lr must be a list"),
        ("rules: {A: {grid: {seed: [1]}}}", "seeds are given in the key seeds"),
        ("rules: {A: {grid: {training.lr: [0.1, fast]}}}", "A: training.lr must be a finite"),
        ("rules: {A: {grid: {trainin.lr: [1]}}}", "A: no key 'trainin'; did you mean 'training'"),
        ("rules: {A: {aggregator: crft}}", "A: aggregator: .* did you mean 'craft'"),
        ("rules: {A: {}, a: {}}", r"A \(\) and a \(\) would have the same folder, a_seed-0"),
        ("base: none.yaml\nrules: {A: {}}", "none.yaml: cannot be read"),
        ("base: {rouns: 1}\nrules: {A: {}}", "A: no key 'rouns'; did you mean 'rounds'"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        read_sweep(write(tmp_path, text))


@pytest.mark.parametrize("label", ["a/b:c*?", "CON", "rule.", " x "])
def test_folders_are_legal_on_windows(label: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(json.dumps({"rules": {label: {"grid": {"model.hidden": [[8, 8]]}}}}))
    (run,) = read_sweep(path).first()
    assert not set(run.folder) & set('<>:"/\\|?* ')
    assert run.folder.endswith("_hidden-8-8_seed-0"), "so it is no reserved name, and ends well"


# --- Choosing ---------------------------------------------------------------------------------


def test_the_best_point_has_the_highest_figure(tmp_path: Path) -> None:
    sweep = read_sweep(write(tmp_path, SMALL))
    fedavg = sweep.of("FedAvg")
    names = [run.folder for run in sweep.first()][:3]
    found = [{"worst10": w, "mean": m} for w, m in ((0.3, 0.8), (0.3, 0.9), (0.1, 0.99))]
    finish(sweep, tmp_path, dict(zip(names[:2], found[:2], strict=True)))
    assert best(sweep, "FedAvg", tmp_path) is None, "one is not over"
    assert best(sweep, "FedAvg", tmp_path, so_far=True) == fedavg[1]
    finish(sweep, tmp_path, dict(zip(names, found, strict=True)))
    assert best(sweep, "FedAvg", tmp_path) == fedavg[1], "of equals the one with the higher mean"
    RunFolder(tmp_path / names[1]).update("run.json", status="diverged")
    assert best(sweep, "FedAvg", tmp_path) == fedavg[0]
    for name in names:
        RunFolder(tmp_path / name).update("run.json", status="diverged")
    assert best(sweep, "FedAvg", tmp_path) is None


def test_without_select_the_mean_over_the_seeds_decides(tmp_path: Path) -> None:
    sweep = read_sweep(write(tmp_path, SMALL.replace("select: worst10", "")))
    means = {"0.1": (0.5, 0.9), "0.3": (0.6, 0.6), "1e38": (0.1, 0.1)}
    finish(
        sweep,
        tmp_path,
        {
            f"FedAvg_lr-{lr}_seed-{seed}": {"mean": mean}
            for lr, both in means.items()
            for seed, mean in enumerate(both)
        },
    )
    chosen = best(sweep, "FedAvg", tmp_path)
    assert chosen is not None
    assert chosen.label == "lr 0.1"


def test_more_rounds_are_not_finished(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    sweep, longer = read_sweep(path), read_sweep(path, ["rounds=9"])
    finish(sweep, tmp_path, {"FedAvg_lr-0.1_seed-0": {"mean": 0.5, "worst10": 0.1}})
    assert outcome(sweep.first()[0], tmp_path).status == "finished"
    assert outcome(longer.first()[0], tmp_path).status == "unfinished"


def test_data_are_looked_for_before_any_run(tmp_path: Path) -> None:
    here = tmp_path / "here.npz"
    np.savez(here, x=np.zeros((40, 4), dtype=np.uint8), y=np.arange(40) % 2)
    text = SMALL.replace("{training.lr: [", f"{{data.path: [{here}, no.npz], training.lr: [")
    path = write(tmp_path, text.replace("base:", "base:\n  data: {name: npz, path: " + f"{here}}}"))
    done = call("sweep", path, "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert done.output.startswith("Error: npz: ") and "no.npz does not exist" in done.output
    assert len(done.output.splitlines()) == 1
    assert not (tmp_path / "out").exists(), "nothing is begun"


def test_a_sweep_that_is_over_needs_no_data(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + "  data: {name: npz, path: no.npz}\nrules: {A: {}}")
    path.write_text(path.read_text().replace("seeds: [0, 1]\n", "", 1))
    best = {"mean": 0.5, "worst10": 0.4, "loss": 1.0}
    finish(read_sweep(path), tmp_path / "out", {"A_seed-0": best})
    done = call("sweep", path, "--out", tmp_path / "out")
    assert (done.exit_code, done.output.splitlines()[0]) == (0, "1 finished"), done.output


# --- Running ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_from_start_to_report(tmp_path: Path) -> None:
    text = SMALL + "  Wrong: {partition: {clients: 3000}}\n"
    out = tmp_path / "out"
    done = call("sweep", write(tmp_path, text), "--out", out, "--jobs", "2")
    assert done.exit_code == 1
    assert "Error: 1 of 7 runs failed (their error.txt says how):" in done.output
    assert "Wrong_seed-0: " in done.output
    assert "5 finished, 1 diverged, 1 failed" in done.output
    assert "\x1b" not in done.output
    rows = {row["folder"]: row for row in results(out)}
    (lr,) = {row["training.lr"] for row in rows.values() if row["chosen"] == "1"} - {""}
    assert {name: row["status"] for name, row in rows.items()} == {
        "FedAvg_lr-0.1_seed-0": "finished",
        "FedAvg_lr-0.3_seed-0": "finished",
        "FedAvg_lr-1e38_seed-0": "diverged",
        f"FedAvg_lr-{lr}_seed-1": "finished",
        "Ditto+CRAFT_server-lr-0.1_seed-0": "finished",
        "Ditto+CRAFT_server-lr-0.1_seed-1": "finished",
        "Wrong_seed-0": "failed",
    }
    assert rows["Ditto+CRAFT_server-lr-0.1_seed-0"]["model"] == "personal"
    assert "3000 clients cannot share" in rows["Wrong_seed-0"]["reason"]

    before = {path: path.stat().st_mtime_ns for path in out.rglob("checkpoint.json")}
    again = call("sweep", write(tmp_path, SMALL), "--out", out)
    assert again.exit_code == 0, again.output
    assert {path: path.stat().st_mtime_ns for path in before} == before, "not run again"

    shown = call("report", out, "--pictures", tmp_path / "pictures", "--csv", tmp_path / "r.csv")
    assert shown.exit_code == 0, shown.output
    head, fedavg, personal, other = shown.output.splitlines()[:4]
    assert head.split()[-4:] == ["best", "point", "points", "diverged"]
    assert fedavg.split()[:4] == ["FedAvg", "global", "2", "4"]
    assert fedavg.split()[-2:] == ["3", "1"]
    assert personal.split()[:2] == ["Ditto+CRAFT", "personal"], "what counts comes first"
    assert other.split()[:2] == ["Ditto+CRAFT", "global"]
    assert (tmp_path / "pictures" / "accuracy.png").is_file()
    with (tmp_path / "r.csv").open(newline="") as file:
        line = next(csv.DictReader(file))
    assert (line["points"], line["diverged"]) == ("3", "1")
    assert float(line["aggregate_seconds"]) > 0


@pytest.mark.slow
def test_a_terminal_gets_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    text = BASE + "rules: {'FedAvg [1]': {}}"
    done = call("sweep", write(tmp_path, text), "--out", tmp_path / "out", "--jobs", "1")
    assert done.exit_code == 0, done.output
    assert "FedAvg [1], seed 1: global 0." in done.output
    assert "2/2" in done.output


@contextmanager
def start(path: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    """A sweep that Ctrl-C stops, also where the tests themselves run in the background."""
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "from craft_adapters.cli import main; main()"
    command = [sys.executable, "-c", program, "sweep", str(path), "--out", str(out), "--jobs", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # its processes end with it


def begun(out: Path) -> list[Path]:
    return list(out.glob("*/checkpoint.json"))


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopped_it_ends_its_processes_and_goes_on(how: signal.Signals, tmp_path: Path) -> None:
    path, out = write(tmp_path, SMALL.replace("rounds: 4", "rounds: 100000")), tmp_path / "out"
    with start(path, out) as process:
        while len(begun(out)) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(how)
        output, _ = process.communicate(timeout=60)  # until its processes close the pipe, too
    if how == signal.SIGINT:
        assert "stopped; the same command goes on" in output
        assert {row["status"] for row in results(out)} == {"unfinished"}
    stopped = {file.parent.name: json.loads(file.read_bytes())["round"] for file in begun(out)}
    waiting = deque(r for r in read_sweep(path).first() if r.folder in stopped)
    events = play(waiting, out, jobs=2)
    first = {}
    for event in events:
        first.setdefault(event.run.folder, event.round)
        if len(first) == 2:
            break
    events.close()
    assert all(first[name] == round + 1 for name, round in stopped.items()), "from the checkpoint"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_run_whose_process_dies_fails_alone(tmp_path: Path) -> None:
    sweep = read_sweep(write(tmp_path, SMALL), ["rounds=3"])
    first, second = sweep.first()[:2]
    events = play(deque([first, second]), tmp_path, jobs=1)
    event = next(events)
    assert event.run == first
    os.kill(_only_child(), signal.SIGKILL)
    over = [event.run for event in events if event.over]
    assert over == [first, second]
    assert outcome(first, tmp_path).reason == "the process ended with exit code -9"
    assert outcome(second, tmp_path).status == "finished"


def _only_child() -> int:
    import multiprocessing

    (child,) = multiprocessing.active_children()
    assert child.pid is not None
    return child.pid


def test_a_folder_of_another_sweep_is_refused(tmp_path: Path) -> None:
    sweep = read_sweep(write(tmp_path, SMALL))
    run = sweep.first()[0]
    RunFolder(tmp_path / run.folder).write("config.json", run.config.resolved())
    path = write(tmp_path, SMALL.replace("hidden: [8]", "hidden: [9]"))
    done = call("sweep", path, "--out", tmp_path)
    assert done.exit_code == 1
    assert "holds a run of another configuration (model.hidden: ['8'] there" in done.output
    assert len(done.output.splitlines()) == 1
    assert not (tmp_path / "sweep.json").exists()


def test_a_report_of_a_sweep_of_which_nothing_has_finished(tmp_path: Path) -> None:
    RunFolder(tmp_path).write("sweep.json", read_sweep(write(tmp_path, SMALL)).resolved())
    (fedavg, ditto) = compare(tmp_path)
    assert (fedavg.best, fedavg.points, fedavg.series) == (None, 3, ())
    assert ditto.count == {"unfinished": 1}
    shown = call("report", tmp_path)
    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines()[1].split()[:4] == ["FedAvg", "-", "0", "-"]
    drawn: Any = call("report", tmp_path, "--pictures", tmp_path / "pictures")
    assert "nothing has finished yet" in drawn.output
