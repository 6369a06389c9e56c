"""The kit as pytest tests."""

from __future__ import annotations

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

    @pytest.fixture(scope="class")
    def craft_kit_report(self) -> Report:
        """The report of one run of the kit, for all tests of the class."""
        cls = type(self)
        return check_adapter(cls.adapter, cls.harness, expected_failures=cls.expected_failures)

    @pytest.mark.parametrize("name", CHECKS)
    def test_check(self, name: str, craft_kit_report: Report) -> None:
        """One check."""
        result = craft_kit_report[name]
        if result.status == "skipped":
            pytest.skip(result.reason)
        if result.status == "expected failure":
            pytest.xfail(result.reason)
        assert result.status == "passed", result.reason

    def test_verdict(self, craft_kit_report: Report) -> None:
        """The whole: every group of checks has proved something, and no test was replaced."""
        assert not _replaced(type(self))
        craft_kit_report.raise_unless_passed()


_TESTS = ("craft_kit_report", "test_check", "test_verdict")
_ORIGINALS = {name: vars(AdapterTests)[name] for name in _TESTS}


def _replaced(cls: type) -> list[str]:
    return [name for name, original in _ORIGINALS.items() if getattr(cls, name) is not original]
