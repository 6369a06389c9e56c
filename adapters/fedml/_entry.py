"""FedML's entrances: where a setup is refused, before anything is trained.

Replaced: ``fedml.init``, and the constructors of ``FedMLRunner``, of the simulators, and of the
servers and clients that scripts also build directly. The config is the same for all processes of a
run, so all of them refuse, and nobody is left waiting.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from craft_adapters.errors import UnsupportedSetup

from . import _sp
from ._attach import step_of
from ._config import Settings, enabled, warn_if_forgotten
from ._failure import abort_on_error
from ._patches import Patches
from ._refusals import (
    refuse_algorithm_flow,
    refuse_cross_cloud,
    refuse_requirements,
    refuse_setup,
)
from ._telemetry import needs_no_cloud

__all__ = ["patch"]


def patch(patches: Patches) -> None:
    """Replace ``fedml.init`` and the constructors."""
    import fedml
    from fedml.cross_cloud import Client as CloudClient
    from fedml.cross_cloud import Server as CloudServer
    from fedml.cross_silo import Client as SiloClient
    from fedml.cross_silo import Server as SiloServer
    from fedml.serving import Client as ServingClient
    from fedml.serving import Server as ServingServer
    from fedml.simulation import SimulatorMPI, SimulatorNCCL, SimulatorSingleProcess

    patches.replace(fedml, "init", _init)
    patches.replace(fedml.FedMLRunner, "__init__", _runner)
    patches.replace(SimulatorSingleProcess, "__init__", _simulator)
    direct = (SimulatorMPI, SimulatorNCCL, SiloServer, SiloClient, ServingServer, ServingClient)
    for entrance in direct:
        patches.replace(entrance, "__init__", _refusing(refuse_setup))
    for entrance in (CloudServer, CloudClient):
        patches.replace(entrance, "__init__", _refusing(lambda args: refuse_cross_cloud()))
    # fedml.cross_device needs MNN to be imported; its runs are refused by the other entrances.


def _init(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init(args: Any = None, check_env: bool = True, should_init_logs: bool = True) -> Any:
        import fedml

        if args is None:  # as fedml.init does
            args = fedml.load_arguments(fedml._global_training_type, fedml._global_comm_backend)
        warn_if_forgotten(args)
        if enabled(args):
            refuse_setup(_Defaulted(args, fedml))
            _check_options(args)
            # The environment check asks the vendor's server three times, without a timeout.
            check_env = check_env and not needs_no_cloud(args)
        return original(args, check_env=check_env, should_init_logs=should_init_logs)

    return init


class _Defaulted:
    """``args``, with what one-liners such as ``fedml.run_simulation`` set outside of it."""

    def __init__(self, args: Any, fedml: Any) -> None:
        self._args = args
        self.training_type = getattr(args, "training_type", fedml._global_training_type)
        self.backend = getattr(args, "backend", fedml._global_comm_backend)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


def _check_options(args: Any) -> None:
    """A wrong key or value is found before round 0; only the server needs the rule itself."""
    settings = Settings.from_args(args)
    if getattr(args, "backend", None) in ("sp", "MPI") or getattr(args, "rank", 0) == 0:
        rule = settings.new_rule()
        refuse_requirements(rule.name, rule.requires)


def _runner(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        config = given["args"]
        if _active(given):
            with abort_on_error(config):
                if given.get("algorithm_flow") is not None:
                    refuse_algorithm_flow()
                refuse_setup(config)
                if getattr(config, "training_type", None) == "fedml_serving":
                    raise UnsupportedSetup(
                        "training_type 'fedml_serving' through FedMLRunner: FedML 0.9.6 passes its "
                        "arguments on in the wrong places; use fedml.serving.Server and .Client"
                    )
        original(self, *args, **kwargs)

    return __init__


def _simulator(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        if _active(given):
            refuse_setup(given["args"])
        with _sp.handed_over(step_of(given.get("server_aggregator"))):
            original(self, *args, **kwargs)

    return __init__


def _refusing(
    refuse: Callable[[Any], None],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes constructors that ask ``refuse(args)`` first, in a run of ours."""

    def make(original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(self, *args, **kwargs).arguments
            if _active(given):
                with abort_on_error(given["args"]):
                    refuse(given["args"])
            original(self, *args, **kwargs)

        return __init__

    return make


def _active(given: dict[str, Any]) -> bool:
    return enabled(given["args"]) or step_of(given.get("server_aggregator")) is not None
