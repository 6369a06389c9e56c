"""What came out of a run of the kit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["CheckResult", "Report", "Status", "Verdict"]

Status = Literal["passed", "failed", "expected failure", "skipped"]
Verdict = Literal["pass", "fail", "incomplete"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check.

    Attributes:
        name: The check's name.
        group: What it belongs to; see :attr:`Report.empty_groups`.
        status: ``"passed"``, ``"failed"``, ``"expected failure"`` or ``"skipped"``.
        reason: Why, in words; empty if passed.
        seconds: Time it took.
    """

    name: str
    group: str
    status: Status
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict on an adapter and how it came about.

    Attributes:
        adapter: The adapter's name.
        host: What was driven: the host's distribution, if it has one, or what the harness says.
        found: The host's version that was there.
        tested: Versions that the adapter says it is tested with.
        gives: What the adapter says its host can give.
        checks: Every check of the kit, in its order, with what became of it.
        versions: Versions of craft-adapters, torch and Python.

    Example:
        >>> one = CheckResult("weights", "updates", "passed")
        >>> two = CheckResult("restart", "state", "skipped", "not selected")
        >>> report = Report("toy", None, None, (), (), (one, two))
        >>> report.verdict, report.empty_groups
        ('incomplete', ('state',))
    """

    adapter: str
    host: str | None
    found: str | None
    tested: tuple[str, ...]
    gives: tuple[str, ...]
    checks: tuple[CheckResult, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """``"pass"``: nothing failed, and something passed in every group of checks.

        ``"incomplete"``: nothing failed, but a group has proved nothing.
        """
        if self.counts["failed"]:
            return "fail"
        return "incomplete" if self.empty_groups or not self.checks else "pass"

    @property
    def passed(self) -> bool:
        """Whether the verdict is ``"pass"``."""
        return self.verdict == "pass"

    @property
    def counts(self) -> dict[Status, int]:
        """Number of checks of each status."""
        found = Counter(check.status for check in self.checks)
        order: tuple[Status, ...] = ("passed", "failed", "expected failure", "skipped")
        return {status: found[status] for status in order}

    @property
    def empty_groups(self) -> tuple[str, ...]:
        """Groups in which no check passed: they prove nothing."""
        proved = {check.group for check in self.checks if check.status == "passed"}
        groups = dict.fromkeys(check.group for check in self.checks)
        return tuple(group for group in groups if group not in proved)

    def __getitem__(self, name: str) -> CheckResult:
        """The result of one check by its name.

        Raises:
            KeyError: the kit has no such check.
        """
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    def raise_unless_passed(self) -> None:
        """Raise AssertionError with :meth:`to_text` unless the verdict is ``"pass"``."""
        if not self.passed:
            raise AssertionError(self.to_text())

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, ready for JSON."""
        return {
            **asdict(self),
            "verdict": self.verdict,
            "counts": dict(self.counts),
            "empty_groups": list(self.empty_groups),
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_text(self) -> str:
        """One line a check, and the verdict."""
        width = max((len(check.name) for check in self.checks), default=0)
        lines = []
        for check in self.checks:
            line = f"{check.group:<8}  {check.name:<{width}}  {check.status}"
            lines.append(f"{line}: {check.reason}" if check.reason else line)
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items() if count)
        on = f" on {self.host}" if self.host else ""
        lines.append(f"{self.adapter}{on}: {self.verdict} ({counts or 'no check'})")
        if self.empty_groups:
            lines.append(f"nothing passed in: {', '.join(self.empty_groups)}")
        return "\n".join(lines)
