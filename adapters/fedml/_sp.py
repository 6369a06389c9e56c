"""The single-process simulator: FedAvg and FedProx.

Replaced: ``FedAvgAPI`` (simulation/sp/fedavg/fedavg_api.py) and ``FedProxTrainer``
(simulation/sp/fedprox/fedprox_trainer.py), their ``__init__``, ``train``, ``_client_sampling`` and
``_aggregate``. FedML's simulator throws the user's ServerAggregator away and keeps no global model:
one module serves the server and all clients in turn.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from craft_adapters.errors import UnsupportedSetup

from ._config import Settings, enabled
from ._patches import RUN, Patches
from ._refusals import refuse_setup
from ._server_step import ServerStep, Upload

__all__ = ["handed_over", "patch"]

_handed: ServerStep | None = None


@contextmanager
def handed_over(step: ServerStep | None) -> Iterator[None]:
    """A step made by ``wrap`` for the simulator that is built inside this context."""
    global _handed
    _handed = step
    try:
        yield
    finally:
        _handed = None


class _Run:
    """What a CRAFT run adds to FedML's simulator object."""

    def __init__(self, step: ServerStep, trainer: Any) -> None:
        self.step = step
        self.trainer = trainer
        self.clients: Sequence[int] = ()
        self.round = 0  # FedML's sp simulator does not set args.round_idx
        self.global_state: OrderedDict[str, Any] = OrderedDict()
        # FedML takes the first round's global model from here, and it is the live one: each client
        # would start from where the one before it stopped. Copies end that.
        live = trainer.get_model_params
        trainer.get_model_params = lambda: deepcopy(live())

    def start(self) -> None:
        """Before round 0: the saved model, if any, and our own copy of what clients start from."""
        saved = self.step.starting_model(self.trainer.get_model_params())
        if saved is not None:
            self.trainer.set_model_params(saved)
        self.global_state = self.trainer.get_model_params()

    def aggregate(self, uploads: Sequence[Upload]) -> OrderedDict[str, Any]:
        clients = [int(client) for client in self.clients[: len(uploads)]]
        self.global_state = self.step(self.global_state, uploads, clients, self.round)
        self.step.keep_model(self.global_state)
        self.round += 1
        return self.global_state


def patch(patches: Patches) -> None:
    """Replace the four methods on both simulators."""
    from fedml.simulation.sp.fedavg.fedavg_api import FedAvgAPI
    from fedml.simulation.sp.fedprox.fedprox_trainer import FedProxTrainer

    for simulator in (FedAvgAPI, FedProxTrainer):
        patches.replace(simulator, "__init__", functools.partial(_init, simulator))
        patches.replace(simulator, "train", _train)
        patches.replace(simulator, "_client_sampling", _client_sampling)
        patches.replace(simulator, "_aggregate", _aggregate)


def _init(simulator: Any, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        step = _handed
        if step is None and not enabled(self.args):
            return
        if type(self) is not simulator:  # HierarchicalTrainer and Group: groups, not clients
            raise UnsupportedSetup(
                f"{type(self).__qualname__} derives from {simulator.__qualname__} and may "
                "aggregate something else than client models; use FedAvg or FedProx"
            )
        refuse_setup(self.args)
        if step is None:
            step = ServerStep(Settings.from_args(self.args), self.model_trainer.model)
        setattr(self, RUN, _Run(step, self.model_trainer))

    return __init__


def _train(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def train(self: Any) -> None:
        if (run := getattr(self, RUN, None)) is not None:
            run.start()
        original(self)

    return train


def _client_sampling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Only listens: drawing again would disturb numpy's random state."""

    @functools.wraps(original)
    def _client_sampling(self: Any, *args: Any, **kwargs: Any) -> Any:
        clients = original(self, *args, **kwargs)
        if (run := getattr(self, RUN, None)) is not None:
            run.clients = clients
        return clients

    return _client_sampling


def _aggregate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _aggregate(self: Any, w_locals: Sequence[Upload]) -> Any:
        run = getattr(self, RUN, None)
        return original(self, w_locals) if run is None else run.aggregate(w_locals)

    return _aggregate
