"""``craft-adapters run``: one run of the federation, from a config to a folder of figures."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from ._progress import display, figures

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..simulation import Done

__all__ = ["run"]


@click.command()
@click.argument("config", type=click.Path(dir_okay=False))
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override the config: rounds=50, aggregator.server_lr=0.1. May be repeated.",
)
@click.option(
    "--out", metavar="FOLDER", help="The run's folder; default: runs/<name of the config>."
)
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
@click.option("--tensorboard", is_flag=True, help="Write for TensorBoard too, into FOLDER/events.")
def run(
    config: str, overrides: tuple[str, ...], out: str | None, quiet: bool, tensorboard: bool
) -> None:
    """Train a federation as the YAML file CONFIG says. Its keys: docs/federation.md.

    A run that was stopped, in whatever way, goes on from its last checkpoint when the same command
    is given again.
    """
    from ..simulation import Run, read_config

    folder = Path(out) if out is not None else Path("runs", Path(config).stem)
    try:
        settings = read_config(config, overrides)
        sinks: list[Any] = []
        if tensorboard:
            from ..sinks import TensorBoardSink

            sinks.append(TensorBoardSink(folder / "events"))
        federation = Run(settings, str(folder), sinks=sinks)
        if tensorboard:
            federation.method.aggregator.observers.append(sinks[0].observe)
    except ImportError as error:
        raise click.ClickException(" ".join(str(error).split())) from error
    names = settings.names
    label = names["aggregator"]
    if names["method"] != "shared":
        label = f"{names['method']}+{label}"
    try:
        with _display(label, federation.round, settings.general.rounds, quiet) as shown:
            for done in federation:
                shown.show(done)
    except KeyboardInterrupt:
        raise click.ClickException(
            f"stopped after round {federation.round}; the same command goes on from the last "
            f"checkpoint in {folder}"
        ) from None
    finally:
        for sink in sinks:
            sink.close()
    if federation.diverged:
        raise click.ClickException(f"diverged: {federation.diverged}; {folder} says how it went")
    if not quiet:
        click.echo(f"written: {folder}")


class _Display(Protocol):
    def show(self, done: Done) -> None: ...


class _Quiet:
    def show(self, done: Done) -> None:
        pass


class _Lines:
    """For a file or a pipe: a line per evaluation."""

    def __init__(self, label: str) -> None:
        self.label = label

    def show(self, done: Done) -> None:
        for record in done.metrics:
            click.echo(f"{self.label}: round {done.round}/{done.rounds}: {figures(record)}")


class _Bar:
    """For a terminal: one bar, with the last evaluation and the time left."""

    def __init__(self, progress: Any, task: Any) -> None:
        self.progress, self.task = progress, task

    def show(self, done: Done) -> None:
        self.progress.update(self.task, completed=done.round)
        if done.metrics:
            text = "; ".join(map(figures, done.metrics))
            self.progress.update(self.task, figures=text)


def _display(label: str, start: int, rounds: int, quiet: bool) -> AbstractContextManager[_Display]:
    if quiet:
        return nullcontext(_Quiet())

    def bar(progress: Progress) -> _Display:
        task = progress.add_task(label, total=rounds, completed=start, figures="")
        return _Bar(progress, task)

    return display(lambda: _Lines(label), bar, "{task.fields[figures]}")
