"""The examples in the adapter's docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

pytest.importorskip("nvflare", reason="NVFlare is not installed (extra nvflare)")

from craft_adapters import nvflare


def test_examples() -> None:
    names = [info.name for info in pkgutil.iter_modules(nvflare.__path__, f"{nvflare.__name__}.")]
    results = [doctest.testmod(importlib.import_module(name)) for name in names]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0
