"""Where data sets come from, by name."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from .._options import coerce
from ..errors import OptionError, nearest
from ._datasets import Dataset, DatasetNotFound, load_digits, optional_import

__all__ = ["SOURCES", "available_datasets", "load_dataset"]

_IMAGES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp"}


def available_datasets() -> tuple[str, ...]:
    """The names that :func:`load_dataset` knows.

    Example:
        >>> "digits" in available_datasets()
        True
    """
    return tuple(SOURCES)


def load_dataset(name: str = "digits", **options: Any) -> Dataset:
    """Load a data set, training and test part pooled: clients split their own examples.

    ============ =======================================================================
    digits       scikit-learn's 1797 digits, 8 x 8; no options
    cifar10      ``root``: folder of torchvision's files
    cifar100     ``root``
    emnist       ``root``, ``split`` ("balanced", "byclass", "letters", ...)
    femnist      ``root``: folder with LEAF's JSON shards or parquet files; has writers.
                 ``max_per_writer``: leave out writers with more examples
    folder       ``root``: one folder of images per class, alone or under train/ and
                 test/; ``size``: resize to (size, size)
    npz          ``path``: a .npz file with x and y (or X and Y)
    ============ =======================================================================

    Every one also takes ``standardise``: subtract each channel's mean and divide by its standard
    deviation, both over all examples.

    Raises:
        OptionError: an unknown name or option, or a value that it does not take.
        DatasetNotFound: files are missing; says where they were looked for.
        ImportError: an optional package is missing; names the extra.

    Example:
        >>> load_dataset("digits", standardise=True).num_classes
        10
    """
    if name not in SOURCES:
        raise OptionError(f"no data set is named {name!r}; {nearest(str(name), SOURCES)}")
    values = coerce(SOURCES[name], options, owner=f"data set {name!r}")
    return SOURCES[name](**values)


def _digits(*, standardise: bool = False) -> Dataset:
    return _finish(load_digits(), standardise)


def _cifar10(*, root: str = "data", standardise: bool = False) -> Dataset:
    return _finish(_cifar("CIFAR10", root, 10), standardise)


def _cifar100(*, root: str = "data", standardise: bool = False) -> Dataset:
    return _finish(_cifar("CIFAR100", root, 100), standardise)


def _cifar(kind: str, root: str, num_classes: int) -> Dataset:
    parts = [_torchvision(kind, root, train=train) for train in (True, False)]
    x = np.concatenate([part.data for part in parts]).transpose(0, 3, 1, 2)
    y = np.concatenate([np.asarray(part.targets, dtype=np.int64) for part in parts])
    return Dataset(
        kind.lower(), torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y), num_classes
    )


def _emnist(
    *,
    root: str = "data",
    split: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"] = "balanced",
    standardise: bool = False,
) -> Dataset:
    parts = [_torchvision("EMNIST", root, train=train, split=split) for train in (True, False)]
    # The files hold the images transposed.
    x = torch.cat([part.data for part in parts]).transpose(1, 2).unsqueeze(1).contiguous()
    y, count = _numbered(torch.cat([part.targets for part in parts]).numpy())
    return _finish(Dataset(f"emnist-{split}", x, y, count), standardise)


def _torchvision(kind: str, root: str, **options: Any) -> Any:
    datasets = optional_import("torchvision.datasets", "torchvision", "vision")
    try:
        return getattr(datasets, kind)(root, download=False, **options)
    except RuntimeError as error:
        call = ", ".join(["root", "download=True", *(f"{k}={v!r}" for k, v in options.items())])
        raise DatasetNotFound(
            f"{kind} is not in {Path(root).resolve()} ({error}); to fetch it there: "
            f"torchvision.datasets.{kind}({call}) with root={root!r}"
        ) from error


def _femnist(
    *, root: str = "data/femnist", max_per_writer: int | None = None, standardise: bool = False
) -> Dataset:
    folder = Path(root)
    shards = sorted(folder.rglob("*.json")), sorted(folder.rglob("*.parquet"))
    if not any(shards):
        raise DatasetNotFound(
            f"FEMNIST: no *.json or *.parquet file under {folder.resolve()}; put there the shards "
            "that LEAF's data/femnist/preprocess.sh writes, or the parquet files of the data set "
            "'flwrlabs/femnist'"
        )
    if all(shards):
        raise OptionError(
            f"FEMNIST: {folder} holds both LEAF's JSON shards and parquet files: the same examples "
            "would come twice; give the folder of one of them as root"
        )
    read = _leaf_shards(shards[0]) if shards[0] else _parquet_shards(shards[1])
    by_writer: dict[str, list[tuple[np.ndarray[Any, Any], list[int]]]] = {}
    for writer, x, y in read:
        by_writer.setdefault(writer, []).append((x, y))
    images, labels, owners = [], [], []
    for number, writer in enumerate(sorted(by_writer)):
        chunks = by_writer[writer]
        count = sum(len(y) for _, y in chunks)
        if max_per_writer is not None and count > max_per_writer:
            continue
        images += [x for x, _ in chunks]
        labels += [label for _, y in chunks for label in y]
        owners += [number] * count
    if not images:
        raise OptionError(f"FEMNIST: no writer has at most max_per_writer={max_per_writer} images")
    pixels = torch.from_numpy(np.concatenate(images)).view(-1, 1, 28, 28)
    dataset = Dataset("femnist", pixels, torch.tensor(labels), 62, writers=torch.tensor(owners))
    return _finish(dataset, standardise)


_Chunk = tuple[str, "np.ndarray[Any, Any]", list[int]]


def _leaf_shards(paths: Sequence[Path]) -> Iterator[_Chunk]:
    for path in paths:
        try:
            shard = json.loads(path.read_bytes())
            for user, data in shard["user_data"].items():
                x = np.array(data["x"], dtype=np.float32).reshape(-1, 784)
                y = [int(label) for label in data["y"]]
                if len(x) != len(y):
                    raise ValueError(f"user {user!r} has {len(x)} images and {len(y)} labels")
                yield user, x, y
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OptionError(f"FEMNIST: {path} is no shard of LEAF ({error!r})") from error


def _parquet_shards(paths: Sequence[Path]) -> Iterator[_Chunk]:
    parquet = optional_import("pyarrow.parquet", "pyarrow", "femnist")
    image = optional_import("PIL.Image", "Pillow", "vision")
    for path in paths:
        names = set(parquet.ParquetFile(path).schema_arrow.names)
        if missing := {"image", "writer_id", "character"} - names:
            raise OptionError(
                f"FEMNIST: {path} has no column {', '.join(sorted(missing))}; "
                f"it has {', '.join(sorted(names))}"
            )
        table = parquet.read_table(path, columns=["image", "writer_id", "character"])
        for row in table.to_pylist():
            with image.open(io.BytesIO(row["image"]["bytes"])) as picture:
                pixels = np.asarray(picture.convert("L"), dtype=np.uint8)
            yield row["writer_id"], pixels.reshape(1, 784), [int(row["character"])]


def _folder(*, root: str, size: int | None = None, standardise: bool = False) -> Dataset:
    folder = Path(root)
    if not folder.is_dir():
        raise DatasetNotFound(
            f"image folder: {folder.resolve()} does not exist; it should hold one folder of "
            "images per class, alone or under train/ and test/"
        )
    parts = [folder / part for part in ("train", "test") if (folder / part).is_dir()] or [folder]
    files = [
        (path, path.relative_to(part).parts[0])
        for part in parts
        for path in sorted(part.glob("*/**/*"))
        if path.suffix.lower() in _IMAGES
    ]
    if not files:
        raise DatasetNotFound(
            f"image folder: no images in {', '.join(str(p.resolve()) for p in parts)}; expected "
            "<class>/<image>, the image with one of the endings " + ", ".join(sorted(_IMAGES))
        )
    image = optional_import("PIL.Image", "Pillow", "vision")
    classes = sorted({label for _, label in files})
    pixels = []
    for path, _ in files:
        with image.open(path) as picture:
            picture = picture.convert("RGB")
            pixels.append(np.asarray(picture if size is None else picture.resize((size, size))))
        if pixels[-1].shape != pixels[0].shape:
            raise OptionError(
                f"image folder: {path} has {pixels[-1].shape[:2]} pixels and {files[0][0]} "
                f"{pixels[0].shape[:2]}; give a size to resize them to"
            )
    x = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    number = {label: i for i, label in enumerate(classes)}
    y = torch.tensor([number[label] for _, label in files])
    return _finish(Dataset(folder.name, x, y, len(classes)), standardise)


def _npz(*, path: str, standardise: bool = False) -> Dataset:
    file = Path(path)
    if not file.is_file():
        raise DatasetNotFound(
            f"npz: {file.resolve()} does not exist; write it with numpy.savez(path, x=..., y=...)"
        )
    try:
        with np.load(file, allow_pickle=False) as arrays:
            found = {name.lower(): arrays[name] for name in arrays.files}
    except (ValueError, OSError) as error:
        raise OptionError(f"npz: {file} cannot be read without unpickling ({error})") from error
    if missing := {"x", "y"} - found.keys():
        raise OptionError(f"npz: {file} has no {' and '.join(sorted(missing))}, but {[*found]}")
    x, y = found["x"], found["y"]
    if x.dtype != np.uint8 and not np.issubdtype(x.dtype, np.floating):
        raise OptionError(f"npz: x of {file} must be uint8 or floating, got {x.dtype}")
    if y.ndim != 1 or len(y) != len(x):
        raise OptionError(
            f"npz: y of {file} must have one label per example of x; got {y.shape} for {x.shape}"
        )
    side = math.isqrt(x.shape[1]) if x.ndim == 2 else 0
    if side and side * side == x.shape[1]:  # flat square images
        x = x.reshape(-1, 1, side, side)
    elif x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    values = torch.from_numpy(np.ascontiguousarray(x))
    if values.dtype != torch.uint8:
        values = values.float()
    labels, count = _numbered(y)
    return _finish(Dataset(file.stem, values, labels, count), standardise)


def _numbered(labels: np.ndarray[Any, Any]) -> tuple[torch.Tensor, int]:
    """Labels as 0, 1, ... in their order, and how many there are."""
    classes, numbers = np.unique(labels, return_inverse=True)
    return torch.from_numpy(numbers.astype(np.int64)), len(classes)


def _finish(dataset: Dataset, standardise: bool) -> Dataset:
    return dataset.standardised() if standardise else dataset


SOURCES: dict[str, Callable[..., Dataset]] = {
    "digits": _digits,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "emnist": _emnist,
    "femnist": _femnist,
    "folder": _folder,
    "npz": _npz,
}
"""Name -> loader with annotated keyword options."""
