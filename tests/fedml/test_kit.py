"""The conformance kit over FedML's real server objects."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from craft_adapters.fedml import _attach, _server_step
from craft_adapters.fedml._harness import SpHarness
from craft_adapters.testing import AdapterTests, check_adapter


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


def test_defects_are_seen_through_fedml(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness hides nothing: what goes wrong in the adapter is found."""
    monkeypatch.setattr(_attach, "identify", lambda uploads, received: list(range(len(uploads))))
    assert check_adapter("fedml", only=["client-ids"])["client-ids"].status == "failed"
    monkeypatch.setattr(_server_step, "OrderedDict", lambda state: _cast(state))
    assert check_adapter("fedml", only=["dtypes"])["dtypes"].status == "failed"


def _cast(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    return OrderedDict((name, value.double()) for name, value in state.items())
