"""CRAFT with targets and a step length that fit most federations as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .._layout import Granularity
from ..plugins import hookimpl
from ._common import Common, shows_common_options
from .craft import Craft, Reference, Scale, Targets

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CraftBalanced"]


@shows_common_options
class CraftBalanced(Craft):
    """:class:`Craft` with other defaults: nothing has to be tuned to the number of clients.

    The targets grow with the square root of the clients' examples, the clients' own part of the
    step has the length of the reference's, and the model moves by three times the length of the
    clients' mean update. ``docs/results.md`` has what this came to beside the other rules.

    Args:
        server_lr: As for :class:`Craft`; so are all others.
        norm_threshold: See :class:`Craft`.
        reference: See :class:`Craft`.
        beta: See :class:`Craft`.
        targets: See :class:`Craft`.
        client_length: See :class:`Craft`.
        scale: See :class:`Craft`.
        granularity: As for the other options, see :class:`GramRule`.
        **common: ``layout``, ``on_nonfinite``, ...: see :class:`GramRule`.

    Raises:
        OptionError: an option has a value that it does not take.

    Example:
        >>> import torch
        >>> from craft_adapters import ClientUpdate
        >>> theta = {"w": torch.zeros(2)}
        >>> clients = ClientUpdate.join(
        ...     [{"w": torch.tensor([-2.0, 0.0])}, {"w": torch.tensor([0.0, -2.0])}], [4, 4]
        ... )
        >>> state = CraftBalanced().aggregate(theta, clients).state
        >>> state["w"].round(decimals=4)  # three times the mean
        tensor([-3., -3.])
    """

    name = "craft_balanced"

    def __init__(
        self,
        *,
        server_lr: float = 3.0,
        norm_threshold: float = 1e-6,
        reference: Reference = "previous",
        beta: float = 0.9,
        targets: Targets = "sqrt",
        client_length: float | None = 1.0,
        scale: Scale = "mean",
        granularity: Granularity = "layer",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            server_lr=server_lr,
            norm_threshold=norm_threshold,
            reference=reference,
            beta=beta,
            targets=targets,
            client_length=client_length,
            scale=scale,
            granularity=granularity,
            **common,
        )


@hookimpl
def craft_register_aggregators(register: Callable[[str, object], None]) -> None:
    """Offer the rule under its name."""
    register(CraftBalanced.name, CraftBalanced)
