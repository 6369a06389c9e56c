"""The benchmarks run and their numbers are complete. What they measure is for people to judge."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
Answer = tuple[str, dict[str, Any], Path]


def run(script: str, *options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(BENCHMARKS / script), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def answer(script: str, folder: Path, *options: str) -> Answer:
    """What a script printed, its numbers, and the folder it wrote to."""
    done = run(script, "--out", folder, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    file = (folder / script).with_suffix(".json")
    return done.stdout, json.loads(file.read_text(encoding="utf-8")), folder


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, int | float) else []


def table(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    return lines


# --- aggregate.py -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def aggregate(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """Two tiny rows, one of which counts as slow."""
    return answer("aggregate.py", tmp_path_factory.mktemp("out"), "--quick", "--rows", "tiny")


def test_the_table_has_a_line_for_each_row(aggregate: Answer) -> None:
    lines = table(aggregate[0])
    assert len(lines) == 4
    assert lines[2].startswith("| tiny x 3 ")
    assert lines[3].startswith("| tiny x 5 ")


def test_what_was_left_out_is_shown_with_the_reason(aggregate: Answer) -> None:
    row = aggregate[1]["rows"][1]
    for rival in ("published", "torchjd", "conflictfree"):
        assert f"(1) tinyx5, {rival}: left out by --quick" in aggregate[0].splitlines()
        assert row["times"][rival] == {"reason": "left out by --quick"}
        assert f"{rival}_over_ours" not in row["ratios"]


@pytest.mark.parametrize("rival", ["torchjd", "conflictfree"])
def test_a_rival_runs_if_it_is_installed(aggregate: Answer, rival: str) -> None:
    row = aggregate[1]["rows"][0]
    if find_spec(rival):
        assert row["ratios"][f"{rival}_over_ours"] > 0
    else:
        assert row["times"][rival]["reason"].startswith("not installed")


def test_the_numbers_are_complete_and_finite(aggregate: Answer) -> None:
    about, rows = aggregate[1]["about"], aggregate[1]["rows"]
    assert {"python", "torch", "craft_adapters", "cpu", "cores", "threads"} <= about.keys()
    assert all(map(math.isfinite, numbers(aggregate[1])))
    for row in rows:
        for rule in ("ours", "fedml", "mean"):
            assert row["times"][rule]["seconds"] == min(row["times"][rule]["all"]) > 0
        floor = row["times"]["floor"]
        assert floor["parts"].keys() == {"read", "multiply", "apply"}
        assert floor["seconds"] == pytest.approx(sum(floor["parts"].values()))
        ours = row["times"]["ours"]["seconds"]
        assert row["ratios"]["ours_over_floor"] == pytest.approx(ours / floor["seconds"])
        assert row["largest_block_bytes"] == row["clients"] * 8 * 16 * 4
        assert row["memory"].keys() & {"bytes", "reason"}
    assert rows[0]["ratios"]["published_over_ours"] > 0


def test_the_published_rule_and_ours_meet_the_targets(aggregate: Answer) -> None:
    for row in aggregate[1]["rows"]:
        assert row["times"]["ours"]["missed"] < 1e-5
    assert aggregate[1]["rows"][0]["times"]["published"]["missed"] < 1e-4


def test_an_unknown_row_is_refused_with_the_known_ones() -> None:
    done = run("aggregate.py", "--rows", "resnet18")
    assert done.returncode == 2
    assert "resnet20x10" in done.stderr


def test_memory_says_which_rows_and_rules_there_are() -> None:
    done = run("memory.py", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: memory.py") and "resnet20x10" in done.stdout
    for words, known in ((["resnet18"], "resnet20x10"), (["resnet20x10", "crft"], "craft")):
        done = run("memory.py", *words)
        assert done.returncode == 2
        assert "invalid choice" in done.stderr and f"'{known}'" in done.stderr
        assert "Traceback" not in done.stderr


def test_table_and_picture_are_in_the_folder_too(aggregate: Answer) -> None:
    assert (aggregate[2] / "aggregate.md").read_text(encoding="utf-8") == aggregate[0]
    pytest.importorskip("matplotlib")
    assert (aggregate[2] / "aggregate.png").read_bytes().startswith(b"\x89PNG")


# --- scaling.py -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scaling(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """The first sizes of each axis."""
    return answer("scaling.py", tmp_path_factory.mktemp("out"), "--most", "200000")


def test_each_axis_grows_alone(scaling: Answer) -> None:
    axes = scaling[1]["axes"]
    sizes = {
        name: [(p["clients"], p["columns"], p["groups"]) for p in axis["points"]]
        for name, axis in axes.items()
    }
    assert sizes == {
        "clients": [(2, 100_000, 1)],
        "columns": [(10, 1_000, 1), (10, 10_000, 1)],
        "groups": [(10, 3_000, 1), (10, 9_000, 3)],
    }
    for axis in axes.values():
        assert all(map(math.isfinite, numbers(axis)))
        for point in axis["points"]:
            assert all(time.get("seconds", 1) > 0 for time in point["times"].values())


def test_slopes_are_of_log_time_against_log_size(scaling: Answer) -> None:
    axis = scaling[1]["axes"]["columns"]
    for rule in ("ours", "floor", "fedml", "published"):
        small, large = (point["times"][rule]["seconds"] for point in axis["points"])
        slope = math.log10(large / small)  # the sizes are ten times apart
        assert axis["slopes"][rule] == pytest.approx(slope)
    assert scaling[1]["axes"]["clients"]["slopes"]["ours"] is None


def test_sizes_that_were_left_out_are_named(scaling: Answer) -> None:
    assert scaling[1]["axes"]["groups"]["too_large"] == [10, 30, 110, 330]
    line = "groups: too large, over 200,000 numbers: 10, 30, 110, 330"
    assert line in scaling[0].splitlines()


# --- precision.py -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def precision(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """Two and ten clients of a thousand columns."""
    return answer("precision.py", tmp_path_factory.mktemp("out"), "--most", "10000")


def test_every_cosine_is_within_the_bar(precision: Answer) -> None:
    found = precision[1]
    assert [(p["clients"], p["width"]) for p in found["points"][::6]] == [(2, 1000), (10, 1000)]
    assert {p["cosine"] for p in found["points"]} == {0, 0.5, 0.9, 0.99, 0.999, 0.9999}
    assert found["worst"] == max(p["missed"] for p in found["points"]) <= found["bar"] == 1e-5
    for point in found["points"]:
        assert point["gram"] < 1e-6
        assert point["published"] < 1e-4


def test_the_errors_stand_in_three_tables(precision: Answer) -> None:
    lines = [line for line in table(precision[0]) if line.startswith("| 10 x 1,000")]
    assert len(lines) == 3
    missed = [p["missed"] for p in precision[1]["points"] if p["clients"] == 10]
    cells = [float(cell) for cell in lines[0].strip("| ").split("|")[1:]]
    assert cells == [float(f"{value:.0e}") for value in missed]


@pytest.mark.parametrize("script", ["scaling", "precision"])
def test_each_script_draws_a_picture(script: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("matplotlib")
    folder = request.getfixturevalue(script)[2]
    assert (folder / f"{script}.png").read_bytes().startswith(b"\x89PNG")


# --- gpu.py -----------------------------------------------------------------------------------


def gpu(folder: Path, *tests: Path) -> subprocess.CompletedProcess[str]:
    options = ("--device", "cpu", "--quick", "--rows", "tinyx3", "--out", folder, "--tests", *tests)
    return run("gpu.py", *options)


def test_the_card_script_times_and_tests(tmp_path: Path) -> None:
    file = tmp_path / "test_device.py"
    file.write_text(
        "import os\n"
        "def test_device(): assert os.environ['CRAFT_TEST_DEVICE'] == 'cpu'\n"
        "def test_wants(): import no_such_package\n"
    )
    done = gpu(tmp_path / "out", file)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "gpu.json").read_text(encoding="utf-8"))
    (row,) = found["rows"]
    assert row["name"] == "tinyx3, updates on cpu"
    assert row["times"]["ours"]["seconds"] > 0
    assert row["times"]["ours"]["missed"] < 1e-5
    assert row["bars"] == []  # they are the card's
    assert found["tests"]["passed"] == 1
    assert list(found["tests"]["lacking"].values()) == ["no_such_package"]


def test_the_card_script_fails_where_a_test_does(tmp_path: Path) -> None:
    file = tmp_path / "test_false.py"
    file.write_text("def test_false(): assert False, 'this one'\ndef test_true(): pass\n")
    done = gpu(tmp_path / "out", file)
    assert done.returncode == 1
    assert "this one" in done.stdout


def test_tests_that_hang_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from gpu import tests

    file = tmp_path / "test_hang.py"
    file.write_text("import threading\ndef test_hang(): threading.Event().wait()\n")
    found = tests([str(file)], torch.device("cpu"), seconds=3)
    assert found["failures"] == {"pytest": "stopped after 3 s"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so() -> None:
    done = run("gpu.py")
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr


# --- The exact check --------------------------------------------------------------------------


def test_the_oracle_sees_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from federations import federation, layers
    from oracle import gram_error, miss

    given = federation(layers(2, 30), 3)
    rows = [
        torch.stack([given.state[e].double() - u.values[e] for u in given.updates]).squeeze(1)
        for e in given.entries
    ]
    products = torch.stack([d @ d.mT for d in rows])
    units = [d / d.norm(dim=1, keepdim=True) for d in rows]
    steps = {
        e: torch.linalg.pinv(u) @ given.shares for e, u in zip(given.entries, units, strict=True)
    }
    assert gram_error(given, products) < 1e-14
    assert miss(given, steps) < 1e-12
    products[1, 0, 2] += 1e-3 * rows[1][0].norm() * rows[1][2].norm()
    steps[given.entries[1]] *= 1.01
    assert gram_error(given, products) == pytest.approx(1e-3)
    assert miss(given, steps) == pytest.approx(1e-2)
    steps[given.entries[0]][0] = math.nan
    assert math.isnan(miss(given, steps))
