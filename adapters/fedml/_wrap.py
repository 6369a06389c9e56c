"""The explicit way: CRAFT on a ServerAggregator object that the caller has."""

from __future__ import annotations

import logging
from typing import Any

from craft_adapters import Aggregator
from craft_adapters.errors import UnsupportedSetup

from ._attach import Aggregate, attach
from ._config import Settings, enabled
from ._install import install
from ._refusals import refuse_overridden, refuse_setup
from ._server_step import ServerStep

__all__ = ["wrap"]


def wrap(server_aggregator: Any, aggregator: str | Aggregator | None = None, **options: Any) -> Any:
    """Replace the averaging of one FedML ServerAggregator object by a rule.

    For ``FedMLRunner(..., server_aggregator=wrap(...))`` and the server classes. Where FedML
    ignores its ``server_aggregator`` (sp, MPI), the rule runs all the same. What is not given here
    is read from the config's ``craft_`` keys; ``enable_craft`` need not be there, but
    ``enable_craft: false`` leaves the object as it is. Calls :func:`install`.

    Args:
        server_aggregator: A ``fedml.core.ServerAggregator``; changed and returned.
        aggregator: A rule's name, or an Aggregator for this server alone; the config's options of
            a rule are not used then. Default: the config's ``craft_aggregator``, else ``"craft"``.
        options: The rule's options, and the adapter's (``state_path``, ``model_path``,
            ``report_path``, ``on_empty_round``, ``force``), without the prefix ``craft_``.

    Returns:
        ``server_aggregator``.

    Raises:
        TypeError: no ServerAggregator.
        UnsupportedSetup: a setup in which the server step cannot be replaced, or an object that is
            wrapped already.
        OptionError: an unknown rule or option, or a value that it does not take.
        CheckpointError: the state file is there but is not this rule's.
        ImportError: FedML is not installed; names the extra.
    """
    install()
    args = getattr(server_aggregator, "args", None)
    if args is None:
        what = type(server_aggregator).__name__
        raise TypeError(
            f"wrap takes a fedml.core.ServerAggregator, which has its args, got {what}; for one of "
            "FedML's own call create_server_aggregator(model, args)"
        )
    if hasattr(args, "enable_craft") and not enabled(args):
        logging.info("craft-adapters: enable_craft is false, FedML's own averaging stays")
        return server_aggregator
    if isinstance(getattr(server_aggregator, "aggregate", None), Aggregate):
        raise UnsupportedSetup("this server aggregator is wrapped already; make a new one")
    refuse_setup(args)
    settings = Settings.explicit(args, aggregator, options)
    if not settings.force:
        refuse_overridden(server_aggregator)
    model = getattr(server_aggregator, "model", None)
    attach(server_aggregator, ServerStep(settings, model), explicit=True)
    return server_aggregator
