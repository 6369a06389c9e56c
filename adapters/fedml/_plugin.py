"""The adapter's entry in the registry. Importing it imports neither FedML nor torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from craft_adapters.plugins import AdapterDescriptor, hookimpl

__all__ = ["craft_register_adapters"]


def _harness() -> Any:
    return importlib.import_module("craft_adapters.fedml._harness").CrossSiloHarness()


@hookimpl
def craft_register_adapters(register: Callable[[AdapterDescriptor], None]) -> None:
    """Offer the adapter under its host's name."""
    register(
        AdapterDescriptor(
            name="fedml",
            distribution="fedml",
            tested=("0.9.6",),
            extra="fedml",
            summary="FedML's server step: simulation (sp, MPI), cross-silo (GRPC, MPI), serving",
            load=lambda: importlib.import_module("craft_adapters.fedml"),
            gives=frozenset({"updates", "client_ids", "server_state"}),
            harness=_harness,
        )
    )
