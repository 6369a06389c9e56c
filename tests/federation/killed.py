"""A run that kills itself, as a power cut would: at the n-th write, before or after it.

python killed.py FOLDER CONFIG [WRITE before|after]
"""

from __future__ import annotations

import json
import os
import signal
import sys

from craft_adapters.simulation import Run, read_config

folder, config, *when = sys.argv[1:]
if when:
    left = int(when[0])
    replace = os.replace

    def dying(source: str, target: str) -> None:
        global left
        left -= 1
        if left == 0 and when[1] == "after":
            replace(source, target)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = dying  # type: ignore[assignment]
for done in Run(read_config(json.loads(config)), folder):
    print(done.round, flush=True)
