"""Data sets from every source, and what is said when one is not there."""

from __future__ import annotations

import json
import struct
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from craft_adapters.errors import OptionError
from craft_adapters.simulation import (
    Dataset,
    DatasetNotFound,
    available_datasets,
    crop_flip,
    load_dataset,
)


def picture(path: Path, grey: int, size: int = 4) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size, 3), grey, np.uint8)).save(path)


def test_digits_are_the_default() -> None:
    digits = load_dataset()
    assert digits.name == "digits"
    assert digits.shape == (1, 8, 8)
    assert len(digits) == 1797


def test_standardised_inputs_have_mean_0_and_std_1() -> None:
    digits = load_dataset("digits", standardise="true")
    values = digits.inputs(torch.arange(len(digits))).double()
    assert values.mean().abs() < 1e-6
    assert values.std(correction=0) == pytest.approx(1, abs=1e-6)


def test_pixels_become_floats_in_0_1(device: torch.device) -> None:
    x = torch.tensor([[[[0, 255]], [[51, 51]]]], dtype=torch.uint8)
    data = Dataset("p", x, torch.tensor([0]), 1).to(device)
    batch = data.inputs(torch.tensor([0], device=device))
    assert batch.dtype == torch.float32
    assert batch.flatten().tolist() == pytest.approx([0, 1, 0.2, 0.2])
    flat = data.standardised()
    got = flat.inputs(torch.tensor([0], device=device)).flatten().tolist()
    assert got == pytest.approx([-1, 1, 0, 0], abs=1e-6), "a constant channel becomes zero"


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="3 examples in x but 2 labels"):
        Dataset("d", torch.zeros(3, 1), torch.zeros(2), 2)
    with pytest.raises(ValueError, match="1 entries in writers"):
        Dataset("d", torch.zeros(2, 1), torch.zeros(2), 2, writers=torch.zeros(1))


def test_an_unknown_name_or_option_is_refused() -> None:
    with pytest.raises(OptionError, match="did you mean 'cifar10'"):
        load_dataset("cifar-10")
    with pytest.raises(OptionError, match="data set 'npz' has no option 'file'"):
        load_dataset("npz", file="x")
    with pytest.raises(OptionError, match="path must be given"):
        load_dataset("npz")
    assert available_datasets()[0] == "digits"


def test_image_folder_with_train_and_test(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "cat" / "a.png", 10)
    picture(tmp_path / "train" / "dog" / "deep" / "b.png", 20)
    picture(tmp_path / "test" / "dog" / "a.png", 30)
    (tmp_path / "train" / "notes.txt").write_text("no image")
    data = load_dataset("folder", root=str(tmp_path))
    assert data.x.dtype == torch.uint8
    assert data.shape == (3, 4, 4)
    assert data.x[:, 0, 0, 0].tolist() == [10, 20, 30]
    assert data.y.tolist() == [0, 1, 1]
    assert data.num_classes == 2


def test_image_folder_without_parts_and_sizes(tmp_path: Path) -> None:
    picture(tmp_path / "cat" / "a.png", 10)
    picture(tmp_path / "dog" / "b.png", 20, size=6)
    with pytest.raises(OptionError, match=r"b\.png has \(6, 6\).*give a size"):
        load_dataset("folder", root=str(tmp_path))
    assert load_dataset("folder", root=str(tmp_path), size="5").shape == (3, 5, 5)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((6, 784), (1, 28, 28)),
        ((6, 7), (7,)),
        ((6, 5, 4), (1, 5, 4)),
        ((6, 8, 8, 3), (3, 8, 8)),
        ((6, 3, 8, 8), (3, 8, 8)),
    ],
)
def test_npz_shapes(tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    path = tmp_path / "set.npz"
    np.savez(path, X=np.zeros(shape, np.uint8), Y=np.array([3, 3, 5, 5, 9, 9]))
    data = load_dataset("npz", path=str(path))
    assert data.shape == expected
    assert data.y.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.num_classes == 3


def test_npz_never_unpickles_and_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    np.savez(path, x=np.array([object()]), y=np.zeros(1))
    with pytest.raises(OptionError, match="without unpickling"):
        load_dataset("npz", path=str(path))
    np.savez(path, images=np.zeros(1))
    with pytest.raises(OptionError, match="has no x and y, but"):
        load_dataset("npz", path=str(path))
    np.savez(path, x=np.zeros((2, 4), np.int32), y=np.zeros(2))
    with pytest.raises(OptionError, match="uint8 or floating, got int32"):
        load_dataset("npz", path=str(path))
    np.savez(path, x=np.zeros((2, 4)), y=np.zeros(3))
    with pytest.raises(OptionError, match="one label per example"):
        load_dataset("npz", path=str(path))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("npz", {"path": "nowhere/x.npz"}),
        ("folder", {"root": "nowhere"}),
        ("femnist", {"root": "nowhere"}),
    ],
)
def test_missing_files_say_where_and_how(
    name: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DatasetNotFound) as caught:
        load_dataset(name, **options)
    assert str(tmp_path.resolve() / "nowhere") in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)


def test_an_empty_image_folder(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFound, match="expected <class>/<image>"):
        load_dataset("folder", root=str(tmp_path))


def fake_torchvision(monkeypatch: pytest.MonkeyPatch, **kinds: Any) -> None:
    datasets = types.ModuleType("torchvision.datasets")
    for name, kind in kinds.items():
        setattr(datasets, name, kind)
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)


def test_cifar_pools_train_and_test(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cifar:
        def __init__(self, root: str, train: bool, download: bool) -> None:
            assert not download
            self.data = np.full((3 if train else 1, 32, 32, 3), 7 if train else 9, np.uint8)
            self.data[..., 2] = 1
            self.targets = [0, 1, 9] if train else [5]

    fake_torchvision(monkeypatch, CIFAR10=Cifar, CIFAR100=Cifar)
    data = load_dataset("cifar10")
    assert data.x.shape == (4, 3, 32, 32)
    assert data.x[:, 0, 0, 0].tolist() == [7, 7, 7, 9]
    assert data.x[0, :, 0, 0].tolist() == [7, 7, 1], "channels first"
    assert data.y.tolist() == [0, 1, 9, 5]
    assert (data.num_classes, load_dataset("cifar100").num_classes) == (10, 100)


def test_missing_cifar_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(root: str, **options: Any) -> None:
        raise RuntimeError("Dataset not found or corrupted.")

    fake_torchvision(monkeypatch, CIFAR10=missing, EMNIST=missing)
    with pytest.raises(DatasetNotFound, match=r"CIFAR10\(root, download=True, train=True\)"):
        load_dataset("cifar10", root="there")
    with pytest.raises(DatasetNotFound, match="split='letters'"):
        load_dataset("emnist", split="letters")


def test_without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(ImportError, match=r"craft-adapters\[vision\]"):
        load_dataset("cifar10")


def test_emnist_is_turned_upright(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    raw = tmp_path / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, labels in (("train", [1, 26]), ("test", [2])):
        images = np.zeros((len(labels), 28, 28), np.uint8)
        images[:, 3, 20] = 200
        for what, array in (("images-idx3", images), ("labels-idx1", np.array(labels, np.uint8))):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            file = raw / f"emnist-letters-{part}-{what}-ubyte"
            file.write_bytes(head + array.tobytes())
    data = load_dataset("emnist", root=str(tmp_path), split="letters")
    assert data.x.shape == (3, 1, 28, 28)
    assert data.x[:, 0, 20, 3].tolist() == [200] * 3
    assert data.y.tolist() == [0, 2, 1], "letters count from 1 in the files"


def leaf(path: Path, users: dict[str, list[int]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {u: {"x": [[0.5] * 784] * len(y), "y": y} for u, y in users.items()}
    path.write_text(json.dumps({"users": list(users), "user_data": data}))


def test_femnist_from_leaf_shards(tmp_path: Path) -> None:
    leaf(tmp_path / "train" / "a.json", {"w2": [61, 0], "w1": [3]})
    leaf(tmp_path / "test" / "a.json", {"w2": [5], "w3": [1] * 9})
    data = load_dataset("femnist", root=str(tmp_path))
    assert data.x.shape == (13, 1, 28, 28)
    assert data.num_classes == 62
    assert data.writers is not None
    assert data.y.tolist() == [3, 5, 61, 0] + [1] * 9, "a writer's shards come together"
    assert data.writers.tolist() == [0, 1, 1, 1] + [2] * 9
    few = load_dataset("femnist", root=str(tmp_path), max_per_writer=3)
    assert len(few) == 4
    with pytest.raises(OptionError, match="no writer has at most"):
        load_dataset("femnist", root=str(tmp_path), max_per_writer=0)


def test_femnist_says_what_is_no_shard(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"users": []}')
    with pytest.raises(OptionError, match=r"a\.json is no shard of LEAF"):
        load_dataset("femnist", root=str(tmp_path))
    (tmp_path / "b.parquet").write_bytes(b"")
    with pytest.raises(OptionError, match="would come twice"):
        load_dataset("femnist", root=str(tmp_path))


def test_femnist_from_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    picture(tmp_path / "one.png", 90, size=28)
    image = {"bytes": (tmp_path / "one.png").read_bytes(), "path": None}
    columns = {
        "image": [image] * 3,
        "writer_id": ["f1", "f0", "f1"],
        "hsf_id": [0] * 3,
        "character": [7, 61, 8],
    }
    parquet.write_table(pa.table(columns), tmp_path / "train-0.parquet")
    data = load_dataset("femnist", root=str(tmp_path))
    assert data.x.dtype == torch.uint8
    assert data.x.float().mean() == 90
    assert data.y.tolist() == [61, 7, 8]
    assert data.writers is not None
    assert data.writers.tolist() == [0, 1, 1]
    parquet.write_table(pa.table({"image": [image]}), tmp_path / "train-0.parquet")
    with pytest.raises(OptionError, match="has no column character, writer_id"):
        load_dataset("femnist", root=str(tmp_path))


@pytest.mark.parametrize("shape", [(5, 3, 8, 6), (1, 1, 4, 4)])
def test_crop_and_flip_are_those_of_one_image_at_a_time(
    shape: tuple[int, ...], device: torch.device
) -> None:
    count, _, height, width = shape
    random = torch.Generator().manual_seed(0)
    images = torch.rand(shape, generator=random)
    shifts = torch.randint(0, 9, (count, 2), generator=random)
    flips = torch.rand(count, generator=random) < 0.5
    got = crop_flip(images.to(device), shifts.to(device), flips.to(device)).cpu()
    for i in range(count):
        padded = torch.nn.functional.pad(images[i], (4, 4, 4, 4))
        row, column = shifts[i].tolist()
        one = padded[:, row : row + height, column : column + width]
        assert torch.equal(got[i], one.flip(2) if flips[i] else one)


def test_the_middle_crop_changes_nothing() -> None:
    images = torch.rand(3, 2, 5, 5, generator=torch.Generator().manual_seed(1))
    same = crop_flip(images, torch.full((3, 2), 4), torch.zeros(3, dtype=torch.bool))
    assert torch.equal(same, images)
