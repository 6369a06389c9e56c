"""Runs side by side, in processes of their own."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ._outcomes import ERROR_FILE
from ._run import Run
from ._sweep import SweepRun

__all__ = ["Event", "cores", "play"]

_LOG_FILE = "log.txt"
_PATIENCE = 5.0  # seconds for a process that was told to end


@dataclass(frozen=True, slots=True)
class Event:
    """A round of a run is done, or the run is over: it finished, diverged or failed."""

    run: SweepRun
    round: int
    over: bool


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def play(waiting: deque[SweepRun], folder: Path, jobs: int) -> Iterator[Event]:
    """Play runs in up to ``jobs`` processes until none is waiting and all are over.

    More runs may be put into ``waiting`` between two events. A run that raises, or whose process
    dies, leaves an error.txt in its folder, and the others go on; what it prints is in its
    log.txt. Processes end with this generator, with this process, however it ends, and never
    later than at the end of a round.

    Args:
        waiting: What to play; emptied.
        folder: The sweep's folder: a run is played in the folder in it that it names.
        jobs: At least 1. Each process gets its share of the cores for its threads.
    """
    workers: list[_Worker] = []
    try:
        while waiting or any(worker.run for worker in workers):
            for worker in workers:
                if worker.run is None and waiting:
                    worker.give(waiting.popleft(), folder)
            while waiting and len(workers) < jobs:
                workers.append(_Worker(threads=max(1, cores() // jobs)))
                workers[-1].give(waiting.popleft(), folder)
            busy = [worker for worker in workers if worker.run]
            ready = wait([worker.connection for worker in busy])
            for worker in [worker for worker in busy if worker.connection in ready]:
                event = worker.news(folder)
                if event.over and not worker.process.is_alive():
                    workers.remove(worker)
                yield event
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.end()


@dataclass(slots=True, eq=False)
class _Worker:
    """A process that plays one run after the other."""

    threads: int
    run: SweepRun | None = None
    round: int = 0
    process: Any = field(init=False)
    connection: Connection = field(init=False)

    def __post_init__(self) -> None:
        # Spawned on all platforms alike: a fork of a process with threads may hang.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        with _environment(self.threads):
            self.process.start()
        theirs.close()

    def give(self, run: SweepRun, folder: Path) -> None:
        self.run, self.round = run, 0
        with suppress(OSError):  # it died: news() finds out
            self.connection.send((run.config, str(folder / run.folder)))

    def news(self, folder: Path) -> Event:
        assert self.run is not None
        run, over = self.run, False
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            _write_error(folder / run.folder, f"the process ended with exit code {code}")
            message = None
        if message is None:
            self.run, over = None, True
        else:
            self.round = message
        return Event(run, self.round, over)

    def end(self) -> None:
        self.process.join(_PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()


@contextmanager
def _environment(threads: int) -> Iterator[None]:
    """What a process reads when it starts.

    OpenMP: threads that wait do so asleep. glibc: so much freed memory is kept, else every batch
    asks the system for its own (a CNN spent 40 % of its time there).
    """
    wanted = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "MALLOC_TOP_PAD_": str(1 << 26),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Alone(BaseException):
    """The process that started this one is gone."""


def _work(connection: Connection) -> None:
    """In the process: a number after each round, None when a run is over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends us

    def tell(message: int | None) -> None:
        try:
            connection.send(message)
        except OSError:
            raise _Alone from None

    with suppress(EOFError, ConnectionError, _Alone):
        while True:
            config, folder = connection.recv()
            _redirect(Path(folder))
            try:
                for done in Run(config, folder):
                    tell(done.round)
            except Exception:
                _write_error(Path(folder), traceback.format_exc())
            tell(None)


def _redirect(folder: Path) -> None:
    """What this process writes, down to C's own messages, goes to the run's log."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ERROR_FILE).unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with (folder / _LOG_FILE).open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    faulthandler.enable()


def _write_error(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ERROR_FILE).write_text(text.rstrip() + "\n", encoding="utf-8")
