"""How figures are shown while runs go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["figures"]


def figures(record: Mapping[str, Any]) -> str:
    """A record of metrics.jsonl in a few words.

    >>> figures({"model": "global", "mean": 0.91, "worst10": None})
    'global 0.910, worst 10 % -'
    """

    def text(name: str) -> str:
        return "-" if record[name] is None else f"{record[name]:.3f}"

    return f"{record['model']} {text('mean')}, worst 10 % {text('worst10')}"
