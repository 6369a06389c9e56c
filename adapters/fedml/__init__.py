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

Runs with ``enable_craft: true`` that do not use FedML's MLOps do not contact the vendor's cloud.
FedML itself is imported by these functions, never by importing this package.
"""

from __future__ import annotations

from ._install import install, uninstall
from ._script import run_script
from ._wrap import wrap

__all__ = ["install", "run_script", "uninstall", "wrap"]
