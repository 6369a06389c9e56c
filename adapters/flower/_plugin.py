"""The adapter's entry in the registry. Importing it imports neither Flower nor torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from craft_adapters.plugins import AdapterDescriptor, hookimpl

__all__ = ["craft_register_adapters"]


def _harness() -> Any:
    return importlib.import_module("craft_adapters.flower._harness").FlowerHarness()


@hookimpl
def craft_register_adapters(register: Callable[[AdapterDescriptor], None]) -> None:
    """Offer the adapter under its host's name."""
    register(
        AdapterDescriptor(
            name="flower",
            distribution="flwr",
            tested=("1.42.0",),
            extra="flower",
            summary="Flower's strategies (flwr.serverapp.strategy)",
            load=lambda: importlib.import_module("craft_adapters.flower"),
            gives=frozenset({"updates", "client_ids", "loss", "local_steps", "server_state"}),
            harness=_harness,
        )
    )
