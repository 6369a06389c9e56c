"""The kit as pytest tests."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from ..plugins import AdapterDescriptor
from ._checks import CHECKS
from ._harness import Harness
from ._report import Report
from ._run import check_adapter

__all__ = ["AdapterTests"]


class AdapterTests:
    """One test for each check of the kit, and one for the verdict. Derive from it.

    The tests cannot be overridden: a check that the host cannot pass goes into
    ``expected_failures`` with the reason, and has to fail from then on.

    Attributes:
        adapter: A registered adapter's name, or its descriptor.
        harness: What drives the host; None: the descriptor's own.
        expected_failures: Check name -> reason, besides those that the harness names.

    Raises:
        TypeError: a subclass replaces one of the tests.
    """

    adapter: ClassVar[str | AdapterDescriptor]
    harness: ClassVar[Harness | None] = None
    expected_failures: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if replaced := _replaced(cls):
            raise TypeError(
                f"{cls.__qualname__} replaces {', '.join(replaced)}: the kit's tests are not to be "
                "overridden; if the host cannot do something, name the check and the reason in "
                "expected_failures"
            )

    @pytest.mark.parametrize("name", CHECKS)
    def test_check(self, name: str) -> None:
        """One check."""
        result = _report_of(type(self))[name]
        if result.status == "skipped":
            pytest.skip(result.reason)
        if result.status == "expected failure":
            pytest.xfail(result.reason)
        assert result.status == "passed", f"{result.reason}. Wanted: {CHECKS[name].summary}"

    def test_verdict(self) -> None:
        """The whole: every group of checks has proved something, and no test was replaced."""
        assert not _replaced(type(self))
        _report_of(type(self)).raise_unless_passed()


def _report_of(cls: type[AdapterTests]) -> Report:
    """One run of the kit serves all tests of a class."""
    if cls not in _reports:
        _reports[cls] = check_adapter(
            cls.adapter, cls.harness, expected_failures=cls.expected_failures
        )
    return _reports[cls]


_reports: dict[type[AdapterTests], Report] = {}

_ORIGINALS = {name: vars(AdapterTests)[name] for name in ("test_check", "test_verdict")}


def _replaced(cls: type) -> list[str]:
    found = ((name, inspect.getattr_static(cls, name), first) for name, first in _ORIGINALS.items())
    return [name for name, now, first in found if now is not first]
