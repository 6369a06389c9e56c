"""The MPI simulator: FedAvg.

Replaced: ``FedAVGAggregator`` (simulation/mpi/fedavg/FedAVGAggregator.py): ``__init__``,
``client_sampling``, ``aggregate`` and, inside it, ``_fedavg_aggregation_``, so that attacks stay as
they are; and the handler of ``FedAVGServerManager`` (FedAvgServerManager.py) that calls them. FedML
calls the user's ServerAggregator here for its parameters and tests, never to aggregate.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from ._attach import step_of
from ._config import Settings, enabled
from ._failure import abort_on_error, guarded
from ._patches import RUN, Patches
from ._refusals import refuse_setup
from ._server_step import ServerStep, Upload, identify

__all__ = ["patch"]


class _Run:
    """What a CRAFT run adds to FedML's aggregator object."""

    def __init__(self, step: ServerStep, server: Any) -> None:
        self.step = step
        self.server = server
        self.clients: Sequence[int] = ()
        current = server.get_global_model_params()
        if (saved := step.starting_model(current)) is not None:
            server.set_global_model_params(saved)

    def aggregate(self, uploads: Sequence[Upload]) -> OrderedDict[str, Any]:
        received = [
            (int(client), self.server.model_dict[worker])
            for worker, client in enumerate(self.clients[: self.server.worker_num])
        ]
        return self.step(
            self.server.get_global_model_params(),
            uploads,
            identify(uploads, received),
            self.server.args.round_idx,
        )


def patch(patches: Patches) -> None:
    """Replace the methods of the aggregator and of its manager."""
    from fedml.simulation.mpi.fedavg.FedAVGAggregator import FedAVGAggregator
    from fedml.simulation.mpi.fedavg.FedAvgServerManager import FedAVGServerManager

    patches.replace(FedAVGAggregator, "__init__", _init)
    patches.replace(FedAVGAggregator, "client_sampling", _client_sampling)
    patches.replace(FedAVGAggregator, "aggregate", _aggregate)
    patches.replace(FedAVGAggregator, "_fedavg_aggregation_", _fedavg_aggregation)
    patches.replace(FedAVGServerManager, "handle_message_receive_model_from_client", guarded)


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        step = step_of(self.aggregator)
        if step is None and not enabled(self.args):
            return
        with abort_on_error(self.args):
            refuse_setup(self.args)
            if step is None:
                model = getattr(self.aggregator, "model", None)
                step = ServerStep(Settings.from_args(self.args), model)
            setattr(self, RUN, _Run(step, self))

    return __init__


def _client_sampling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Only listens: worker k trains the k-th client of the sample."""

    @functools.wraps(original)
    def client_sampling(self: Any, *args: Any, **kwargs: Any) -> Any:
        clients = original(self, *args, **kwargs)
        if (run := getattr(self, RUN, None)) is not None:
            run.clients = clients
        return clients

    return client_sampling


def _aggregate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def aggregate(self: Any) -> Any:
        state = original(self)
        if (run := getattr(self, RUN, None)) is not None:
            run.step.keep_model(state)
        return state

    return aggregate


def _fedavg_aggregation(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _fedavg_aggregation_(self: Any, model_list: Sequence[Upload]) -> Any:
        run = getattr(self, RUN, None)
        return original(self, model_list) if run is None else run.aggregate(model_list)

    return _fedavg_aggregation_
