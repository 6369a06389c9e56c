"""The conformance kit over Ditto's round."""

from __future__ import annotations

from craft_adapters.testing import AdapterTests


class TestDitto(AdapterTests):
    adapter = "ditto"
