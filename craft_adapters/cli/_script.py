"""What the commands share that run a user's script."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ..errors import CraftError

__all__ = ["as_python_would"]


def as_python_would(run: Callable[[], None]) -> None:
    """Run a user's script, and end as Python would.

    Click takes some errors for its own (a broken pipe, the end of input, Ctrl-C) and would end
    without a traceback.
    """
    try:
        run()
    except (CraftError, SystemExit):
        raise
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)
