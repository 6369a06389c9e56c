"""The conformance kit over a wrapped Flower strategy."""

from __future__ import annotations

import importlib.util

import pytest

from craft_adapters.testing import AdapterTests

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None, reason="Flower is not installed (extra flower)"
)


class TestFlower(AdapterTests):
    adapter = "flower"
