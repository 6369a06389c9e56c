"""The door: plug-ins that bring aggregation rules, host adapters and observers.

A plug-in is a module (or object) named by an entry point in the group ``craft_adapters``, with
any of the hooks in ``_specs.py``, marked by :data:`hookimpl`. The bundled rules and adapters come
in the same way.
"""

from ._manager import (
    BrokenPlugin,
    PluginManager,
    available_adapters,
    available_aggregators,
    get_adapter,
    get_aggregator,
    get_plugin_manager,
)
from ._specs import AdapterDescriptor, hookimpl

__all__ = [
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
