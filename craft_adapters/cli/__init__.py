"""The command line, ``craft-adapters``.

The commands import what they need when they run, so that ``--help`` is fast.
"""

from __future__ import annotations

from typing import Any

import click

from ..errors import CraftError
from ._check import check
from ._fedml import fedml
from ._flute import flute
from ._list import list_plugins
from ._new_adapter import new_adapter
from ._report import report
from ._run import run
from ._sweep import sweep

__all__ = ["main"]


class _Group(click.Group):
    """Shows the errors that this package raises on purpose as one line, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CraftError as error:
            raise click.ClickException(" ".join(str(error).split())) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="craft-adapters")
def main() -> None:
    """CRAFT, conflict-resolved aggregation, in the federated-learning framework you run."""


main.add_command(list_plugins)
main.add_command(fedml)
main.add_command(flute)
main.add_command(run)
main.add_command(sweep)
main.add_command(report)
main.add_command(check)
main.add_command(new_adapter)
