"""The JSONL file: strict, whole lines, at any moment."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from craft_adapters import ClientUpdate, get_aggregator
from craft_adapters.sinks import JsonlSink, TensorBoardSink


def strict(line: str) -> Any:
    def refuse(token: str) -> None:
        raise ValueError(f"not JSON: {token}")

    return json.loads(line, parse_constant=refuse)


def records(path: Path) -> list[Any]:
    text = path.read_text("ascii")
    assert text.endswith("\n")
    return [strict(line) for line in text.splitlines()]


def test_what_training_produces(tmp_path: Path) -> None:  # MET-04
    record = {
        "round": np.int64(3),
        "loss": float("nan"),
        "acc": np.float32(0.5),
        "best": float("-inf"),
        "n": torch.tensor(7),
        "per_client": {"c0": np.float64(0.25), "c1": None},
        "conf": np.eye(2),
        "flag": np.bool_(True),
    }
    with JsonlSink(tmp_path / "metrics.jsonl") as sink:
        sink.write(record)
        sink.write({})
    (got, empty) = records(tmp_path / "metrics.jsonl")
    assert got == {
        "round": 3,
        "loss": None,
        "acc": 0.5,
        "best": None,
        "n": 7,
        "per_client": {"c0": 0.25, "c1": None},
        "conf": [[1.0, 0.0], [0.0, 1.0]],
        "flag": True,
    }
    assert got["flag"] is True
    assert type(got["round"]) is int
    assert empty == {}


def test_other_values(tmp_path: Path) -> None:
    with JsonlSink(tmp_path / "m.jsonl") as sink:
        sink.write(
            {
                1: (1, [np.nan, np.float16(0.5)]),
                np.int32(2): torch.tensor([1.0, math.inf], requires_grad=True),
                "half": torch.tensor(0.5, dtype=torch.bfloat16),
                "wide": np.longdouble(0.5),
                "nan": np.array(np.nan),
                "empty": np.zeros((0, 3)),
                "text": 'é\n"',
                "numpy text": np.str_("x"),
            }
        )
    assert records(tmp_path / "m.jsonl") == [
        {
            "1": [1, [None, 0.5]],
            "2": [1.0, None],
            "half": 0.5,
            "wide": 0.5,
            "nan": None,
            "empty": [],
            "text": 'é\n"',
            "numpy text": "x",
        }
    ]


def test_readable_while_running_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "m.jsonl"
    with JsonlSink(path) as sink:
        sink.write({"round": 0})
        assert records(path) == [{"round": 0}]
        sink.write({"round": 1})
        assert len(records(path)) == 2
    with JsonlSink(str(path)) as sink:
        sink.write({"round": 2})
    assert [record["round"] for record in records(path)] == [0, 1, 2]


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_line_cut_by_a_crash_stays_alone(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "m.jsonl"
    with JsonlSink(path) as sink:
        sink.write({"round": 0})
        sink.write({"round": 1})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - cut])
    JsonlSink(path).close()
    with JsonlSink(path) as sink:
        sink.write({"round": 2})
    first, *middle, last = path.read_text().splitlines()
    assert strict(first) == {"round": 0}
    assert strict(last) == {"round": 2}
    assert len(middle) == (0 if cut == 13 else 1), "no empty lines either"


def test_a_record_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with JsonlSink(path) as sink:
        sink.write({"round": 0})
        with pytest.raises(TypeError, match=r"record\['a'\]\[1\]: \w*Path has no JSON form"):
            sink.write({"a": [0, tmp_path]})
        with pytest.raises(TypeError, match=r"record\['z'\]: complex"):
            sink.write({"z": np.array(1j)})
        with pytest.raises(TypeError, match=r"keys must be str or int, got \(1, 2\) \(tuple\)"):
            sink.write({"a": {(1, 2): 3}})
        with pytest.raises(ValueError, match="two keys become '1'"):
            sink.write({1: "a", "1": "b"})
        with pytest.raises(TypeError, match="must be a mapping, got list"):
            sink.write([1])  # type: ignore[arg-type]
        sink.write({"round": 1})
    assert records(path) == [{"round": 0}, {"round": 1}]
    sink.close()
    with pytest.raises(ValueError, match=r"m\.jsonl: the sink is closed"):
        sink.write({})


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None)
@given(record=st.dictionaries(st.text(), values, max_size=4))
def test_any_plain_record_comes_back(
    tmp_path_factory: pytest.TempPathFactory, record: dict[str, Any]
) -> None:
    def expected(value: Any) -> Any:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, list):
            return list(map(expected, value))
        return {k: expected(v) for k, v in value.items()} if isinstance(value, dict) else value

    path = tmp_path_factory.mktemp("any") / "m.jsonl"
    with JsonlSink(path) as sink:
        sink.write(record)
    assert records(path) == [expected(record)]


def test_writing_a_file_needs_no_torch() -> None:
    code = "import sys, craft_adapters.sinks; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class Writer(list[Any]):
    """Stands in for torch's SummaryWriter, which needs tensorboard."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.append((name, value, step))

    def flush(self) -> None: ...

    def close(self) -> None:
        self.append("closed")


made: list[Writer] = []


def test_tensorboard_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    sink = TensorBoardSink(tmp_path)
    record = {"round": 4, "model": "personal", "mean": 0.5, "std": None, "clients": {"0": 1.0}}
    sink.write(record)
    sink.write({"round": 5, "conflicts_after": 2, "rule": "craft", "flag": True})
    assert made[-1] == [("personal/mean", 0.5, 4), ("conflicts_after", 2, 5)]
    made[-1].clear()
    rule = get_aggregator("fedavg")
    rule.observers.append(sink.observe)
    update = ClientUpdate(0, 1, {"fc.weight": torch.ones(2, 2)})
    rule.aggregate({"fc.weight": torch.zeros(2, 2)}, [update], round=7)
    names = {name for name, _, step in made[-1] if step == 7}
    assert names == {
        "rule/conflicts_before",
        "rule/conflicts_after",
        "rule/seconds",
        "step_norm/fc",
        "conflicts/fc",
    }
    sink.close()
    assert made[-1][-1] == "closed"


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"craft-adapters\[tensorboard\]"):
        TensorBoardSink(tmp_path)
