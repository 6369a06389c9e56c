"""The adapter's entry in the registry. Importing this imports neither the host nor torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from craft_adapters.plugins import AdapterDescriptor, hookimpl

__all__ = ["ADAPTER", "craft_register_adapters"]


def _load() -> Any:
    from craft_adapters.testing.toy import adapter

    return adapter


def _harness() -> Any:
    from craft_adapters.testing.toy.harness import ToyHarness

    return ToyHarness()


ADAPTER = AdapterDescriptor(
    name="toy",
    distribution=None,
    tested=(),
    extra=None,
    summary="a rule as the server step of the toy host",
    load=_load,
    gives=frozenset({"updates", "client_ids", "loss", "local_steps", "server_state"}),
    harness=_harness,
)


@hookimpl
def craft_register_adapters(register: Callable[[AdapterDescriptor], None]) -> None:
    """Offer the adapter under its name."""
    register(ADAPTER)
