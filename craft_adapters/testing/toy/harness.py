"""Lets the conformance kit drive the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from craft_adapters import Aggregator, ClientUpdate, get_aggregator
from craft_adapters.testing import Harness
from craft_adapters.testing.toy.adapter import Adapter

__all__ = ["ToyHarness", "ToyServer"]


class ToyHarness(Harness):
    """Makes servers of the host.

    Args:
        adapter: What fits a rule into the host.
    """

    host_modules: ClassVar[tuple[str, ...]] = ("craft_adapters.testing.toy.host",)

    def __init__(self, adapter: Callable[[Aggregator, Path], Adapter] = Adapter) -> None:
        self.adapter = adapter

    def start(self, rule: str, model: nn.Module, folder: Path) -> ToyServer:
        """A new server, as a user would make it."""
        from craft_adapters.testing.toy.host import Host

        return ToyServer(Host(model.state_dict(), self.adapter(get_aggregator(rule), folder)))


class ToyServer:
    """One server of the host."""

    def __init__(self, host: Any) -> None:
        self.host = host

    def round(self, replies: Sequence[ClientUpdate]) -> Mapping[str, Any]:
        """Give the host its clients' replies, and read its new global model."""
        from craft_adapters.testing.toy.host import Reply

        self.host.step(
            [
                Reply(
                    client=int(reply.client_id),
                    examples=int(reply.num_examples),
                    model=dict(reply.values),
                    metrics={"loss": reply.loss or 0.0, "steps": reply.local_steps or 0},
                )
                for reply in replies
            ]
        )
        new_model: Mapping[str, Any] = self.host.model
        return new_model
