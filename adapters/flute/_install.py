"""The one line: ``strategy: CRAFT`` becomes a strategy of FLUTE's."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from craft_adapters.errors import UnsupportedSetup

from ._config import CLIENT_ID, SECTION, Settings, chosen
from ._strategy import craft_strategy

__all__ = ["install"]

_LOG = logging.getLogger(__name__)
_MARK = "_craft_adapters"

Method = Callable[..., Any]


def install() -> None:
    """Let FLUTE runs whose config says ``strategy: CRAFT`` use a registered rule.

    Call it in every process of a run, before or after FLUTE's modules are imported; calling it
    again does nothing. Runs with another strategy are left as they are.

    Replaced are ``select_strategy`` in ``core.strategies``, and in ``core.server`` and
    ``core.client``, which bind it by name; ``core.client.Client.__init__``, for a strategy is not
    told whose client it is; and ``core.federated.Worker.__init__``, which refuses a wrong config
    before anything is trained and, in runs of a single process, gives the worker its own model
    (FLUTE gives it the server's, so that clients train on the global model itself).

    Raises:
        ImportError: FLUTE, or something it imports, is not there; says which.
        UnsupportedSetup: a FLUTE that lacks one of these names.
    """
    # federated first, as FLUTE's own script does: it and core.client import each other.
    federated, strategies, server, client = map(
        _import, ("core.federated", "core.strategies", "core.server", "core.client")
    )
    if hasattr(strategies, _MARK):
        return
    places = [(module, "select_strategy", _selecting) for module in (strategies, server, client)]
    places += [(_has(client, "Client"), "__init__", _numbered)]
    places += [(_has(federated, "Worker"), "__init__", _separate)]
    made = [(owner, name, make(_has(owner, name))) for owner, name, make in places]
    for owner, name, replacement in made:
        setattr(owner, name, replacement)
    setattr(strategies, _MARK, True)


def _selecting(original: Method) -> Method:
    @functools.wraps(original)
    def select_strategy(strategy: str) -> Any:
        return craft_strategy if chosen({"strategy": strategy}) else original(strategy)

    return select_strategy


def _numbered(original: Method) -> Method:
    """The client's config, which its strategy is made with, says who it is."""

    @functools.wraps(original)
    def __init__(self: Any, client_id: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, client_id, config, *args, **kwargs)
        if chosen(config):
            self.config[CLIENT_ID] = client_id[0]  # a copy: FLUTE copies it for every client

    return __init__


def _separate(original: Method) -> Method:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        config = given.arguments["config"]
        if chosen(config):
            Settings.from_config(config).new_rule()
            if importlib.import_module("core.federated").size() == 1:
                given.arguments["model"] = copy.deepcopy(given.arguments["model"])
        elif SECTION in config["server_config"]:
            _LOG.warning(
                "the config has server_config.%s but strategy: %s, so no rule of craft-adapters "
                "is used; set strategy: CRAFT",
                SECTION,
                config["strategy"],
            )
        original(*given.args, **given.kwargs)

    return __init__


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name or ""
        if missing.partition(".")[0] != "core":
            raise ImportError(
                f"FLUTE does not import: {error}. Install what its requirements.txt names "
                "(azureml is imported even where it is unused; a stand-in of a few lines will do)",
                name=error.name,
            ) from error
        raise ImportError(
            f"FLUTE is not on the path ({error}): it is no package but a repository "
            "(microsoft/msrflute); run its script from its folder",
            name=error.name,
        ) from error


def _has(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise UnsupportedSetup(
            f"{owner.__name__} has no {name}, which the adapter replaces: either it is another "
            f"module of that name ({getattr(owner, '__file__', 'no file')}), or another FLUTE than "
            "the one tested (microsoft/msrflute at 8bfe085)"
        )
    return getattr(owner, name)
