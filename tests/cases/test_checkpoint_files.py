"""Files that run code, files that are damaged, and what our own files hold."""

from __future__ import annotations

import ast
import contextlib
import fractions
import importlib
import io
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from craft_adapters import CheckpointError, ClientUpdate
from craft_adapters.aggregators import Craft

from .oracle import put, replies, rule, same_bits


class Payload:
    """Opens (and so creates) a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.marker), "w"))


def _torch_file(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _hostile(form: str, marker: Path) -> bytes:
    payload = Payload(marker)
    if form == "torch":
        return _torch_file({"w": torch.zeros(1), "x": payload})
    if form == "torch legacy":
        buffer = io.BytesIO()
        torch.save({"x": payload}, buffer, _use_new_zipfile_serialization=False)
        return buffer.getvalue()
    if form == "numpy":
        buffer = io.BytesIO()
        np.save(buffer, np.array([payload], dtype=object), allow_pickle=True)
        return buffer.getvalue()
    if form == "zip":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(payload))
        return buffer.getvalue()
    return pickle.dumps(payload)


@pytest.mark.parametrize("form", ["torch", "torch legacy", "pickle", "numpy", "zip"])
def test_a_hostile_checkpoint_runs_no_code(form: str, device: torch.device, tmp_path: Path) -> None:
    """A reply or checkpoint is unpickled: whoever sends it runs code on the server.

    https://github.com/fedbiomed/fedbiomed/issues/832
    https://github.com/lsdefine/simple_GRPO/issues/48
    """
    marker = tmp_path / "executed"
    path = tmp_path / "state"
    path.write_bytes(_hostile(form, marker))
    aggregator = rule(device)
    with pytest.raises(CheckpointError, match="state: not a readable safetensors file"):
        aggregator.load(path)
    assert not marker.exists()
    assert aggregator.state_dict()["reference"] == {}


@pytest.mark.parametrize("value", ["bytes", "payload"])
def test_a_hostile_reply_runs_no_code(
    value: str, device: torch.device, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The same for an entry of a reply: it is refused as no tensor, not decoded.

    https://github.com/lsdefine/simple_GRPO/issues/48
    """
    marker = tmp_path / "executed"
    entry = _hostile("pickle", marker) if value == "bytes" else Payload(marker)
    with pytest.raises(ValueError, match="client 0, entry 'w': expected a dense tensor"):
        rule(device).aggregate(put({"w": [0.0]}, device, dtype), [ClientUpdate(0, 1, {"w": entry})])
    assert not marker.exists()


def _sources() -> Iterator[tuple[Path, str]]:
    for name in ("craft_adapters", "craft_adapters.fedml", "craft_adapters.models"):
        for folder in importlib.import_module(name).__path__:
            for path in Path(folder).rglob("*.py"):
                yield path, path.read_text(encoding="utf-8")


def test_no_source_unpickles() -> None:
    """No pickle module, no torch.load, no weights_only, no allow_pickle but False in the package.

    https://github.com/fedbiomed/fedbiomed/issues/832
    """
    unpicklers = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    seen = 0
    for path, text in _sources():
        seen += 1
        for node in ast.walk(ast.parse(text)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), f"{path}:{node.lineno}"
            elif isinstance(node, ast.keyword):
                off = isinstance(node.value, ast.Constant) and node.value.value is False
                assert node.arg != "allow_pickle" or off, f"{path}:{node.lineno}"
                assert node.arg != "weights_only", f"{path}:{node.lineno}"
            for name in names:
                assert name.split(".")[0] not in unpicklers, f"{path}: imports {name}"
    assert seen > 30


def _saved(device: torch.device, path: Path) -> Craft:
    """A rule with a reference of 1000 numbers, saved."""
    aggregator = rule(device)
    values = torch.arange(1000.0, device=device)
    start = {"w": torch.zeros_like(values)}
    aggregator.aggregate(start, [ClientUpdate(0, 1, {"w": values})])
    aggregator.save(path)
    return aggregator


def _flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 255]) + data[position + 1 :]


CORRUPT: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut half": lambda data: data[: len(data) // 2],
    "cut tail": lambda data: data[:-40],
    "cut by one": lambda data: data[:-1],
    "text": lambda data: b"not a checkpoint",
    "too long": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
    "header length": lambda data: b"\xff" * 8 + data[8:],
    "a torch file": lambda data: _torch_file({"round": 3, "reference": {"w": torch.zeros(1)}}),
}


@pytest.mark.parametrize("form", CORRUPT)
def test_a_corrupt_checkpoint_is_one_kind_of_error(
    form: str, device: torch.device, tmp_path: Path
) -> None:
    """It surfaces as IndexError, KeyError, struct.error or EOFError.

    https://github.com/pytorch/pytorch/pull/190888
    https://github.com/hanxiao/jy-crpg-bench/pull/35
    """
    path = tmp_path / "state"
    used = _saved(device, path)
    before = used.state_dict()
    path.write_bytes(CORRUPT[form](path.read_bytes()))
    for aggregator in (rule(device), used):
        with pytest.raises(CheckpointError) as caught:
            aggregator.load(path)
        assert str(path) in str(caught.value)
    assert same_bits(used.state_dict()["reference"], before["reference"])


def test_a_flipped_byte_is_an_error_or_changes_nothing(
    device: torch.device, tmp_path: Path
) -> None:
    """A flip that leaves the archive valid must not give other content.

    https://github.com/pytorch/pytorch/pull/190888
    """
    path = tmp_path / "state"
    saved = _saved(device, path)
    wanted = saved.state_dict()
    data = path.read_bytes()
    silent = []
    for position in [*range(0, len(data) - 4000, 3), 200, *range(len(data) - 4000, len(data), 371)]:
        path.write_bytes(_flip(data, position))
        aggregator = rule(device)
        with contextlib.suppress(CheckpointError):
            aggregator.load(path)
            got = aggregator.state_dict()
            if (
                got["round"] != wanted["round"]
                or got["agreeing"] != wanted["agreeing"]
                or not same_bits(got["reference"], wanted["reference"])
            ):
                silent.append(position)
    assert silent == []


# Saves over and over; the parent kills it at some moment.
SAVING = """
import sys
import torch
from craft_adapters.aggregators import Craft

aggregator = Craft(device="cpu")
for number in range(1, 10**6):
    reference = {"w": torch.full((200_000,), float(number))}
    aggregator.load_state_dict({"round": number, "reference": reference})
    aggregator.save(sys.argv[1])
    if number < 6:
        print(number, flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="kills with SIGKILL")
def test_killing_the_process_while_it_saves_leaves_a_readable_file(tmp_path: Path) -> None:
    """The last good file is already overwritten when the new one turns out to be cut.

    https://github.com/hanxiao/jy-crpg-bench/pull/35
    """
    path = tmp_path / "state"
    with subprocess.Popen(
        [sys.executable, "-c", SAVING, str(path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for _ in range(5):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    aggregator = rule(torch.device("cpu"))
    aggregator.load(path)
    state = aggregator.state_dict()
    assert state["round"] >= 5
    assert bool((state["reference"]["w"] == float(state["round"])).all())


def test_a_file_with_a_foreign_type_gets_no_second_try(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The safe load fails on an unknown type and the code retries with the unsafe loader.

    https://github.com/xuxu-wei/SUAVE/pull/192
    https://github.com/data-privacy-stack/presidio/issues/1524
    https://github.com/gpoesia/minimo/pull/21
    https://www.outrightly.io/feed?page=8&severity=HIGH&type=CVE
    """
    path = tmp_path / "state"
    tries: list[str] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        tries.append(repr(kwargs))
        raise AssertionError("an unpickler was called")

    for content in (
        {"w": torch.zeros(2), "lr": fractions.Fraction(1, 3)},
        {"w": torch.zeros(2), "metrics": [np.float64(0.5)]},
    ):
        path.write_bytes(_torch_file(content))
        with monkeypatch.context() as patched:
            patched.setattr(torch, "load", refuse)
            patched.setattr(pickle, "load", refuse)
            patched.setattr(pickle, "loads", refuse)
            patched.setattr(pickle, "Unpickler", refuse)
            with pytest.raises(CheckpointError):
                rule(device).load(path)
    assert tries == []


PLAIN = (torch.Tensor, int, float, str, bool, type(None))


def _assert_plain(value: Any) -> None:
    if type(value) is dict:
        for key, inner in value.items():
            assert type(key) is str
            _assert_plain(inner)
    elif isinstance(value, torch.Tensor):
        assert type(value) is torch.Tensor
    else:
        assert type(value) in PLAIN, type(value)


@pytest.mark.parametrize("options", [{}, {"reference": "ema"}, {"scale": "steady"}], ids=str)
@pytest.mark.parametrize("number", [None, 3, np.int64(3)], ids=["counted", "int", "numpy"])
def test_own_checkpoints_hold_plain_values_only(
    number: Any, options: dict[str, Any], device: torch.device, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Our own file with a numpy scalar in it does not load with the safe loader.

    https://github.com/xuxu-wei/SUAVE/pull/192
    https://github.com/data-privacy-stack/presidio/issues/1524

    Counts, losses, options and the round's number arrive as numpy scalars, as hosts have them.
    """
    aggregator = rule(device, server_lr=np.float64(1.0), **options)
    start = put({"w": [0.0, 0.0], "n": torch.tensor(0)}, device, dtype)
    ids: list[Any] = [np.int64(i) for i in range(2)]
    counts: list[Any] = [np.float32(2 + i) for i in range(2)]
    loss: Any = np.float64(0.5)
    updates = [
        ClientUpdate(ids[i], counts[i], client.values, loss=loss)
        for i, client in enumerate(
            replies(
                [{"w": [1.0, 0.0], "n": torch.tensor(1)}, {"w": [0.0, 2.0], "n": torch.tensor(2)}],
                [1, 1],
                device,
                dtype,
            )
        )
    ]
    result = aggregator.aggregate(start, updates, round=number)
    assert type(result.report.round) is int
    state = aggregator.state_dict()
    _assert_plain(state)
    aggregator.save(tmp_path / "state")
    again = rule(device, **options)
    again.load(tmp_path / "state")
    assert again.state_dict()["round"] == state["round"] == (1 if number is None else 4)
    assert same_bits(again.state_dict()["reference"], state["reference"])
    assert again.state_dict()["lengths"] == state["lengths"]
    with safe_open(tmp_path / "state", framework="pt") as file:
        assert all(type(value) is str for value in file.metadata().values())
