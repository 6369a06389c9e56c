"""``craft-adapters check``: the conformance kit's verdict on an adapter."""

from __future__ import annotations

import contextlib
import logging
import sys

import click

__all__ = ["check"]

_EXIT = {"pass": 0, "fail": 1, "incomplete": 3}  # 2 is click's: it could not be run


@click.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--only", metavar="A,B", help="Run only these checks; the verdict is incomplete then."
)
@click.option("--device", default="cpu", show_default=True, help="Where models and replies are.")
@click.option("--verbose", is_flag=True, help="Show what the host logs.")
def check(name: str, as_json: bool, only: str | None, device: str, verbose: bool) -> None:
    """Check the adapter NAME on its own host; "craft-adapters list" shows the names.

    The exit code is the verdict: 0 pass, 1 fail, 3 incomplete (nothing failed, but a group of
    checks has proved nothing), 2 if the checks could not be run.
    """
    from ..errors import CraftError
    from ..testing import check_adapter

    if not verbose:
        logging.disable(logging.CRITICAL)
    try:
        # What a host prints must not end up in the report.
        with contextlib.redirect_stdout(sys.stderr):
            chosen = None if only is None else [word.strip() for word in only.split(",")]
            report = check_adapter(name, only=chosen, device=device)
    except (CraftError, ImportError) as error:
        raise click.UsageError(" ".join(str(error).split())) from error
    finally:
        logging.disable(logging.NOTSET)
    click.echo(report.to_json() if as_json else report.to_text())
    sys.exit(_EXIT[report.verdict])
