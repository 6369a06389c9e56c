"""The examples in the docstrings of adapters that import their host.

All other docstrings are run by ``pytest --doctest-modules``, which would take ``adapters/nvflare``
for NVFlare itself.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest


@pytest.mark.parametrize(("adapter", "host"), [("flower", "flwr"), ("nvflare", "nvflare")])
def test_examples(adapter: str, host: str) -> None:
    pytest.importorskip(host, reason=f"the host is not installed (extra {adapter})")
    package = importlib.import_module(f"craft_adapters.{adapter}")
    names = [info.name for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    results = [doctest.testmod(importlib.import_module(name)) for name in names]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0
