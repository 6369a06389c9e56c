"""``craft-adapters run`` and ``craft-adapters report``, and the configs of the examples."""

from __future__ import annotations

import csv
import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from craft_adapters import available_aggregators
from craft_adapters.cli import main
from craft_adapters.simulation import Run, collect, read_config, read_lines
from craft_adapters.simulation._sweep import read_sweep

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(ROOT.glob("examples/federation/*.yaml"))
PAPER = sorted(ROOT.glob("examples/federation/paper/*.yaml"))
SWEEPS = sorted(ROOT.glob("examples/federation/sweeps/[dm]*.yaml"))
IMAGES = sorted(ROOT.glob("examples/federation/sweeps/cifar*.yaml"))
SMALL = """
rounds: 2
clients_per_round: 5
evaluate_every: 1
partition: {name: iid, clients: 20}
model: {name: mlp, hidden: [8]}
training: {engine: loop}
aggregator: {name: craft, server_lr: 0.1}
"""


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def test_a_run_is_plain_where_there_is_no_terminal(config: Path, tmp_path: Path) -> None:
    done = call("run", config, "--set", "rounds=3", "--set", "aggregator=fedavg")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert [line.split(":")[1] for line in lines[:-1]] == [f" round {n}/3" for n in range(4)]
    assert lines[0].startswith("fedavg: round 0/3: global 0.")
    assert "\x1b" not in done.output
    assert lines[-1] == f"written: {Path('runs', 'small')}"
    saved = json.loads((tmp_path / "runs" / "small" / "config.json").read_text())
    assert saved["aggregator"]["name"] == "fedavg"
    again = call("run", config, "--set", "rounds=3", "--set", "aggregator=fedavg")
    assert again.output.splitlines() == lines[-1:], "it was done"


def test_a_quiet_run_says_nothing(config: Path, tmp_path: Path) -> None:
    done = call("run", config, "--quiet", "--out", tmp_path / "here")
    assert (done.exit_code, done.output) == (0, "")
    assert len(list(read_lines(tmp_path / "here" / "rounds.jsonl"))) == 2


def test_a_terminal_gets_a_bar(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    done = call("run", config, "--set", "method=ditto")
    assert done.exit_code == 0, done.output
    assert "ditto+craft" in done.output
    assert "2/2" in done.output
    assert "personal 0." in done.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--set", "training.lr=fast"], "training.lr must be a finite number, got 'fast'"),
        (["--set", "round=1"], "no key 'round'; did you mean 'rounds'?"),
        (["--set", "partition.clients=4000"], "4000 clients cannot share 1797 examples"),
        (["--set", "data.name=npz", "--set", "data.path=no.npz"], "no.npz does not exist"),
    ],
)
def test_errors_are_one_line(args: list[str], message: str, config: Path) -> None:
    done = call("run", config, *args)
    assert done.exit_code == 1
    assert message in done.output
    assert len(done.output.splitlines()) == 1
    assert not Path("runs").exists(), "nothing is begun"


def test_a_missing_package_is_named(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    done = call("run", config)
    assert done.exit_code == 1
    assert "craft-adapters[run]" in done.output


def test_an_interrupted_run_says_how_to_go_on(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Run, sink: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_step", interrupted)
        done = call("run", config)
    assert done.exit_code == 1
    assert "stopped after round 0; the same command goes on" in done.output
    assert call("run", config).exit_code == 0


def run(folder: Path, *overrides: str) -> Path:
    base = {
        "rounds": 2,
        "clients_per_round": 5,
        "evaluate_every": 1,
        "partition": {"name": "iid", "clients": 20},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"engine": "loop"},
    }
    list(Run(read_config(base, overrides), str(folder)))
    return folder


def test_seeds_are_put_together_and_labels_tell_apart(tmp_path: Path) -> None:
    for seed in (0, 1):
        run(tmp_path / f"a{seed}", f"seed={seed}")
    run(tmp_path / "b", "training.lr=0.3")
    run(tmp_path / "c", "aggregator=craft", "method=ditto")
    series = {s.label: s for s in collect([tmp_path])}
    assert list(series) == [
        "fedavg (lr 0.1)",
        "fedavg (lr 0.3)",
        "ditto+craft, global",
        "ditto+craft, personal",
    ]
    both = series["fedavg (lr 0.1)"]
    ends = [list(read_lines(tmp_path / f"a{seed}" / "metrics.jsonl"))[-1] for seed in (0, 1)]
    assert both.last("mean") == pytest.approx((ends[0]["mean"] + ends[1]["mean"]) / 2)
    assert both.spread("mean") == pytest.approx(abs(ends[0]["mean"] - ends[1]["mean"]) / 2**0.5)
    rounds, means, (low, high) = both.curve("worst10")
    assert rounds == [0, 1, 2]
    assert all(a <= m <= b for a, m, b in zip(low, means, high, strict=True))
    assert len(both.clients()) == 40
    assert list(both.conflicts()) == ["hidden.0", "head"]


def test_a_value_that_is_said_or_left_to_the_rule_is_one_series(tmp_path: Path) -> None:
    for seed, rate in enumerate(("0.1", "null", "null")):
        run(
            tmp_path / str(seed), "aggregator=craft", f"aggregator.server_lr={rate}", f"seed={seed}"
        )
    file = tmp_path / "2" / "config.json"
    saved = json.loads(file.read_text())
    saved["aggregator"]["server_lr"] = None  # as it was written before
    file.write_text(json.dumps(saved))
    assert [(s.label, len(s.runs)) for s in collect([tmp_path])] == [("craft", 3)]


def test_a_report_in_every_form(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for seed in (0, 1):
        run(runs / f"fedavg-{seed}", f"seed={seed}")
    for rate in ("0.1", "0.3"):
        run(runs / f"craft-{rate}", "aggregator=craft", f"aggregator.server_lr={rate}")
    out = tmp_path / "out"
    forms = ("--csv", out / "r.csv", "--markdown", out / "r.md", "--pictures", out, "--format")
    done = call("report", runs, *forms, "svg")
    assert done.exit_code == 0, done.output
    head, *lines = done.output.splitlines()
    assert head.split()[:4] == ["run", "model", "seeds", "round"]
    assert lines[0].startswith("craft (server_lr 0.1) ")
    assert " ± " in lines[2], "two seeds"
    with (out / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows][2] == "fedavg"
    assert float(rows[2]["mean"]) > 0
    assert rows[0]["mean_over_seeds"] == "", "a missing figure is an empty field"
    assert (out / "r.md").read_text().splitlines()[1] == f"| --- |{' ---: |' * 9}"
    pictures = sorted(path.name for path in out.glob("*.svg"))
    assert pictures == [
        f"{name}.svg"
        for name in ("accuracy", "clients", "conflicts", "grid-shared-craft-global", "radar", "std")
    ]


def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    done = call("report", tmp_path, "--pictures", tmp_path, "--format", "bmp")
    assert done.exit_code == 2
    assert "'bmp' is not one of 'png', 'pdf', 'svg'" in done.output


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_the_help_says_that_any_stop_will_do(command: str) -> None:
    text = " ".join(call(command, "--help").output.split())
    assert "that was stopped, in whatever way, goes on" in text
    assert ("Its keys: docs/federation.md." in text) == (command == "run")


def test_many_rules_are_drawn_in_panels_of_their_own(tmp_path: Path) -> None:
    for number in range(9):
        run(tmp_path / "runs" / str(number), f"training.lr={0.1 + number / 100}", "rounds=1")
    done = call("report", tmp_path / "runs", "--pictures", tmp_path, "--format", "svg")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "accuracy.svg").read_text()
    assert "<!-- fedavg (lr 0.18) -->" in text
    assert text.count("<!-- the rule -->") == 1, "once, in the legend"


def test_a_run_that_diverges_says_so(config: Path) -> None:
    with pytest.warns(RuntimeWarning, match="the global model stays as it is"):
        done = call("run", config, "--set", "training.lr=1e38", "--set", "training.epochs=2")
    assert done.exit_code == 1
    assert "Error: diverged: round 1: no client's training stayed finite; " in done.output


def test_a_report_while_the_run_goes_on(tmp_path: Path) -> None:
    iterator = iter(Run(read_config({"partition": "iid"}, ["rounds=3"]), str(tmp_path)))
    next(iterator)
    done = call("report", tmp_path)
    assert done.exit_code == 0
    assert done.output.splitlines()[1].split()[:4] == ["fedavg", "global", "1", "0"]


def test_a_report_of_nothing(tmp_path: Path) -> None:
    done = call("report", tmp_path)
    assert done.exit_code == 1
    assert "no run is here" in done.output


def test_the_examples_are_all_here() -> None:
    assert [path.stem for path in EXAMPLES] == ["craft", "ditto", "ditto_craft", "fedavg"]
    data = {"cifar10": ("cnn", "resnet20", "resnet56", "resnet110"), "femnist": ("mlp",)}
    data["cifar100"] = data["cifar10"][1:]
    wanted = {f"{name}_{model}" for name, models in data.items() for model in models}
    assert {path.stem for path in PAPER} == wanted
    assert [path.stem for path in SWEEPS] == [
        f"{data}_{world}" for data in ("digits", "mnist") for world in ("few", "many")
    ]


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_a_config_of_the_paper_has_its_size(path: Path) -> None:
    config = read_config(path)
    data, _, model = path.stem.partition("_")
    assert (config.names["data"], config.names["model"]) == (data, model)
    assert config.sections["partition"]["clients"] == 1000
    assert (config.general.rounds, config.general.clients_per_round) == (500, 100)
    training = config.training
    assert (training.epochs, training.batch_size, training.decay) == (1, 20, 0.999)
    assert training.augment == ("crop_flip" if data == "cifar10" else "none")
    other = read_config(path, ["aggregator=fedavg"])
    assert other.names["aggregator"] == "fedavg"


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_sweep_has_every_bundled_rule_and_not_too_many_runs(path: Path) -> None:
    sweep = read_sweep(path)
    bundled = entry_points(group="craft_adapters")
    rules = {e.name for e in bundled if e.value.startswith("craft_adapters.aggregators.")}
    assert {point.config.names["aggregator"] for point in sweep.points} == rules
    assert rules <= set(available_aggregators())
    assert len(sweep.first()) + len(sweep.rules) * (len(sweep.seeds) - 1) <= 140


def test_the_sweep_of_steps_has_the_rates_that_it_is_about() -> None:
    points = read_sweep(ROOT / "examples/federation/sweeps/steps.yaml").points
    balanced = [point.config for point in points if point.config.names["aggregator"] != "fedavg"]
    rates = [(c.training.lr, c.sections["aggregator"]["server_lr"]) for c in balanced]
    assert rates == [(lr, step) for lr in (0.03, 0.1) for step in (1, 1.5, 2, 3)]


def test_what_is_run_long_on_images_was_in_the_grid() -> None:
    long, grid = (
        [
            (c.names, c.sections["aggregator"], c.sections["method"], c.training.lr)
            for c in (point.config for point in read_sweep(path).points)
        ]
        for path in IMAGES
    )
    assert len(long) >= 4
    assert all(point in grid for point in long)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_learns(path: Path, tmp_path: Path) -> None:
    done = call("run", path, "--out", tmp_path / "run", "--quiet")
    assert done.exit_code == 0, done.output
    records = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert records[-1]["round"] == 100
    assert records[-1]["mean"] > 0.6
