"""Clients' values that are read from files, a part at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from craft_adapters import ClientUpdate, IncompatibleUpdate, LazyValues, Spill
from craft_adapters.aggregators import Craft, FedAvg
from craft_adapters.lazy import SafetensorsValues

SHAPES = {"a.weight": (40, 30), "a.bias": (40,), "b.weight": (3, 4, 5), "b.scale": ()}


def models(count: int, seed: int, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
        for _ in range(count)
    ]


def close(one: dict[str, Tensor], two: dict[str, Tensor], tolerance: float = 1e-5) -> bool:
    return list(one) == list(two) and all(
        torch.allclose(one[name], two[name], rtol=tolerance, atol=tolerance) for name in one
    )


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_part_of_an_entry(dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = (torch.randn(5, 6, generator=generator) * 3).to(dtype)
    save_file({"first": torch.ones(3), "w": whole, "empty": whole[:0]}, tmp_path / "x")
    values = SafetensorsValues(tmp_path / "x")
    assert sorted(values) == ["empty", "first", "w"]
    assert len(values) == 3
    assert values.describe("w") == ((5, 6), dtype)
    assert torch.equal(values["w"], whole)
    assert values["empty"].shape == (0, 6)
    for start in range(0, 30, 7):
        for stop in range(start, 31, 6):
            part = values.part("w", start, stop)
            assert part.dtype == dtype
            assert torch.equal(part, whole.flatten()[start:stop])


def test_reading_maps_nothing_and_keeps_nothing_open(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1000)}, tmp_path / "x")
    values = SafetensorsValues(tmp_path / "x")
    part = values.part("w", 0, 10)
    part.zero_()
    assert torch.equal(values["w"], torch.ones(1000))
    (tmp_path / "x").unlink()
    with pytest.raises(IncompatibleUpdate, match="entry 'w'"):
        values.part("w", 0, 10)


@pytest.mark.parametrize("cut", [0, 5, 60, -1])
def test_a_file_that_is_cut_or_foreign_is_refused(cut: int, tmp_path: Path) -> None:
    save_file({"w": torch.ones(100)}, tmp_path / "x")
    data = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(data[:cut])
    with pytest.raises(IncompatibleUpdate, match="cannot be read as a safetensors file"):
        SafetensorsValues(tmp_path / "x")
    with pytest.raises(IncompatibleUpdate, match="missing"):
        ClientUpdate.from_safetensors(tmp_path / "missing", client_id=1, num_examples=1)


def test_a_file_that_is_cut_later_is_refused_and_not_read_as_zeros(tmp_path: Path) -> None:
    save_file({"w": torch.ones(100)}, tmp_path / "x")
    values = SafetensorsValues(tmp_path / "x")
    data = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(data[:-8])
    with pytest.raises(IncompatibleUpdate, match="cut off within entry 'w'"):
        _ = values["w"]


@pytest.mark.parametrize("kind", ["state", "update"])
@pytest.mark.parametrize("block", [None, 2000], ids=["one block", "many blocks"])
@pytest.mark.parametrize("rule", [Craft, FedAvg])
def test_from_files_as_from_memory(
    rule: type[Craft] | type[FedAvg],
    kind: str,
    block: int | None,
    device: torch.device,
    tmp_path: Path,
) -> None:
    """A block of 2000 bytes cuts entries, so that parts of them are read."""
    theta = {name: value.to(device) for name, value in models(1, seed=9)[0].items()}
    memory, disk = rule(device=device), rule(device=device, block_bytes=block)
    for number in range(2):
        clients = models(5, seed=number)
        eager = [ClientUpdate(i, 3 + i, values, kind) for i, values in enumerate(clients)]
        lazy = []
        for i, values in enumerate(clients):
            path = tmp_path / f"{number}-{i}.safetensors"
            save_file(values, path)
            lazy.append(
                ClientUpdate.from_safetensors(path, client_id=i, num_examples=3 + i, kind=kind)
            )
        one, two = memory.aggregate(theta, eager), disk.aggregate(theta, lazy)
        assert close(one.state, two.state)
        assert one.report.conflicts_before == two.report.conflicts_before
        theta = one.state


class Counting(LazyValues):
    """Notes what is read."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values_ = values
        self.read: list[tuple[str, int, int]] = []

    def describe(self, name: str) -> tuple[torch.Size, torch.dtype]:
        return self.values_[name].shape, self.values_[name].dtype

    def part(self, name: str, start: int, stop: int) -> Tensor:
        self.read.append((name, start, stop))
        return self.values_[name].flatten()[start:stop]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


def test_each_number_is_read_twice_at_most_and_never_all_at_once(device: torch.device) -> None:
    theta = {"w": torch.zeros(20, 50, device=device), "v": torch.zeros(7, device=device)}
    generator = torch.Generator().manual_seed(0)
    counting = [
        Counting({n: torch.randn(t.shape, generator=generator) for n, t in theta.items()})
        for _ in range(3)
    ]
    clients = [ClientUpdate(i, 1, values) for i, values in enumerate(counting)]
    rule = Craft(device=device, block_bytes=4 * 8 * 64)
    rule.aggregate(theta, clients)
    for values in counting:
        times = torch.zeros(1007, dtype=torch.int64)
        for name, start, stop in values.read:
            offset = 0 if name == "w" else 1000
            times[offset + start : offset + stop] += 1
            assert stop - start <= 64
        assert int(times.max()) <= 2
        assert int(times.min()) >= 1


def test_a_misshapen_entry_of_a_lazy_client_is_named(device: torch.device) -> None:
    theta = {"w": torch.zeros(20, 50, device=device)}
    good = Counting({"w": torch.ones(20, 50)})
    bad = Counting({"w": torch.ones(50, 20)})
    for block in (None, 1000):
        with pytest.raises(IncompatibleUpdate, match=r"client 'b', entry 'w'.*\(50, 20\)"):
            Craft(device=device, block_bytes=block).aggregate(
                theta, [ClientUpdate("a", 1, good), ClientUpdate("b", 1, bad)]
            )


def test_a_spill_keeps_what_it_is_given_and_cleans_up(device: torch.device, tmp_path: Path) -> None:
    tied = torch.randn(3, 4)
    values = {"w": tied.T, "again": tied, "n": torch.tensor(3), "half": tied.to(torch.bfloat16)}
    with Spill(tmp_path) as spill:
        kept = [
            spill.keep(ClientUpdate(f"c{i}", 5, values, "update", loss=0.5, local_steps=7))
            for i in range(2)
        ]
        (folder,) = tmp_path.iterdir()
        assert len(list(folder.iterdir())) == 2
        for i, update in enumerate(kept):
            assert (update.client_id, update.num_examples, update.kind) == (f"c{i}", 5.0, "update")
            assert (update.loss, update.local_steps) == (0.5, 7)
            assert all(torch.equal(update.values[name], values[name]) for name in values)
            assert all(update.values[name].dtype == values[name].dtype for name in values)
    assert not list(tmp_path.iterdir())
    with Spill() as spill, pytest.raises(IncompatibleUpdate, match="client 0, entry 'x'"):
        spill.keep(ClientUpdate(0, 1, {"x": "text"}))


# Updates of 400 MB in all; the process may take 100 MB more than it has after the imports.
SMALL_MEMORY = """
import resource, sys
import torch
from craft_adapters import ClientUpdate
from craft_adapters.aggregators import Craft
from craft_adapters.lazy import LazyValues

WIDTH, CLIENTS, ALLOWED = 1000, 100, 100 << 20

class Made(LazyValues):
    # A client that is computed instead of stored: the same numbers at every read.
    def __init__(self, client):
        self.client = client
    def describe(self, name):
        return torch.Size([WIDTH // 100, 100]), torch.float32
    def part(self, name, start, stop):
        place = torch.arange(start, stop, dtype=torch.float32)
        return torch.sin(place * (1 + self.client * 0.37) + self.client)
    def __iter__(self):
        return iter(["w"])
    def __len__(self):
        return 1

def data():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmData")) << 10

def aggregate(width, clients):
    global WIDTH
    WIDTH = width
    theta = {"w": torch.zeros(width // 100, 100)}
    rule = Craft(server_lr=1.0, device="cpu")
    updates = [ClientUpdate(i, 1, Made(i), kind="update") for i in range(clients)]
    return theta, rule.aggregate(theta, updates)

aggregate(1000, 3)  # what libraries set up once
limit = data() + ALLOWED
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
WIDTH = 1_000_000
if sys.argv[1] == "all at once":
    held = [Made(i)["w"] for i in range(CLIENTS)]
theta, result = aggregate(WIDTH, CLIENTS)
step = theta["w"] - result.state["w"]
row = Made(7).part("w", 0, WIDTH).double()
inner = float(row @ step.double().flatten()) / float(row.norm())
assert abs(inner * CLIENTS - 1) < 1e-5, inner
assert result.report.conflicts_after == 0
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's limit of data memory")
def test_updates_four_times_as_large_as_the_memory_allowed() -> None:
    def run(how: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", SMALL_MEMORY, how],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    assert run("in parts").stdout == "done\n"
    # The limit is a real one.
    assert "memory" in run("all at once").stderr
