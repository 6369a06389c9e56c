"""``import craft_adapters.flute.auto`` in FLUTE's entry script: ``install()`` as an import."""

from __future__ import annotations

from ._install import install

__all__: list[str] = []

install()
