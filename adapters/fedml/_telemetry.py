"""Runs without FedML's MLOps do not wait for the vendor's cloud.

``fedml.init`` fetches a configuration from the vendor's server, five tries without a timeout, for
every kind of run: on a network that answers nothing it never comes back. Runs outside the
simulator do it three times more, in a check of the environment. What it fetches is used by MLOps
and by the MQTT transports only, so for a CRAFT run that has neither, the fetch is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ._config import enabled
from ._patches import Patches

__all__ = ["needs_no_cloud", "patch"]


class _Skipped(BaseException):
    """Passes FedML's ``except Exception``, which would try again."""


def needs_no_cloud(args: Any) -> bool:
    """Whether this is a CRAFT run that uses nothing of the vendor's cloud."""
    return (
        enabled(args)
        and not getattr(args, "using_mlops", False)
        and not getattr(args, "enable_tracking", False)
        and not str(getattr(args, "backend", "")).startswith("MQTT")
    )


def patch(patches: Patches) -> None:
    """Replace ``fedml.core.mlops.fetch_config``, which ``fedml.init`` calls at its end."""
    from fedml.core import mlops
    from fedml.core.mlops.mlops_configs import MLOpsConfigs

    def make(fetch_config: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fetch_config)
        def without_fetching(args: Any, *rest: Any, **options: Any) -> Any:
            if not needs_no_cloud(args):
                return fetch_config(args, *rest, **options)
            # FedML's function also fills in args; only the request is cut out of it.
            with _no_request(MLOpsConfigs):
                try:
                    return fetch_config(args, *rest, **options)
                except _Skipped:
                    return False  # FedML's answer when there is no internet

        return without_fetching

    patches.replace(mlops, "fetch_config", make)


@contextmanager
def _no_request(configs: Any) -> Iterator[None]:
    def skip() -> None:
        raise _Skipped

    original = vars(configs)["fetch_all_configs"]
    configs.fetch_all_configs = staticmethod(skip)
    try:
        yield
    finally:
        configs.fetch_all_configs = original
