"""The conformance kit over FedML's real server objects."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from craft_adapters.fedml._harness import SpHarness
from craft_adapters.testing import AdapterTests


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    """FedML warns a lot when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import craft_adapters.fedml as adapter

        adapter.install()
    yield
    adapter.uninstall()


class TestCrossSilo(AdapterTests):
    adapter = "fedml"


class TestSp(AdapterTests):
    adapter = "fedml"
    harness = SpHarness()
