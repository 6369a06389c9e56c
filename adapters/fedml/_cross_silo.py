"""Cross-silo horizontal, over any transport, and ``fedml.serving.Server``, which is built on it.

Replaced: ``FedMLAggregator`` (cross_silo/server/fedml_aggregator.py): after ``__init__`` the user's
ServerAggregator object gets another ``aggregate``; ``data_silo_selection`` is listened to;
``aggregate`` saves the model when it is done. And the handler of ``FedMLServerManager``
(fedml_server_manager.py) that calls them, so that a failure ends the job.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ._attach import Aggregate, Received, attach, step_of
from ._config import Settings, enabled
from ._failure import abort_on_error, guarded
from ._patches import RUN, Patches
from ._refusals import refuse_overridden, refuse_setup
from ._server_step import ServerStep

__all__ = ["patch"]


class _Run:
    """What a CRAFT run adds to FedML's aggregator object."""

    def __init__(self, aggregate: Aggregate, server: Any) -> None:
        self.step = aggregate.step
        self.server = server
        self.silos: Sequence[int] = range(server.client_num)
        aggregate.received = self.received
        current = server.get_global_model_params()
        if (saved := self.step.starting_model(current)) is not None:
            server.set_global_model_params(saved)

    def received(self) -> Received:
        """This round's uploads by client index: the data silo that a process trained on."""
        return [
            (int(silo), self.server.model_dict[position])
            for position, silo in enumerate(self.silos)
        ]


def patch(patches: Patches) -> None:
    """Replace the methods of the aggregator and of its manager."""
    from fedml.cross_silo.server.fedml_aggregator import FedMLAggregator
    from fedml.cross_silo.server.fedml_server_manager import FedMLServerManager

    patches.replace(FedMLAggregator, "__init__", _init)
    patches.replace(FedMLAggregator, "data_silo_selection", _data_silo_selection)
    patches.replace(FedMLAggregator, "aggregate", _aggregate)
    patches.replace(FedMLServerManager, "handle_message_receive_model_from_client", guarded)


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if step_of(self.aggregator) is None and not enabled(self.args):
            return
        with abort_on_error(self.args):
            refuse_setup(self.args)
            setattr(self, RUN, _Run(_attached(self.aggregator, self.args), self))

    return __init__


def _attached(server_aggregator: Any, args: Any) -> Aggregate:
    aggregate = getattr(server_aggregator, "aggregate", None)
    if isinstance(aggregate, Aggregate):
        if aggregate.explicit:
            return aggregate
        del server_aggregator.aggregate  # an earlier run's: a new server gets a new rule
    settings = Settings.from_args(args)
    if not settings.force:
        refuse_overridden(server_aggregator)
    model = getattr(server_aggregator, "model", None)
    return attach(server_aggregator, ServerStep(settings, model))


def _data_silo_selection(original: Callable[..., Any]) -> Callable[..., Any]:
    """Only listens. The manager asks before a round and sends each process its silo's index."""

    @functools.wraps(original)
    def data_silo_selection(self: Any, *args: Any, **kwargs: Any) -> Any:
        silos = original(self, *args, **kwargs)
        if (run := getattr(self, RUN, None)) is not None:
            run.silos = silos
        return silos

    return data_silo_selection


def _aggregate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def aggregate(self: Any) -> Any:
        result = original(self)
        if (run := getattr(self, RUN, None)) is not None:
            run.step.keep_model(result[0])  # after FedML's noise and clipping: what is sent out
        return result

    return aggregate
