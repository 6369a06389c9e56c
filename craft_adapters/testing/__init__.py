"""The conformance kit: whether an adapter for a host does what it must.

An adapter's author writes a :class:`Harness`, which makes a server of the host with a rule in it
and hands it what clients send. :func:`check_adapter` then plays rounds on it with a rule that notes
down what it is given, and returns a :class:`Report`. As tests::

    from craft_adapters.testing import AdapterTests

    class TestMyHost(AdapterTests):
        adapter = "my_host"

and from a shell: ``craft-adapters check my_host``. A complete adapter, for a host of a few lines,
is :mod:`craft_adapters.testing.toy`; ``craft-adapters new-adapter NAME`` writes a package that
starts as a copy of it. Nothing of the library imports this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._checks import CHECKS, Check
from ._harness import Harness, Server
from ._report import CheckResult, Report
from ._run import check_adapter

if TYPE_CHECKING:
    from ._pytest import AdapterTests

__all__ = [
    "CHECKS",
    "AdapterTests",
    "Check",
    "CheckResult",
    "Harness",
    "Report",
    "Server",
    "check_adapter",
]


def __getattr__(name: str) -> Any:
    if name != "AdapterTests":  # needs pytest, which the command line does without
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("._pytest", __name__).AdapterTests
