"""What stands in for Flower's engine: messages without a run, and clients that answer at once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "flower"


@pytest.fixture(autouse=True)
def _in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages can be made inside a run only; these are private names of Flower."""
    identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(identity, name, 1)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of examples/flower."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


class Clients:
    """A grid whose nodes run a ClientApp in this process; each keeps its Context."""

    def __init__(self, app: Any, count: int) -> None:
        from flwr.app import Context, RecordDict

        self.app = app
        self.contexts = {
            100 + partition: Context(
                run_id=1,
                node_id=100 + partition,
                node_config={"partition-id": partition, "num-partitions": count},
                state=RecordDict(),
                run_config={},
            )
            for partition in range(count)
        }

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Any], **_: Any) -> list[Any]:
        return [self.app(each, self.contexts[each.metadata.dst_node_id]) for each in messages]
