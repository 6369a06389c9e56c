"""The device and dtype that tests run on where they do not need a particular one."""

from __future__ import annotations

import os

import pytest
import torch

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@pytest.fixture(scope="session")
def device() -> torch.device:
    """``CRAFT_TEST_DEVICE``: "cpu" unless set."""
    return torch.device(os.environ.get("CRAFT_TEST_DEVICE", "cpu"))


@pytest.fixture(scope="session")
def dtype() -> torch.dtype:
    """``CRAFT_TEST_DTYPE``: "float32" unless set to "float64"."""
    return _DTYPES[os.environ.get("CRAFT_TEST_DTYPE", "float32")]
