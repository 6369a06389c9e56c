"""CRAFT (or any registered rule) as the server step of FLUTE (microsoft/msrflute).

FLUTE is a repository that is run from its own folder. In its YAML config::

    strategy: CRAFT               # in any case
    server_config:
      craft:                      # may be left out: the rule craft with its defaults
        aggregator: craft         # any registered rule; its options follow
        server_lr: 0.1

and the entry script stays as it is, or gets one line:

- No line changed: ``craft-adapters flute e2e_trainer.py -config ...``; under torchrun
  ``python -m torch.distributed.run --nproc_per_node=3 -m craft_adapters.flute e2e_trainer.py ...``.
- One line anywhere among its imports: ``import craft_adapters.flute.auto``.

The rule's step takes the place of the averaged pseudo-gradient, so FLUTE's server optimizer,
clipping and learning-rate schedule apply to it. Beside FLUTE's checkpoints lie the rule's state,
``craft_state.safetensors`` (taken up again with ``resume_from_checkpoint: true``), and
``craft_report.jsonl``, which gets a line a round.

Only parameters travel in FLUTE: BatchNorm statistics never leave its workers, and no rule sees
them. FLUTE itself is imported by these functions, never by importing this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._install import install
    from ._script import run_script

__all__ = ["install", "run_script"]

# On first use: the package is imported for its entry in the registry, which needs no torch.
_HOMES = {"install": "_install", "run_script": "_script"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
