"""``craft-adapters flute``: FLUTE's entry script, unchanged, with a strategy more."""

from __future__ import annotations

import click

from ._script import as_python_would

__all__ = ["flute"]


@click.command(
    # Everything after SCRIPT is the script's, --help included.
    context_settings={"allow_interspersed_args": False},
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def flute(script: str, args: tuple[str, ...]) -> None:
    """Run FLUTE's SCRIPT with its ARGS, as "python SCRIPT ARGS" would.

    If the FLUTE config that it reads says "strategy: CRAFT", a rule of this package takes the
    server step; otherwise nothing changes. Run it from FLUTE's folder. For several processes:
    "python -m torch.distributed.run --nproc_per_node=N -m craft_adapters.flute SCRIPT ARGS".
    """
    from ..plugins import get_adapter

    adapter = get_adapter("flute").load()
    as_python_would(lambda: adapter.run_script(script, list(args)))
