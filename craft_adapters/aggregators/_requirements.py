"""What some rules need from clients beyond values and counts."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .._contract import ClientUpdate, DroppedClient
from .._intake import Intake
from ..errors import IncompatibleUpdate, NonFiniteUpdate, NoUsableUpdates

__all__ = ["local_steps", "losses", "screened"]

_MEANING = {
    "loss": "the broadcast model's loss on the client's training data, before it trains",
    "local_steps": "the number of local optimiser steps",
}


def screened(intake: Intake, rule: str, requires: Iterable[str], on_nonfinite: str) -> Intake:
    """Refuse clients without what a rule requires; leave out those whose numbers are not finite.

    Args:
        intake: The round's clients.
        rule: The rule's name, for messages.
        requires: Names of attributes of ClientUpdate.
        on_nonfinite: "raise" raises NonFiniteUpdate instead of leaving out.

    Raises:
        IncompatibleUpdate: a client did not report it, or reported what is no number.
        NonFiniteUpdate: see ``on_nonfinite``.
        NoUsableUpdates: nobody is left.
    """
    for name in sorted(requires):
        dropped = []
        for client in intake.clients:
            value = getattr(client, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise IncompatibleUpdate(
                    f"client {client.client_id!r}: {name} is {value!r}; rule {rule!r} needs it "
                    f"({_MEANING[name]}): pass ClientUpdate({name}=...)"
                )
            if not math.isfinite(value):
                reason = f"{name} is {float(value)}"
                if on_nonfinite == "raise":
                    raise NonFiniteUpdate(
                        f"client {client.client_id!r}: {reason}; mend the client, or set "
                        'on_nonfinite="drop" to go on without it'
                    )
                dropped.append(DroppedClient(client.client_id, reason))
        if dropped:
            away = {drop.client_id for drop in dropped}
            clients = tuple(c for c in intake.clients if c.client_id not in away)
            if not clients:
                raise NoUsableUpdates(f"every client's {name} is NaN or infinite")
            intake = dataclasses.replace(
                intake, clients=clients, dropped=(*intake.dropped, *dropped)
            )
    return intake


def losses(clients: Sequence[ClientUpdate], *, least: float = -math.inf) -> Tensor:
    """(m,) float64: each client's loss of the broadcast model.

    Raises:
        IncompatibleUpdate: one is below ``least``.
    """
    return _numbers(clients, "loss", least)


def local_steps(clients: Sequence[ClientUpdate]) -> Tensor:
    """(m,) float64: each client's number of local optimiser steps.

    Raises:
        IncompatibleUpdate: one is negative.
    """
    return _numbers(clients, "local_steps", 0.0)


def _numbers(clients: Sequence[ClientUpdate], name: str, least: float) -> Tensor:
    values = [float(getattr(client, name)) for client in clients]
    for client, value in zip(clients, values, strict=True):
        if value < least:
            raise IncompatibleUpdate(
                f"client {client.client_id!r}: {name} must be >= {least:g} here, got {value}"
            )
    return torch.tensor(values, dtype=torch.float64)
