"""``python -m craft_adapters.flute e2e_trainer.py -config ...``: FLUTE's script, unchanged."""

from __future__ import annotations

import sys

from ._script import run_script

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m craft_adapters.flute SCRIPT [ARGUMENTS OF THE SCRIPT ...]")
    run_script(sys.argv[1], sys.argv[2:])
