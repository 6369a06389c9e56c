"""``craft-adapters fedml``: a FedML user's script, unchanged, with the server step replaced."""

from __future__ import annotations

import click

from ._script import as_python_would

__all__ = ["fedml"]


@click.command(
    # Everything after SCRIPT is the script's, --help included.
    context_settings={"allow_interspersed_args": False},
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def fedml(script: str, args: tuple[str, ...]) -> None:
    """Run a FedML SCRIPT with its ARGS, as "python SCRIPT ARGS" would.

    If the FedML config that it reads says "enable_craft: true", a rule of this package takes the
    server step; otherwise nothing changes.
    """
    from ..plugins import get_adapter

    descriptor = get_adapter("fedml")
    # Apart from running the script: an ImportError of the user's own keeps its traceback.
    try:
        adapter = descriptor.load()
        adapter.install()
    except ImportError as error:
        message = " ".join(str(error).split())
        wanted = f"craft-adapters[{descriptor.extra}]"
        if wanted not in message:
            message += f"; install it with: pip install {wanted!r}"
        raise click.ClickException(message) from error
    as_python_would(lambda: adapter.run_script(script, list(args)))
