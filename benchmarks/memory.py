"""Peak extra memory of one aggregate(), measured in a process of its own.

    python benchmarks/memory.py ROW          # of every rule, as a table
    python benchmarks/memory.py ROW RULE     # of one, as one JSON object

Its second round is measured, so that what it keeps is there.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from federations import ROWS, Row, after_first_round, federation, model
from torch import Tensor

from craft_adapters import available_aggregators, get_aggregator

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MEMINFO = Path("/proc/meminfo")


# Options without which a rule cannot be made.
_NEEDED: dict[str, dict[str, Any]] = {"qfedavg": {"client_lr": 0.1}}


def measure(row: Row, rule: str = "craft") -> dict[str, Any]:
    """Run this file in a new process; the answer, or {"reason": why there is none}."""
    done = subprocess.run(
        [sys.executable, __file__, row.name, rule], capture_output=True, text=True, check=False
    )
    if done.returncode < 0:
        return {"reason": f"killed by signal {-done.returncode}: out of memory?"}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return {"reason": last[0]}
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def available() -> int | None:
    """Bytes that can be had without swapping, or None where the system does not say."""
    try:
        return _kilobytes(MEMINFO, "MemAvailable")
    except OSError:
        return None


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Make an allocation beyond the memory that is there fail, instead of the process be killed."""
    free = available()
    if free is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _kilobytes(STATUS, "VmSize") + free
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _peak_of_call(row: Row, rule: str) -> dict[str, Any]:
    given = federation(model(row.model), row.clients)
    options = {"device": "cpu", **_NEEDED.get(rule, {})}
    aggregator = after_first_round(get_aggregator(rule, **options), given.state)
    before = aggregator.state_dict()
    # The first call also loads code and makes the libraries' own buffers, some megabytes whatever
    # the size of the model; the second has only what the rule itself takes.
    extra, method = _extra(lambda: aggregator.aggregate(given.state, given.updates))
    aggregator.load_state_dict(before)
    again, _ = _extra(lambda: aggregator.aggregate(given.state, given.updates))
    if method == "ru_maxrss":  # it never falls: a second call adds nothing to the record
        again = extra
    # What stays of it: the new model, and what the rule remembers.
    kept = sum(given.state[e].nbytes for group in given.layout.groups for e in group.entries)
    kept += _tensor_bytes(aggregator.state_dict())
    return {"first_bytes": extra, "bytes": again, "kept_bytes": kept, "method": method}


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_tensor_bytes, value.values()))
    return 0


def _table(row: Row) -> str:
    lines = ["| rule | extra memory | of it kept |", "|---|---|---|"]
    for rule in available_aggregators():
        answer = measure(row, rule)
        cells = [f"{answer[key] / 1e6:.1f} MB" for key in ("bytes", "kept_bytes") if key in answer]
        lines.append(f"| {rule} | {' | '.join(cells or [answer.get('reason', ''), ''])} |")
    return "\n".join(lines)


def _extra(call: Callable[[], object]) -> tuple[int, str]:
    """How far the resident set rose above where it was, its result included."""
    _give_back()
    try:
        CLEAR.write_text("5", encoding="ascii")
    except OSError:
        start = _highest()
        call()
        return _highest() - start, "ru_maxrss"
    start = _kilobytes(STATUS, "VmRSS")
    call()
    return _kilobytes(STATUS, "VmHWM") - start, "VmHWM"


def _give_back() -> None:
    """Return freed memory to the system, where the call's own use of it would not show."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _highest() -> int:
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _kilobytes(file: Path, field: str) -> int:
    """A field of a /proc file, in bytes."""
    for line in file.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{file} has no field {field}")


def main(argv: list[str] | None = None) -> None:
    rows = {row.name: row for row in ROWS}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("row", metavar="ROW", choices=rows, help=", ".join(rows))
    parser.add_argument(
        "rule",
        metavar="RULE",
        nargs="?",
        choices=available_aggregators(),
        help="one, as a JSON object; default: all, as a table",
    )
    options = parser.parse_args(argv)
    row = rows[options.row]
    print(json.dumps(_peak_of_call(row, options.rule)) if options.rule else _table(row))


if __name__ == "__main__":
    main()
