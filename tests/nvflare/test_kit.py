"""The conformance kit over NVFlare's FedAvg controller, for each way in which models travel."""

from __future__ import annotations

import importlib.util

import pytest

from craft_adapters.nvflare._harness import NVFlareHarness
from craft_adapters.testing import AdapterTests

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nvflare") is None, reason="NVFlare is not installed (extra nvflare)"
)


class TestTensors(AdapterTests):
    adapter = "nvflare"


class TestArrays(AdapterTests):
    adapter = "nvflare"
    harness = NVFlareHarness(arrays=True)
    expected_failures = {"bfloat16": "numpy has no bfloat16"}


class TestDifferences(AdapterTests):
    adapter = "nvflare"
    harness = NVFlareHarness(arrays=True, differences=True)
    expected_failures = {"bfloat16": "numpy has no bfloat16"}
