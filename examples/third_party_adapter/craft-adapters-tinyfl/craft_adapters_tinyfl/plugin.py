"""The adapter's entry in the registry. Importing this imports neither tinyfl nor torch."""

from __future__ import annotations

from typing import Any

from craft_adapters.plugins import AdapterDescriptor, hookimpl


def _load() -> Any:
    from craft_adapters_tinyfl import adapter

    return adapter


def _harness() -> Any:
    from craft_adapters_tinyfl.harness import TinyHarness

    return TinyHarness()


@hookimpl
def craft_register_adapters(register: Any) -> None:
    register(
        AdapterDescriptor(
            name="tinyfl",
            distribution="tinyfl",
            tested=("2.1",),
            extra=None,
            summary="a rule as a tinyfl strategy",
            load=_load,
            gives=frozenset({"updates", "client_ids", "server_state"}),
            harness=_harness,
        )
    )
