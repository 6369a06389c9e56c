"""Plug-ins: rules and host adapters, ours and other people's, through the same door.

A distribution offers a plug-in with an entry point in the group ``craft_adapters``::

    [project.entry-points.craft_adapters]
    my_rule = "my_package.rule"

and the module it names implements one or more hooks::

    from craft_adapters.plugins import hookimpl

    @hookimpl
    def craft_register_aggregators(register):
        register("my_rule", MyRule)

A plug-in that fails is left out, whole, and ``craft-adapters list`` says why. With
``CRAFT_ADAPTERS_STRICT=1`` it raises instead; ``CRAFT_ADAPTERS_PLUGINS=craft,my_rule`` loads only
the entry points that it names. Importing this package loads no plug-in and does not import torch.
"""

from __future__ import annotations

from ._discovery import BrokenPlugin
from ._manager import (
    PluginManager,
    available_adapters,
    available_aggregators,
    get_adapter,
    get_aggregator,
    get_plugin_manager,
)
from ._specs import CAPABILITIES, AdapterDescriptor, hookimpl

__all__ = [
    "CAPABILITIES",
    "AdapterDescriptor",
    "BrokenPlugin",
    "PluginManager",
    "available_adapters",
    "available_aggregators",
    "get_adapter",
    "get_aggregator",
    "get_plugin_manager",
    "hookimpl",
]
