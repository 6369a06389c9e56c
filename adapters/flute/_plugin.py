"""The adapter's entry in the registry. Importing it imports neither FLUTE nor torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from craft_adapters.plugins import AdapterDescriptor, hookimpl

__all__ = ["craft_register_adapters"]


def _harness() -> Any:
    return importlib.import_module("craft_adapters.flute._harness").new_harness()


@hookimpl
def craft_register_adapters(register: Callable[[AdapterDescriptor], None]) -> None:
    """Offer the adapter; its host is a checkout of a repository, no distribution."""
    register(
        AdapterDescriptor(
            name="flute",
            distribution=None,
            tested=("msrflute 8bfe085",),
            extra=None,
            summary="FLUTE's strategies (a checkout of microsoft/msrflute): strategy: CRAFT",
            load=lambda: importlib.import_module("craft_adapters.flute"),
            gives=frozenset({"updates", "client_ids", "local_steps", "server_state"}),
            harness=_harness,
        )
    )
