"""The folder of a run: what is in it, and how it survives being killed at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import _checkpoint
from .._contract import Aggregator, State
from .._files import write_atomically
from ..errors import CheckpointError, OptionError
from ._config import settled

__all__ = ["LINES", "RunFolder", "flat", "read_lines"]

_MODEL = "the global model of a federation"
LINES = ("metrics.jsonl", "rounds.jsonl")


class RunFolder:
    """Files of one run; all names are legal on Windows too.

    ================== ==================================================================
    config.json        the configuration with every default filled in
    run.json           "running", "finished" or "diverged"; seed, versions, device
    partition.json     who holds which examples
    metrics.jsonl      a line per evaluation and kind of model, readable while running
    rounds.jsonl       a line per round: who took part, conflicts per layer, time
    checkpoint.json    the last checkpoint: the round, and which files are its
    model-*, rule-*    global model and the rule's state, safetensors
    clients/           models that clients keep, safetensors
    ================== ==================================================================

    A checkpoint is one rename, of ``checkpoint.json``. The files it names are written before,
    under names of their own; older ones are deleted after. The two files of lines only grow:
    the checkpoint holds their lengths, and going back to it cuts what was written later.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def compare(self, resolved: Mapping[str, Any]) -> None:
        """Check that no run of another configuration is here; its length may be another.

        Raises:
            OptionError: there is one; says what differs.
        """
        before = self.read("config.json")
        if before is None:
            return
        old, new = flat(settled(before)), flat(resolved)
        for harmless in ("rounds", "checkpoint_every"):
            old.pop(harmless, None), new.pop(harmless, None)
        differ = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        if differ:
            listed = "; ".join(f"{k}: {old.get(k)!r} there, {new.get(k)!r} here" for k in differ)
            raise OptionError(
                f"{self.path} holds a run of another configuration ({listed}); give "
                "another folder, or delete this one"
            )

    def read(self, name: str) -> Any:
        """A JSON file's content; None if it does not exist.

        Raises:
            CheckpointError: it is no JSON.
        """
        try:
            return json.loads((self / name).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise CheckpointError(f"{self / name}: no JSON ({error})") from error

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file, atomically."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self / name, (json.dumps(content, indent=2) + "\n").encode())

    def update(self, name: str, **changes: Any) -> None:
        """Change keys of a JSON file."""
        before = self.read(name) or {}
        if before != (after := {**before, **changes}):
            self.write(name, after)

    def save(
        self, done: int, state: Mapping[str, Tensor], rule: Aggregator, extra: Mapping[str, Any]
    ) -> None:
        """Make a checkpoint after so many rounds."""
        files = {part: f"{part}-{done:06d}.safetensors" for part in ("model", "rule")}
        _checkpoint.write(self / files["model"], _MODEL, state)
        rule.save(self / files["rule"])
        lengths = {name: (self / name).stat().st_size for name in LINES}
        self.write("checkpoint.json", {"round": done, **files, "lengths": lengths, **extra})
        for part, name in files.items():
            for path in self.path.glob(f"{part}-*.safetensors"):
                if path.name != name:
                    path.unlink()

    def load(self, rule: Aggregator) -> tuple[dict[str, Any], State] | None:
        """The last checkpoint and its model; the rule takes its state. None if there is none.

        Raises:
            CheckpointError: a file of it is missing or damaged, or belongs to another rule.
        """
        saved = self.read("checkpoint.json")
        if saved is None:
            return None
        state = _checkpoint.read(self / saved["model"], _MODEL)
        rule.load(self / saved["rule"])
        self.cut(saved["lengths"])
        return saved, state

    def cut(self, lengths: Mapping[str, int]) -> None:
        """Cut the files of lines to these lengths, and make those that are missing."""
        for name in LINES:
            path = self / name
            path.touch()
            if path.stat().st_size < lengths.get(name, 0):
                raise CheckpointError(f"{path}: shorter than when the checkpoint was made")
            with path.open("r+b") as file:
                file.truncate(lengths.get(name, 0))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of lines; one that is being written, or was cut off, is skipped."""
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """One level: section and key joined by a dot; lists as JSON has them.

    >>> flat({"rounds": 5, "model": {"name": "mlp", "hidden": (8, 8)}})
    {'rounds': 5, 'model.name': 'mlp', 'model.hidden': [8, 8]}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        entries = value.items() if isinstance(value, Mapping) else ()
        flat |= {f"{key}.{inner}": _listed(v) for inner, v in entries}
        if not isinstance(value, Mapping):
            flat[key] = _listed(value)
    return flat


def _listed(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _listed(item) for key, item in value.items()}
    return value
