"""Running the kit."""

from __future__ import annotations

import platform
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

from ..errors import OptionError, PluginError, nearest
from ..plugins import AdapterDescriptor, get_adapter
from ._checks import CHECKS, Check, Skip
from ._harness import Harness
from ._probe import registered
from ._report import CheckResult, Report, Status
from ._scene import Scene

__all__ = ["check_adapter"]


def check_adapter(
    adapter: str | AdapterDescriptor,
    harness: Harness | None = None,
    *,
    only: Iterable[str] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    device: str = "cpu",
) -> Report:
    """Drive a host's own server step through its adapter, and say whether the adapter is right.

    Args:
        adapter: A registered adapter's name, or its descriptor.
        harness: What drives the host; None: the descriptor's own.
        only: Names of the checks to run, while an adapter is being written. The others are skipped
            and the verdict is then ``"incomplete"``, unless something fails.
        expected_failures: Check name -> reason, besides those that the harness names.
        device: Where models and replies are.

    Returns:
        The report; see :meth:`Report.raise_unless_passed`. Warnings of the host are ignored.

    Raises:
        OptionError: an unknown adapter or check.
        PluginError: the adapter has no harness, or its ``harness`` makes something else.
        ImportError: the host is not installed; names the extra if there is one.

    Example:
        >>> from craft_adapters.testing.toy.plugin import ADAPTER
        >>> report = check_adapter(ADAPTER, only=["weights"])
        >>> report["weights"].status, report.verdict
        ('passed', 'incomplete')
    """
    if isinstance(adapter, str):
        adapter = get_adapter(adapter)
    if adapter.distribution is not None and adapter.found is None:
        extra = f"craft-adapters[{adapter.extra}]" if adapter.extra else adapter.distribution
        raise ImportError(
            f"the host {adapter.distribution!r} of adapter {adapter.name!r} is not installed; "
            f"install it with: pip install {extra!r}"
        )
    harness = _harness_of(adapter) if harness is None else harness
    expected = {**harness.expected_failures, **(expected_failures or {})}
    chosen = set(CHECKS if only is None else only)
    for name in sorted(chosen | expected.keys()):
        if name not in CHECKS:
            raise OptionError(f"the kit has no check {name!r}; {nearest(name, CHECKS)}")
    results = [
        _run(check, adapter, harness, expected.get(check.name), device)
        if check.name in chosen
        else CheckResult(check.name, check.group, "skipped", "not selected")
        for check in CHECKS.values()
    ]
    return Report(
        adapter=adapter.name,
        host=harness.host or adapter.distribution,
        found=adapter.found,
        tested=adapter.tested,
        gives=tuple(sorted(adapter.gives)),
        checks=tuple(results),
        versions={
            "craft-adapters": version("craft-adapters"),
            "torch": version("torch"),
            "python": platform.python_version(),
        },
    )


def _harness_of(adapter: AdapterDescriptor) -> Harness:
    if adapter.harness is None:
        raise PluginError(
            f"adapter {adapter.name!r} has no harness: set harness= on its AdapterDescriptor to a "
            "function that returns a craft_adapters.testing.Harness"
        )
    harness = adapter.harness()
    if not isinstance(harness, Harness):
        raise PluginError(
            f"the harness of adapter {adapter.name!r} is {harness!r}, which is no "
            "craft_adapters.testing.Harness"
        )
    return harness


def _run(
    check: Check, adapter: AdapterDescriptor, harness: Harness, expected: str | None, device: str
) -> CheckResult:
    started = time.perf_counter()
    status, reason = _outcome(check, adapter, harness, device)
    if expected is not None and status == "failed":
        status, reason = "expected failure", f"{expected} ({reason})"
    elif expected is not None and status == "passed":
        status = "failed"
        reason = f"it passes now: take it out of expected_failures (there because: {expected})"
    return CheckResult(check.name, check.group, status, reason, time.perf_counter() - started)


def _outcome(
    check: Check, adapter: AdapterDescriptor, harness: Harness, device: str
) -> tuple[Status, str]:
    if lacking := sorted(check.needs - adapter.gives):
        return "skipped", f"the host does not give {', '.join(lacking)}"
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scene = Scene(adapter, harness, Path(folder), device)
        try:
            with registered(scene.record.new_rule):
                check.function(scene)
        except Skip as skip:
            return "skipped", str(skip)
        except AssertionError as error:
            return "failed", _line(str(error))
        except (Exception, SystemExit) as error:  # a host may end the process in its own way
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            return "failed", _line(f"{type(error).__name__} in {place}: {error}")
    return "passed", ""


def _line(text: str) -> str:
    return " ".join(text.split())
