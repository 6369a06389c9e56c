"""CRAFT (or any registered rule) as the server step of FedML 0.9.6.

Three ways in, one code behind them. In a FedML config, on every platform the same section::

    craft_args:
      enable_craft: true
      craft_aggregator: craft     # any registered rule; its options follow with the prefix craft_
      craft_server_lr: 0.1

- No line changed: ``craft-adapters fedml main.py --cf fedml_config.yaml``, or
  ``python -m craft_adapters.fedml main.py --cf fedml_config.yaml``.
- One line, before ``fedml.init``: ``craft_adapters.fedml.install()``.
- Explicit: ``FedMLRunner(..., server_aggregator=craft_adapters.fedml.wrap(aggregator))``.

Files: ``craft_state_path`` holds the rule's state, saved after each round and resumed from if it is
there. FedML itself keeps nothing: it starts again from the model that the script builds, and counts
its rounds from 0. With ``craft_model_path`` the global model is saved and resumed too; set
``comm_round`` to the rounds that are left. (A server killed between the two writes goes on from a
state and a model that are one round apart.) ``craft_report_path`` gets a line of JSON a round.

Runs with ``enable_craft: true`` that do not use FedML's MLOps do not contact the vendor's cloud.
FedML itself is imported by these functions, never by importing this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._install import install, uninstall
    from ._script import run_script
    from ._wrap import wrap

__all__ = ["install", "run_script", "uninstall", "wrap"]

# On first use: the package is imported for its entry in the registry, which needs no torch.
_HOMES = {
    "install": "_install",
    "run_script": "_script",
    "uninstall": "_install",
    "wrap": "_wrap",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
