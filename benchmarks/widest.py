"""One entry of a billion numbers, 50 clients whose values are in no memory: what a step takes.

    python benchmarks/widest.py    # minutes; three times the model (12 GB) in memory
    python benchmarks/widest.py --width 1e7 --clients 10

The clients' updates together are 200 GB. They are made up when they are read, as a file's would be
read: each client repeats a piece of its own, so that all are independent.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator

import torch
from federations import COSINE, STEP
from torch import Tensor

from craft_adapters import ClientUpdate, get_aggregator
from craft_adapters.lazy import LazyValues

ENTRY = "embedding.weight"
# Numbers of a client's piece: longer than a block has columns.
_PIECE = 1 << 20


class Repeated(LazyValues):
    """An update that repeats a piece."""

    def __init__(self, piece: Tensor, width: int) -> None:
        self._piece, self._width = torch.cat([piece, piece]), width

    def describe(self, name: str) -> tuple[torch.Size, torch.dtype]:
        return torch.Size([self._width]), self._piece.dtype

    def part(self, name: str, start: int, stop: int) -> Tensor:
        first = start % _PIECE
        if stop - start > _PIECE:
            return (
                self._piece[:_PIECE]
                .roll(-first)
                .repeat(-(-(stop - start) // _PIECE))[: stop - start]
            )
        return self._piece[first : first + stop - start]

    def __iter__(self) -> Iterator[str]:
        return iter([ENTRY])

    def __len__(self) -> int:
        return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=float, default=1e9, help="numbers of the entry")
    parser.add_argument("--clients", type=int, default=50)
    options = parser.parse_args()
    width, clients = int(options.width), options.clients
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(_PIECE, generator=generator)
    pieces = (torch.randn(_PIECE, generator=generator) for _ in range(clients))
    updates = [
        ClientUpdate(
            i,
            100 + i,
            Repeated(STEP * (COSINE**0.5 * common + (1 - COSINE) ** 0.5 * piece), width),
            kind="update",
        )
        for i, piece in enumerate(pieces)
    ]
    state = {ENTRY: torch.empty(width).uniform_(-0.1, 0.1, generator=generator)}
    before = _peak()
    started = time.perf_counter()
    result = get_aggregator("craft").aggregate(state, updates)
    seconds = time.perf_counter() - started
    (group,) = result.report.groups
    answer = {
        "width": width,
        "clients": clients,
        "updates_gb": 4e-9 * width * clients,
        "model_gb": 4e-9 * width,
        "extra_gb": (_peak() - before) / 1e9,
        "of_it_kept_gb": 8e-9 * width,  # the new model and the reference
        "seconds": seconds,
        "residual": group.residual,
        "conflicts_before": group.conflicts_before,
        "conflicts_after": len(group.conflicts_after),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(answer, indent=2))


def _peak() -> float:
    """Bytes of the largest resident set so far (Linux counts in KB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


if __name__ == "__main__":
    main()
