"""What an adapter's author writes so that the kit can drive the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import nn

from .. import ClientUpdate

__all__ = ["Harness", "Server"]


class Server(Protocol):
    """One server of the host, with a rule in it through the adapter."""

    def round(self, replies: Sequence[ClientUpdate]) -> Mapping[str, Any]:
        """Hand the host what its clients send in one round, and let it do its server step.

        Args:
            replies: The clients' models after training (``kind="state"``), in the order in which
                they arrive: what to put into the host's own messages. Clients are numbered from 0;
                ``loss`` and ``local_steps`` are given too.

        Returns:
            The new global model, as the host sends it to its clients next: entry name -> tensor or
            array. If the host keeps the old one, that.

        Raises:
            Exception: whatever the host raises, or, where it does not raise but stops or marks the
                run as failed, an error that says so with the host's own words.
        """


class Harness(ABC):
    """Makes servers of a host. Write one for your adapter: one method and a :class:`Server`.

    Attributes:
        host: What is driven, where the adapter's distribution does not say it.
        host_modules: Names of the host's modules, for the check that they are not imported early;
            needed if the host is no installed distribution.
        expected_failures: Check name -> why the host cannot do this. Such a check must fail: when
            it passes, the entry is out of date and that is a failure.
        clients: How many clients there are in all (class constant of the kit).
        clients_per_round: How many reply in a round, unless a check says otherwise.
    """

    host: str | None = None
    host_modules: ClassVar[tuple[str, ...]] = ()
    expected_failures: ClassVar[Mapping[str, str]] = {}
    clients: ClassVar[int] = 7
    clients_per_round: ClassVar[int] = 4

    @abstractmethod
    def start(self, rule: str, model: nn.Module, folder: Path) -> Server:
        """A new server of the host, with a rule as a user would configure it.

        Args:
            rule: The rule's name in the registry. Pass it on as a user's configuration would; an
                adapter that takes an object gets ``get_aggregator(rule)``.
            model: The model that the clients of the first round start from.
            folder: Where the server keeps what must survive a restart, written by the time that
                ``round`` returns. If an earlier server's is there, go on from it; after a restart
                ``model`` is where that server was.
        """
