"""The adapter's entry in the registry. Importing it imports neither torch nor the adapter."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from craft_adapters.plugins import AdapterDescriptor, hookimpl

__all__ = ["craft_register_adapters"]


def _harness() -> Any:
    return importlib.import_module("craft_adapters.ditto._harness").DittoHarness()


@hookimpl
def craft_register_adapters(register: Callable[[AdapterDescriptor], None]) -> None:
    """Offer the adapter; its host is this package's own federation."""
    register(
        AdapterDescriptor(
            name="ditto",
            distribution=None,
            tested=(),
            extra=None,
            summary="Ditto, personalised training, with any rule as its averaging step",
            load=lambda: importlib.import_module("craft_adapters.ditto"),
            gives=frozenset({"updates", "client_ids", "loss", "local_steps"}),
            harness=_harness,
        )
    )
