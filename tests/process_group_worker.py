"""One rank of tests/test_process_group.py."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from craft_adapters import CraftError, get_aggregator
from craft_adapters.distributed import aggregate_by_clients
from tests.test_process_group import federation


def main(rank: int, ranks: int, folder: Path, cases: dict[str, Any]) -> None:
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    counts: list[int] = []
    count_all_reduces(counts)
    answers = {name: answer(rank, ranks, case, counts) for name, case in cases.items()}
    (folder / f"{rank}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()


def answer(rank: int, ranks: int, case: dict[str, Any], counts: list[int]) -> dict[str, Any]:
    rule = get_aggregator(
        case["rule"], device="cpu", process_group=dist.group.WORLD, **case.get("options", {})
    )
    spread = spreader(rank, ranks, case)
    rounds = []
    counts.clear()
    for number in range(2):
        theta, updates = federation(case, number)
        if case.get("disagree") and rank == 1:
            updates[0] = dataclasses.replace(updates[0], num_examples=99)
        counts.append(0)
        try:
            if case.get("by_clients"):
                mine = [u for i, u in enumerate(updates) if i % ranks == rank]
                result = aggregate_by_clients(rule, theta, mine, dist.group.WORLD)
            else:
                result = rule.aggregate(
                    spread(theta),
                    [dataclasses.replace(u, values=spread(u.values)) for u in reversed(updates)],
                )
        except CraftError as error:
            return {"error": str(error)}
        taken = counts[-1]
        report = result.report.to_dict()
        rounds.append(
            {
                "state": {
                    name: value.flatten().tolist()
                    if case.get("by_clients")
                    else whole(value, theta[name])
                    for name, value in result.state.items()
                },
                "dropped": [[d["client_id"], d["entry"]] for d in report["dropped"]],
                "groups": report["groups"],
            }
        )
        counts[-1] = taken
    return {"rounds": rounds, "all_reduces": list(counts)}


def count_all_reduces(counts: list[int]) -> None:
    original = dist.all_reduce

    def counted(*arguments: Any, **options: Any) -> Any:
        counts[-1] += 1
        return original(*arguments, **options)

    dist.all_reduce = counted


def spreader(rank: int, ranks: int, case: dict[str, Any]) -> Any:
    """From whole entries to this rank's parts: rows of the first dimension, some of them none."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if case.get("dtensor"):
        mesh = init_device_mesh("cpu", (ranks,))
        placement = Replicate() if case.get("replicate") else Shard(0)
        return lambda values: {
            name: distribute_tensor(value, mesh, [placement]) for name, value in values.items()
        }
    return lambda values: {
        name: torch.tensor_split(value, ranks)[rank].clone() for name, value in values.items()
    }


def whole(value: Any, like: Tensor) -> list[float]:
    """All ranks' parts of an entry."""
    if hasattr(value, "full_tensor"):
        full = value.full_tensor()
    else:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, value)
        full = torch.cat(parts)
    assert full.shape == like.shape
    flat: list[float] = full.flatten().to(torch.float64).tolist()
    return flat


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
