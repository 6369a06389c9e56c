"""The conformance kit over NVFlare's FedAvg controller, full models and differences."""

from __future__ import annotations

import importlib.util

import pytest

from craft_adapters.nvflare._harness import NVFlareHarness
from craft_adapters.testing import AdapterTests

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nvflare") is None, reason="NVFlare is not installed (extra nvflare)"
)


class TestFullModels(AdapterTests):
    adapter = "nvflare"


class TestDifferencesOfArrays(AdapterTests):
    adapter = "nvflare"
    harness = NVFlareHarness(arrays=True, differences=True)
    expected_failures = {"bfloat16": "numpy has no bfloat16"}
