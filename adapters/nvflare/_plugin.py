"""The adapter's entry in the registry. Importing it imports neither NVFlare nor torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from craft_adapters.plugins import AdapterDescriptor, hookimpl

__all__ = ["craft_register_adapters"]


def _harness() -> Any:
    return importlib.import_module("craft_adapters.nvflare._harness").NVFlareHarness()


@hookimpl
def craft_register_adapters(register: Callable[[AdapterDescriptor], None]) -> None:
    """Offer the adapter under its host's name."""
    register(
        AdapterDescriptor(
            name="nvflare",
            distribution="nvflare",
            tested=("2.9.0",),
            extra="nvflare",
            summary="NVFlare's FedAvg controller and recipes (ModelAggregator)",
            load=lambda: importlib.import_module("craft_adapters.nvflare"),
            gives=frozenset({"updates", "client_ids", "loss", "local_steps", "server_state"}),
            harness=_harness,
        )
    )
