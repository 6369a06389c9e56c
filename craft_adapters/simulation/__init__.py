"""The small federation that experiments and personalised training run on.

Data sets, the partition of a data set over clients, and the draw of each round's clients. Each
draw has its own seeded generator: the global ones of numpy, random and torch are never touched.
"""

from __future__ import annotations

from ._augment import crop_flip
from ._config import RunConfig, read_config
from ._datasets import Dataset, DatasetNotFound, load_digits
from ._engines import Trained
from ._federation import Federation, Job
from ._folder import RunFolder, read_lines
from ._method import Method
from ._partition import (
    IndexArray,
    Split,
    count_clients,
    dirichlet_partition,
    hold_out,
    iid_partition,
    sample_clients,
    surviving_clients,
    train_test_split,
    writer_partition,
)
from ._results import Series, collect, find_runs
from ._run import Done, Run, Sink
from ._settings import LocalTraining
from ._sources import available_datasets, load_dataset
from ._split_file import load_split, save_split
from ._store import ClientStore

__all__ = [
    "ClientStore",
    "Dataset",
    "DatasetNotFound",
    "Done",
    "Federation",
    "IndexArray",
    "Job",
    "LocalTraining",
    "Method",
    "Run",
    "RunConfig",
    "RunFolder",
    "Series",
    "Sink",
    "Split",
    "Trained",
    "available_datasets",
    "collect",
    "count_clients",
    "crop_flip",
    "dirichlet_partition",
    "find_runs",
    "hold_out",
    "iid_partition",
    "load_dataset",
    "load_digits",
    "load_split",
    "read_config",
    "read_lines",
    "sample_clients",
    "save_split",
    "surviving_clients",
    "train_test_split",
    "writer_partition",
]
