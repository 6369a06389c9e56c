"""Ending the whole job when one of its processes fails, instead of leaving the others waiting.

Replaced: ``FedMLCommManager.register_message_receive_handler`` (in
core/distributed/fedml_comm_manager.py), by which servers and clients alike say what they do with a
message. Messages that have no handler raise in every FedML run, and nothing comes of it.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ._config import enabled
from ._patches import RUN, Patches

__all__ = ["abort_on_error", "guarded", "patch"]

_FAREWELL_SECONDS = 10.0


def patch(patches: Patches) -> None:
    """On MPI, let a rank of our run whose handler raises take the others with it."""
    from fedml.core.distributed.fedml_comm_manager import FedMLCommManager

    patches.replace(FedMLCommManager, "register_message_receive_handler", _aborting)


def _aborting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def register_message_receive_handler(self: Any, kind: Any, handler: Any) -> None:
        if enabled(self.args):
            handler = abort_on_error(self.args)(handler)
        original(self, kind, handler)

    return register_message_receive_handler


@contextmanager
def abort_on_error(args: Any) -> Iterator[None]:
    """On MPI, an exception ends all ranks; elsewhere it just goes on its way.

    FedML's receive threads are not daemons, so a rank that raises never exits, and the others
    wait for its next message.
    """
    try:
        yield
    except Exception:
        if getattr(args, "backend", None) == "MPI":
            _abort_mpi()
        raise


@contextmanager
def _end_job_on_error(manager: Any) -> Iterator[None]:
    """Around a server manager's handler: an exception in it ends the job.

    On MPI see :func:`abort_on_error`. Elsewhere the clients are sent FedML's own finish message
    (they exit with code 0: FedML has no message that says why), and the server raises.
    """
    try:
        with abort_on_error(manager.args):
            yield
    except Exception:
        logging.error("craft-adapters: the server failed, the clients are told to stop")
        _dismiss_clients(manager)
        raise


def guarded(original: Callable[..., None]) -> Callable[..., None]:
    """A server manager's ``handle_message_receive_model_from_client`` that ends the job it fails.

    Runs that are not ours go through the original.
    """

    @functools.wraps(original)
    def handle_message_receive_model_from_client(self: Any, msg_params: Any) -> None:
        if getattr(self.aggregator, RUN, None) is None:
            original(self, msg_params)
            return
        with _end_job_on_error(self):
            original(self, msg_params)

    return handle_message_receive_model_from_client


def _abort_mpi() -> None:
    mpi = sys.modules.get("mpi4py.MPI")  # not imported yet: nobody else is in this job
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if mpi.COMM_WORLD.Get_size() == 1:
        return
    traceback.print_exc()
    print("craft-adapters: ending the MPI job, see the error above", file=sys.stderr, flush=True)
    mpi.COMM_WORLD.Abort(1)


def _dismiss_clients(manager: Any) -> None:
    """What ``FedMLServerManager.cleanup`` does, but one client that is gone does not stop it.

    A client answers the finish message before it stops, and crashes if the server is gone by then;
    on GRPC, where answers wait in a queue, the server stays until all have come.
    """
    clients = zip(
        getattr(manager, "client_id_list_in_this_round", None) or (),
        getattr(manager, "data_silo_index_list", None) or (),
        strict=False,
    )
    queue = getattr(getattr(manager.com_manager, "grpc_servicer", None), "message_q", None)
    expected = 0 if queue is None else queue.qsize()
    for client, silo in clients:
        try:
            manager.send_message_finish(client, silo)
            expected += 1
        except Exception as error:  # any of the transports' own errors
            logging.warning("craft-adapters: client %s cannot be told to stop: %s", client, error)
    deadline = time.monotonic() + _FAREWELL_SECONDS
    while queue is not None and queue.qsize() < expected and time.monotonic() < deadline:
        time.sleep(0.05)
    if queue is not None:
        time.sleep(0.5)  # the last answer is queued before its sender has the reply
