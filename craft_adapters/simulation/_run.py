"""One run: from a configuration to a folder of figures, restartable at any round."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any, Protocol

import torch

from .._contract import AggregationReport, State
from .._intake import first_nonfinite
from ..errors import CheckpointError
from ..metrics import ClientScores, fairness
from ..sinks import JsonlSink
from ._accord import agreed, evaluated, tell_rate
from ._config import RunConfig
from ._federation import Federation
from ._folder import RunFolder
from ._partition import sample_clients, surviving_clients
from ._split_file import load_split, save_split

__all__ = ["Done", "Run", "Sink"]


class Sink(Protocol):
    """Somewhere that records go besides the run's own files."""

    def write(self, record: Mapping[Any, Any]) -> None:
        """Take one record of metrics.jsonl or rounds.jsonl."""


@dataclass(frozen=True, slots=True)
class Done:
    """What was done since the last one: a round, or the evaluation of the initial model.

    Attributes:
        round: Number of rounds that are complete.
        rounds: Number of rounds of the whole run.
        metrics: The records of the evaluation, if there was one.
    """

    round: int
    rounds: int
    metrics: tuple[dict[str, Any], ...] = ()


class Run:
    """A run in a folder: starts it, or goes on where its last checkpoint is.

    Killed at any moment and started again, a run ends bit for bit where the unbroken one ends, on
    the same machine with the same versions and number of threads: model, clients' own models, the
    rule's state, both files of lines but for the times in them. There is no generator to save: all
    random numbers depend on the seed and on what they are for. An engine that was chosen by
    measurement is kept.

    A run that diverges ends there: when an entry of the global model is NaN or infinite, when no
    client's training of a round stays finite, or when an evaluation finds no client with a finite
    loss. Started again, it diverges at the same place.

    Args:
        config: See :func:`read_config`.
        folder: The run's folder; made if it is missing. One that holds a run of the same
            configuration is gone on with; more ``rounds`` than before make it longer.
        sinks: Get each record too.

    Attributes:
        round: Number of rounds that are complete.
        state: The global model.
        diverged: When and how the run diverged; None if it did not.

    Raises:
        OptionError: the folder holds a run of another configuration; says what differs.
        CheckpointError: the folder's checkpoint is damaged.

    Example:
        >>> import tempfile
        >>> from craft_adapters.simulation import read_config
        >>> config = read_config({"partition": {"clients": 20}}, ["rounds=2", "evaluate_every=1"])
        >>> run = Run(config, tempfile.mkdtemp())
        >>> [done.round for done in run], run.round
        ([0, 1, 2], 2)
    """

    def __init__(
        self,
        config: RunConfig,
        folder: str | RunFolder,
        *,
        sinks: Iterable[Sink] = (),
    ) -> None:
        self.config = config
        self.folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
        self.sinks = tuple(sinks)
        self.method = config.method()
        self.diverged: str | None = None
        resolved = config.resolved()
        self.folder.compare(resolved)
        dataset = config.dataset()
        if (self.folder / "partition.json").is_file():
            split = load_split(self.folder / "partition.json", len(dataset), seed=0)
        else:
            split = config.split(dataset)
        self.participants = config.participants(len(split.train))
        model = config.model(dataset)
        training = agreed(self.method.aggregator, config.training)
        saved = self.folder.read("checkpoint.json")
        if saved is not None and saved.get("engine"):
            training = replace(training, engine=saved["engine"])
        self.federation = Federation(dataset, split, model, training, seed=config.general.seed)
        self.method.keep_in(self.folder / "clients")
        self.round = 0
        self.state: State = {
            name: value.detach().clone().to(config.device)
            for name, value in model.state_dict().items()
        }
        self.folder.write("config.json", resolved)
        if not (self.folder / "partition.json").is_file():
            save_split(split, self.folder / "partition.json")
        self._resume(saved)

    def __iter__(self) -> Iterator[Done]:
        """Go on to the last round, a round at a time."""
        general = self.config.general
        with (
            JsonlSink(self.folder / "metrics.jsonl") as metrics,
            JsonlSink(self.folder / "rounds.jsonl") as rounds,
        ):
            if not self._resumed:
                records = self._evaluate(metrics)
                self._checkpoint()
                yield Done(0, general.rounds, records)
            if self.round < general.rounds:
                self.folder.update("run.json", status="running", diverged=None)
            while self.round < general.rounds and not self.diverged:
                self._step(rounds)
                last = self.round == general.rounds
                records = ()
                if not self.diverged and (last or self.round % general.evaluate_every == 0):
                    records = self._evaluate(metrics)
                if not self.diverged and (last or self.round % general.checkpoint_every == 0):
                    self._checkpoint()
                yield Done(self.round, general.rounds, records)
        status = "diverged" if self.diverged else "finished"
        self.folder.update("run.json", status=status, diverged=self.diverged)

    def _step(self, sink: JsonlSink) -> None:
        general, number = self.config.general, self.round
        drawn = sample_clients(
            len(self.federation), self.participants, round=number, seed=general.seed
        )
        clients = surviving_clients(drawn, general.drop_rate, round=number, seed=general.seed)
        tell_rate(self.method.aggregator, self.federation.training.rate(number))
        result = self.method.round(self.federation, self.state, clients, number)
        if result is not None:
            self.state = result.state
        record: dict[str, Any] = {"round": number, "clients": clients}
        if result is not None:
            record |= _summary(result.report)
        self._put(sink, record)
        self.round += 1
        if result is None and any(map(self.federation.num_examples, clients)):
            self._diverge("no client's training stayed finite")
        elif entry := first_nonfinite(self.state):
            self._diverge(f"entry {entry!r} of the global model is not finite")

    def _diverge(self, how: str) -> None:
        self.diverged = f"round {self.round}: {how}"

    def _evaluate(self, sink: JsonlSink) -> tuple[dict[str, Any], ...]:
        state = evaluated(self.method.aggregator, self.state)
        scores = self.method.evaluate(self.federation, state)
        records = tuple(_record(self.round, kind, scored) for kind, scored in scores.items())
        for record in records:
            self._put(sink, record)
        for kind, scored in scores.items():
            losses = [loss for loss in scored.loss.values() if loss is not None]
            if losses and not any(map(math.isfinite, losses)):
                self._diverge(f"no client's loss of the {kind} model is finite")
        return records

    def _put(self, sink: JsonlSink, record: dict[str, Any]) -> None:
        sink.write(record)
        for other in self.sinks:
            other.write(record)

    def _checkpoint(self) -> None:
        extra = {"engine": self.federation.engine, "method": self.method.commit()}
        self.folder.save(self.round, self.state, self.method.aggregator, extra)
        self.method.prune()

    def _resume(self, saved: Any) -> None:
        loaded = self.folder.load(self.method.aggregator)
        self._resumed = loaded is not None
        if loaded is None:
            self.folder.cut({})
            self.folder.write("run.json", self._environment())
            return
        saved, state = loaded
        if state.keys() != self.state.keys():
            raise CheckpointError(f"{self.folder.path}: the checkpoint is of another model")
        self.state = {name: value.to(self.state[name].device) for name, value in state.items()}
        self.method.restore(saved["method"])
        self.round = saved["round"]

    def _environment(self) -> dict[str, Any]:
        from .. import __version__

        device = self.config.device
        named = {"cuda": lambda: torch.cuda.get_device_name(device)}
        return {
            "status": "running",
            "diverged": None,
            "seed": self.config.general.seed,
            "craft-adapters": __version__,
            "torch": str(torch.__version__),
            "numpy": version("numpy"),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "system": platform.system(),
            "device": str(device),
            "device_name": named.get(device.type, platform.processor)(),
            "threads": torch.get_num_threads(),
            "clients": len(self.federation),
            "clients_per_round": self.participants,
            "train_examples": sum(map(len, self.federation.split.train)),
            "test_examples": sum(map(len, self.federation.split.test)),
        }


def _record(round: int, kind: str, scores: ClientScores) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    summary = asdict(fairness(scores.accuracy, scores.num_examples))
    losses = [loss for loss in scores.loss.values() if loss is not None]
    return {
        "round": round,
        "model": kind,
        "mean": summary.pop("mean_unweighted"),
        "std": summary.pop("std_unweighted"),
        **summary,
        "loss": sum(losses) / len(losses) if losses else None,
        "client_accuracy": scores.accuracy,
        "client_loss": scores.loss,
    }


def _summary(report: AggregationReport) -> dict[str, Any]:
    """One line of rounds.jsonl."""
    return {
        "rule": report.rule,
        "aggregate_seconds": report.seconds,
        "dropped": [asdict(client) for client in report.dropped],
        "conflicts_before": report.conflicts_before,
        "conflicts_after": report.conflicts_after,
        "groups": {
            group.name: {
                "conflicts_before": group.conflicts_before,
                "conflicts_after": len(group.conflicts_after),
                "step_norm": group.step_norm,
                "cosine_to_reference": group.cosine_to_reference,
            }
            for group in report.groups
        },
    }
