"""Where the figures of a run are written."""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["JsonlSink", "TensorBoardSink"]


class JsonlSink:
    r"""Append records to a file, one JSON object per line.

    Each line is flushed as it is written, so the file can be read while the run goes on, and a
    crash costs at most the line it interrupts. On reopening such a file, writing starts on a new
    line: the cut line stays, alone, for the reader to skip. Lines are ASCII, so a cut one is
    still readable text.

    What goes in: dicts with str or int keys, lists, tuples, None, bools, numbers, strings, and
    whatever has ``tolist()`` (numpy scalars and arrays, torch tensors on any device). What comes
    out is strict JSON: NaN and infinities, which JSON does not have, become null.

    Args:
        path: The file; it and missing folders above it are created.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "metrics.jsonl")
        >>> with JsonlSink(path) as sink:
        ...     sink.write({"round": 0, "loss": float("nan"), "accuracy": {7: 0.5}})
        >>> path.read_text()
        '{"round": 0, "loss": null, "accuracy": {"7": 0.5}}\n'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        if self._file.tell() > 0:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def write(self, record: Mapping[Any, Any]) -> None:
        """Append one record.

        Args:
            record: See the class.

        Raises:
            TypeError: a value or key that has no JSON form; names the place. Nothing is written.
            ValueError: two keys that are the same as JSON (1 and "1"), or the sink is closed.
        """
        if self._file.closed:
            raise ValueError(f"{self.path}: the sink is closed; open a new JsonlSink to append")
        if not isinstance(record, Mapping):
            raise TypeError(f"a record must be a mapping, got {type(record).__name__}")
        line = json.dumps(_plain(record, "record"), allow_nan=False)
        self._file.write(line.encode("ascii") + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        self._file.close()

    def __enter__(self) -> JsonlSink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class TensorBoardSink:
    """Write the numbers of records, and of rules' reports, for TensorBoard.

    :meth:`write` takes the records of a run; :meth:`observe` is an observer of an aggregator:
    ``aggregator.observers.append(sink.observe)``.

    Args:
        folder: TensorBoard's folder for this run.

    Raises:
        ImportError: tensorboard is missing; names the extra.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"TensorBoardSink needs tensorboard ({error}): "
                "pip install 'craft-adapters[tensorboard]'"
            ) from error
        self._writer: Any = SummaryWriter(os.fspath(folder))

    def write(self, record: Mapping[Any, Any]) -> None:
        """Take a record: its numbers become curves over its "round", under its "model"."""
        prefix = f"{record['model']}/" if "model" in record else ""
        for name, value in record.items():
            if name != "round" and isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(f"{prefix}{name}", value, int(record["round"]))
        self._writer.flush()

    def observe(self, report: Any) -> None:
        """Take an ``AggregationReport``: conflicts, time, and each layer's step."""
        step = report.round
        for name in ("conflicts_before", "conflicts_after", "seconds"):
            self._writer.add_scalar(f"rule/{name}", getattr(report, name), step)
        for group in report.groups:
            self._writer.add_scalar(f"step_norm/{group.name}", group.step_norm, step)
            self._writer.add_scalar(f"conflicts/{group.name}", group.conflicts_before, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _plain(value: Any, where: str) -> Any:
    """The same as dicts, lists, str, int, finite float, bool and None."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, Mapping):
        return _plain_mapping(value, where)
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    # Asked for by what it can do, not by its class: torch need not be imported to write a file.
    if hasattr(value, "tolist"):
        listed = value.tolist()
        if type(listed) is not type(value):
            return _plain(listed, where)
    raise TypeError(
        f"{where}: {type(value).__name__} has no JSON form; give a number, str, bool, None, list, "
        "dict, array or tensor"
    )


def _plain_mapping(mapping: Mapping[Any, Any], where: str) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(key, bool) or not isinstance(key, str | numbers.Integral):
            raise TypeError(f"{where}: keys must be str or int, got {key!r} ({type(key).__name__})")
        name = key if isinstance(key, str) else str(int(key))
        if name in plain:
            raise ValueError(f"{where}: two keys become {name!r} in JSON, one an int, one a str")
        plain[name] = _plain(value, f"{where}[{key!r}]")
    return plain
