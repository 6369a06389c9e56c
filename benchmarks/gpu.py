"""The GPU half: times on the card against the card's floor, then the whole test suite on it.

    python benchmarks/gpu.py [--device cuda] [--minutes 8] [--rows NAME ...] [--tests PATH ...]

Needs torch, numpy, pluggy, safetensors, pytest, hypothesis and this package. Writes one JSON,
build/bench/gpu.json. --device cpu --quick tries the script itself where there is no card.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import bars
import contestants
import report
import torch
from federations import COSINE, ROWS, Row, federation, model, rows_named
from floor import Floor, upload
from timing import Contestant, Measured, race, synchronize

ROOT = Path(__file__).resolve().parents[1]
BARS = {"widex100": {"ours_over_floor": 1.3}, "resnet110x10": {"ours_milliseconds": 2.0}}
"""Of rows whose updates are on the card."""

FROM_CPU = ("resnet110x10", "widex100")
"""Rows that are measured with updates on the CPU too."""

# An SVD of more numbers than this takes longer than there is time.
SVD_NUMBERS = 20_000_000
REPETITIONS = 10
# Seconds kept for the tests, and to end in.
FOR_TESTS, TO_END = 240.0, 10.0
QUICK_TESTS = ("tests/test_known_answers.py",)


def main(argv: list[str] | None = None) -> int:
    started = time.perf_counter()
    options = _arguments(argv)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu --quick tries the script", file=sys.stderr)
        return 2
    rows = [row for row in ROWS if (row.quick if options.quick else row.default)]
    if options.rows:
        rows = rows_named(options.rows)
    seconds = 60 * options.minutes
    numbers: Measured = {"about": {**report.about(device), "cosine": COSINE}, "rows": []}
    for row, where in _places(rows, device):
        name = f"{row.name}, updates on {where}"
        if time.perf_counter() - started > seconds - FOR_TESTS:
            numbers["rows"].append({"name": name, "reason": "out of time"})
            continue
        report.progress(name)
        numbers["rows"].append({"name": name, **_guarded(row, where, device)})
    numbers["about"]["load_after"] = report.load()
    report.write("gpu", _text(numbers), numbers, options.out)  # the tests may take the process down
    report.progress("tests")
    left = seconds - (time.perf_counter() - started) - TO_END
    numbers["tests"] = tests(options.tests or (QUICK_TESTS if options.quick else ()), device, left)
    numbers["seconds"] = time.perf_counter() - started
    report.publish("gpu", _text(numbers), numbers, options.out)
    return 0 if numbers["tests"]["passed"] and not numbers["tests"]["failures"] else 1


def _arguments(argv: list[str] | None) -> Any:
    parser = report.parser(__doc__)
    parser.set_defaults(out=ROOT / "build" / "bench")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0, metavar="M", help="for everything")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="as for aggregate.py")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="only these tests")
    return parser.parse_args(argv)


# --- Times ------------------------------------------------------------------------------------


def _places(rows: list[Row], device: torch.device) -> Iterator[tuple[Row, torch.device]]:
    """The rows that have a bar first, and where the updates of each are."""
    for row in sorted(rows, key=lambda row: row.name not in BARS):
        yield row, device
        if row.name in FROM_CPU and device.type != "cpu":
            yield row, torch.device("cpu")


def _guarded(row: Row, where: torch.device, device: torch.device) -> Measured:
    """A row's numbers, or the reason why there are none: one must not cost all others."""
    try:
        return _measure(row, where, device)
    except Exception as error:
        return {"reason": f"{type(error).__name__}: {error}"}


def _measure(row: Row, where: torch.device, device: torch.device) -> Measured:
    given = federation(model(row.model), row.clients).to(where)
    racing = contestants.fast(given, device, max(REPETITIONS, row.repetitions))
    numbers = row.clients * sum(given.widths)
    if numbers > SVD_NUMBERS or where != device:
        racing |= dict.fromkeys(contestants.SLOW, "left out: its SVD takes too long")
    else:
        racing |= contestants.slow(given)
    floor = Floor(given.to(device))
    times = race(racing, device, floor.measure)
    parts = dict(floor.parts)
    if where != device:
        parts["upload"] = upload(4 * numbers, device)
    times["floor"] = {"seconds": sum(parts.values()), "parts": parts}
    ratios = bars.ratios(times)
    values = {**ratios, "ours_milliseconds": 1e3 * times["ours"]["seconds"]}
    wanted = BARS.get(row.name, {}) if where == device and device.type == "cuda" else {}
    ours = racing["ours"]
    assert isinstance(ours, Contestant)
    return {
        "clients": row.clients,
        "groups": len(given.widths),
        "largest_block_bytes": given.largest_block,
        "times": times,
        "ratios": ratios,
        "bars": bars.judge(wanted, values),
        "extra_bytes": _extra(ours, device),
        "profile": _profile(ours, device) if row.name in BARS else None,
    }


def _extra(ours: Contestant, device: torch.device) -> int | None:
    """Peak memory of our call on the card, above what was there."""
    if device.type != "cuda":
        return None
    call = ours.prepare()
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def _profile(ours: Contestant, device: torch.device) -> str:
    """Where the time of our call goes, by the profiler."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    key = "self_cpu_time_total"
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
        key = "self_device_time_total"
    call = ours.prepare()
    with torch.profiler.profile(activities=kinds) as profile:
        call()
        synchronize(device)
    return str(profile.key_averages().table(sort_by=key, row_limit=20))


# --- Tests ------------------------------------------------------------------------------------


def tests(paths: tuple[str, ...] | list[str], device: torch.device, seconds: float) -> Measured:
    """Run pytest on the device, for so many seconds at most.

    Returns:
        Counts, "failures" by name, and "lacking": what failed for want of a package that this
        script does not ask for.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "junit.xml"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-m", "not fedml", "-p", "no:cacheprovider"),
            *("--continue-on-collection-errors", "--ignore", "tests/test_benchmarks.py"),
            *("--junitxml", str(file), *paths),
        ]
        output, ended = _run(command, {"CRAFT_TEST_DEVICE": str(device)}, max(1.0, seconds))
        answer: Measured = {"command": " ".join(command[1:]), "passed": 0, "failures": {}}
        if not file.exists():
            last = "\n".join(output.splitlines()[-40:])
            return {**answer, "ended": ended, "output": last, "failures": {"pytest": ended}}
        suite = ElementTree.parse(file).getroot()
    answer |= {"ended": ended, "output": output.splitlines()[-1:], "lacking": {}, "skipped": 0}
    for case in suite.iter("testcase"):
        problem = next((p for kind in ("failure", "error") for p in case.iter(kind)), None)
        name = f"{case.get('classname')}::{case.get('name')}"
        if problem is None:
            answer["skipped" if case.find("skipped") is not None else "passed"] += 1
        elif missing := _missing_package(problem.text or ""):
            answer["lacking"][name] = missing
        else:
            answer["failures"][name] = (problem.get("message") or "")[:500]
    return answer


def _run(command: list[str], environment: dict[str, str], seconds: float) -> tuple[str, str]:
    """Output of a command and how it ended; it and all that it started stop in time."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return output, f"stopped after {seconds:.0f} s"
    return output, f"exit status {process.returncode}"


def _missing_package(text: str) -> str | None:
    """The package that a failure was for want of, if it really is not here."""
    names = re.findall(r"No module named '?(\w+)", text)
    return next((name for name in names if find_spec(name) is None), None)


# --- Text -------------------------------------------------------------------------------------

HEADER = (
    *("row", "groups", "ours", "floor", "ours / floor", "FedML mean", "plain mean", "published"),
    *("extra memory", "target missed by"),
)


def _text(numbers: Measured) -> str:
    measured = [row for row in numbers["rows"] if "times" in row]
    lines = [report.table(HEADER, [_cells(row) for row in measured]), ""]
    lines.append(report.machine(numbers["about"]))
    lines += [f"{r['name']}: none: {r['reason']}" for r in numbers["rows"] if "reason" in r]
    lines += bars.lines(measured)
    if "tests" in numbers:
        found = numbers["tests"]
        lines.append(
            f"tests on {numbers['about']['device']}: {found['passed']} passed, "
            f"{len(found['failures'])} failed, {found.get('skipped', 0)} skipped, "
            f"{len(found.get('lacking', {}))} for want of a package; {found['ended']}"
        )
        lines += [f"failed: {name}: {why}" for name, why in found["failures"].items()]
    return "\n".join(lines)


def _cells(row: Measured) -> tuple[str, ...]:
    times, extra = row["times"], row["extra_bytes"]
    return (
        row["name"],
        str(row["groups"]),
        *(report.cell(times[name]) for name in ("ours", "floor")),
        f"{row['ratios']['ours_over_floor']:.2f}",
        *(report.cell(times[name]) for name in ("fedml", "mean", "published")),
        "-" if extra is None else f"{extra / row['largest_block_bytes']:.2f} blocks",
        f"{times['ours']['missed']:.0e}",
    )


if __name__ == "__main__":
    sys.exit(main())
