"""The small federation that experiments and personalised training run on.

Data sets, the partition of a data set over clients, and the draw of each round's clients. Each
draw has its own seeded generator: the global ones of numpy, random and torch are never touched.
"""

from __future__ import annotations

from ._datasets import Dataset, load_digits
from ._partition import Split, dirichlet_partition, sample_clients, train_test_split

__all__ = [
    "Dataset",
    "Split",
    "dirichlet_partition",
    "load_digits",
    "sample_clients",
    "train_test_split",
]
