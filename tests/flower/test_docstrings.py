"""The examples in the adapter's docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")

from craft_adapters import flower


def test_examples() -> None:
    names = [info.name for info in pkgutil.iter_modules(flower.__path__, f"{flower.__name__}.")]
    results = [doctest.testmod(importlib.import_module(name)) for name in names]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0
