"""The conformance kit over wrapped strategies of Flower's two APIs."""

from __future__ import annotations

import pytest

from craft_adapters.testing import AdapterTests, Harness

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")

from craft_adapters.flower._harness import LegacyHarness


class TestFlower(AdapterTests):
    adapter = "flower"


class TestLegacy(AdapterTests):
    adapter = "flower"
    harness: Harness = LegacyHarness()
