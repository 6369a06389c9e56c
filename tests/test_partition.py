"""The split of a data set over clients, and the draw of a round's clients."""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from craft_adapters.errors import OptionError
from craft_adapters.simulation import (
    Dataset,
    count_clients,
    dirichlet_partition,
    iid_partition,
    load_digits,
    load_split,
    sample_clients,
    save_split,
    surviving_clients,
    train_test_split,
    writer_partition,
)


def assert_covers(parts: Sequence[np.ndarray], n: int) -> None:
    together = np.concatenate(parts)
    assert together.dtype == np.int64
    assert np.array_equal(np.sort(together), np.arange(n)), "each index exactly once"
    assert all(np.all(np.diff(part) > 0) for part in parts), "sorted"


def same(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return len(a) == len(b) and all(map(np.array_equal, a, b))


@pytest.mark.parametrize("alpha", [1e-4, 1e-3, 0.01, 1e6])
@pytest.mark.parametrize("seed", range(5))
def test_extreme_alpha(alpha: float, seed: int) -> None:  # PAR-01
    labels = np.repeat(np.arange(4), 25)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = dirichlet_partition(labels, num_clients=4, alpha=alpha, seed=seed)
    assert_covers(parts, 100)
    assert min(map(len, parts)) >= 10
    assert same(parts, dirichlet_partition(labels, num_clients=4, alpha=alpha, seed=seed))


def test_too_little_data_is_refused_at_once() -> None:  # PAR-02
    labels = np.repeat(np.arange(10), 2)
    with pytest.raises(ValueError, match=r"30 examples.*there are 20"):
        dirichlet_partition(labels, num_clients=10, alpha=0.05, min_size=3, seed=0)


def test_an_unlikely_minimum_is_met_by_moving() -> None:  # PAR-02
    labels = np.repeat(np.arange(10), 60)
    start = time.monotonic()
    parts = dirichlet_partition(labels, num_clients=100, alpha=0.1, min_size=5, seed=0)
    assert time.monotonic() - start < 5
    assert_covers(parts, 600)
    assert min(map(len, parts)) >= 5


def test_a_minimum_that_takes_every_example() -> None:
    parts = dirichlet_partition(np.arange(30) % 3, num_clients=10, alpha=1e-3, min_size=3, seed=4)
    assert_covers(parts, 30)
    assert [len(part) for part in parts] == [3] * 10


def test_seeds() -> None:  # PAR-04
    np.random.seed(999)  # noqa: NPY002  (the state that a user's program may rely on)
    random.seed(999)
    torch.manual_seed(999)

    def probe() -> tuple[Any, ...]:
        _, keys, position, *_ = np.random.get_state()  # noqa: NPY002
        return keys.tolist(), position, random.getstate(), torch.get_rng_state().tolist()

    before = probe()
    labels = np.repeat(np.arange(5), 40)
    one, again, two = (
        dirichlet_partition(labels, num_clients=6, alpha=0.5, seed=seed) for seed in (1, 1, 2)
    )
    assert same(one, again)
    assert not same(one, two)
    assert same(train_test_split(one, seed=1).test, train_test_split(one, seed=1).test)
    assert not same(train_test_split(one, seed=1).test, train_test_split(one, seed=2).test)
    rounds = [[sample_clients(20, 3, round=r, seed=s) for r in range(9)] for s in (1, 1, 2)]
    assert rounds[0] == rounds[1]
    assert rounds[0] != rounds[2]
    assert all(rounds[0][r] != rounds[2][r] for r in range(3)), "not the round number alone"
    assert probe() == before


def test_the_split_of_a_seed_is_pinned() -> None:
    """A change here changes the data of every published run: never by accident."""
    parts = dirichlet_partition(np.arange(40) % 4, num_clients=4, alpha=0.3, min_size=5, seed=77)
    assert [part.tolist() for part in parts] == PINNED_PARTS
    assert train_test_split(parts, seed=77).test[0].tolist() == PINNED_TEST
    assert sample_clients(100, 5, round=3, seed=77) == PINNED_CLIENTS


PINNED_PARTS = [
    [9, 11, 13, 27, 35],
    [1, 2, 5, 14, 18, 21, 24, 25, 26, 29, 30, 33, 34, 37, 38],
    [0, 3, 4, 7, 8, 12, 15, 19, 20, 23, 28, 31, 32, 36, 39],
    [6, 10, 16, 17, 22],
]
PINNED_TEST = [11]
PINNED_CLIENTS = [65, 68, 91, 92, 95]


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(-3, 6), max_size=80),
    num_clients=st.integers(1, 12),
    alpha=st.floats(5e-324, 1.7e308),
    min_size=st.integers(0, 6),
    seed=st.integers(0, 2**70),
)
def test_any_valid_request_is_met(
    labels: list[int], num_clients: int, alpha: float, min_size: int, seed: int
) -> None:
    min_size = min(min_size, len(labels) // num_clients)
    parts = dirichlet_partition(
        labels, num_clients=num_clients, alpha=alpha, min_size=min_size, seed=seed
    )
    assert len(parts) == num_clients
    assert_covers(parts, len(labels))
    assert min(map(len, parts)) >= min_size


def test_alpha_means_what_it_says() -> None:
    labels = np.repeat(np.arange(10), 1000)

    def counts(alpha: float, seed: int) -> np.ndarray:
        """Examples per client and class, shape (20, 10)."""
        parts = dirichlet_partition(labels, num_clients=20, alpha=alpha, min_size=0, seed=seed)
        return np.array([np.bincount(labels[part], minlength=10) for part in parts])

    assert set(counts(1e-4, seed=0).flat) == {0, 1000}, "each class has one owner"
    assert abs(counts(1e6, seed=0) - 50).max() <= 1
    # A share has variance (1/m) (1 - 1/m) / (m alpha + 1), with m = 20 clients.
    shares = np.array([counts(0.5, seed) for seed in range(20)]) / 1000
    assert shares.var() == pytest.approx(0.05 * 0.95 / 11, rel=0.15)


def test_rounding_favours_no_client() -> None:
    """Fewer examples in a class than clients: the same clients must not get one in each class."""
    labels = np.repeat(np.arange(200), 10)
    parts = dirichlet_partition(labels, num_clients=40, alpha=1e6, min_size=0, seed=0)
    sizes = np.array([len(part) for part in parts])
    assert abs(sizes - 50).max() < 25


def test_labels_of_other_kinds() -> None:
    numbers = [0, 1, 2] * 10
    expected = dirichlet_partition(numbers, num_clients=3, alpha=1, min_size=1, seed=5)
    for labels in (torch.tensor(numbers), np.array(list("abc") * 10), np.array(numbers, "u1")):
        got = dirichlet_partition(labels, num_clients=3, alpha=1, min_size=1, seed=5)
        assert same(got, expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"alpha": 0.0}, ValueError, "alpha must be a finite number > 0"),
        ({"alpha": float("nan")}, ValueError, "alpha must be a finite number > 0"),
        ({"num_clients": 0}, ValueError, "num_clients must be at least 1"),
        ({"num_clients": 2.0}, TypeError, "num_clients must be an integer"),
        ({"min_size": -1}, ValueError, "min_size must be at least 0"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"seed": None}, TypeError, "seed must be an integer"),
        ({"labels": np.zeros((50, 2))}, ValueError, "one label per example"),
    ],
)
def test_bad_requests(change: dict[str, Any], error: type[Exception], message: str) -> None:
    request: dict[str, Any] = {"num_clients": 2, "alpha": 1.0, "seed": 0, "labels": [0] * 50}
    request |= change
    with pytest.raises(error, match=message):
        dirichlet_partition(**request)


def test_train_test_split_keeps_to_each_client() -> None:
    parts = [np.arange(100, 100 + n) for n in (0, 1, 2, 3, 10, 100)]
    train, test = train_test_split(parts, seed=3)
    assert [len(part) for part in train] == [0, 1, 1, 2, 8, 80]
    assert [len(part) for part in test] == [0, 0, 1, 1, 2, 20]
    for part, a, b in zip(parts, train, test, strict=True):
        assert np.array_equal(np.sort(np.concatenate([a, b])), part)
        assert a.dtype == b.dtype == np.int64
    longer = train_test_split([*parts[:3], np.arange(5), parts[4]], seed=3)
    assert same(longer.test[:3] + longer.test[4:], test[:3] + test[4:5]), "others do not matter"


@settings(deadline=None)
@given(n=st.integers(2, 60), fraction=st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_train_and_test_are_never_empty(n: int, fraction: float) -> None:
    train, test = train_test_split([np.arange(n)], test_fraction=fraction, seed=0)
    assert len(train[0]) >= 1
    assert len(test[0]) >= 1
    assert len(train[0]) + len(test[0]) == n


def test_train_test_split_refusals() -> None:
    with pytest.raises(ValueError, match="test_fraction must be between 0 and 1, got 1"):
        train_test_split([[0, 1]], test_fraction=1, seed=0)
    with pytest.raises(TypeError, match=r"parts\[1\] must hold integer indices"):
        train_test_split([[0], [0.5, 1.0]], seed=0)
    with pytest.raises(ValueError, match=r"parts\[0\] must be one-dimensional"):
        train_test_split([[[0, 1]]], seed=0)


def test_sample_clients() -> None:
    drawn = [sample_clients(10, 4, round=r, seed=0) for r in range(2000)]
    assert all(d == sorted(set(d)) and len(d) == 4 and set(d) <= set(range(10)) for d in drawn)
    assert all(type(client) is int for client in drawn[0])
    times = np.bincount(np.concatenate(drawn))
    assert abs(times - 800).max() < 110  # 5 standard deviations
    with pytest.raises(ValueError, match="per_round=11 of num_clients=10"):
        sample_clients(10, 11, round=0, seed=0)


def test_digits() -> None:
    digits = load_digits()
    assert digits.x.shape == (1797, 1, 8, 8)
    assert digits.x.dtype == torch.float32
    assert (digits.x.min(), digits.x.max()) == (0.0, 1.0)
    assert digits.y.shape == (1797,)
    assert digits.y.dtype == torch.int64
    assert digits.y.unique().tolist() == list(range(digits.num_classes))
    assert len(digits) == 1797


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"craft-adapters\[data\]"):
        load_digits()


def test_dataset_of_two_lengths() -> None:
    with pytest.raises(ValueError, match="'odd': 2 examples in x but 3 labels"):
        Dataset("odd", torch.zeros(2, 1), torch.zeros(3), num_classes=1)


@settings(deadline=None)
@given(n=st.integers(1, 60), num_clients=st.integers(1, 60), seed=st.integers(0, 2**40))
def test_iid_parts_cover_and_are_even(n: int, num_clients: int, seed: int) -> None:
    if num_clients > n:
        with pytest.raises(ValueError, match="cannot share"):
            iid_partition(n, num_clients=num_clients, seed=seed)
        return
    parts = iid_partition(n, num_clients=num_clients, seed=seed)
    assert_covers(parts, n)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert same(parts, iid_partition(n, num_clients=num_clients, seed=seed))


def test_iid_is_random() -> None:
    one, two = (iid_partition(100, num_clients=5, seed=seed) for seed in (1, 2))
    assert not same(one, two)
    assert not np.array_equal(one[0], np.arange(20))


@settings(deadline=None)
@given(writers=st.lists(st.integers(-2, 9), min_size=1, max_size=50), data=st.data())
def test_writers_keep_their_examples(writers: list[int], data: st.DataObject) -> None:
    everyone = writer_partition(writers, seed=0)
    assert_covers(everyone, len(writers))
    assert [{writers[i] for i in part} for part in everyone] == [{w} for w in sorted(set(writers))]
    m = data.draw(st.integers(1, len(everyone)))
    some = writer_partition(torch.tensor(writers), num_clients=m, seed=3)
    assert len(some) == m
    assert {tuple(part) for part in some} <= {tuple(part) for part in everyone}


def test_more_clients_than_writers() -> None:
    with pytest.raises(ValueError, match="3 clients need as many writers; there are 2"):
        writer_partition([0, 1, 1], num_clients=3, seed=0)


@pytest.mark.parametrize(
    ("num_clients", "join", "drop", "selected", "surviving"),
    [
        (10, 1.0, 0.9, 10, 1),
        (100, 0.29, 0.0, 29, 29),
        (100, 0.07, 0.0, 7, 7),
        (5, 0.1, 0.0, 1, 1),
        (3, 1.0, 0.0, 3, 3),
        (10, 4, 0.5, 4, 2),
    ],
)
def test_shares_of_clients_are_counted_exactly(  # WGT-08
    num_clients: int, join: float, drop: float, selected: int, surviving: int
) -> None:
    count = count_clients(num_clients, join)
    assert count == selected
    drawn = sample_clients(num_clients, count, round=0, seed=0)
    left = surviving_clients(drawn, drop, round=0, seed=0)
    assert len(left) == surviving
    assert set(left) <= set(drawn)
    assert left == sorted(left)


@pytest.mark.parametrize("wanted", [0, 11, 0.0, 1.5, -0.1, float("nan")])
def test_impossible_shares(wanted: float) -> None:
    with pytest.raises(ValueError, match=r"share of clients|number of clients must be in 1\.\.10"):
        count_clients(10, wanted)


def test_nobody_can_be_made_to_answer() -> None:
    with pytest.raises(ValueError, match="drop_rate must be at least 0 and below 1"):
        surviving_clients([0, 1], 1.0, round=0, seed=0)


def test_a_split_survives_its_file(tmp_path: Path) -> None:
    split = train_test_split(iid_partition(50, num_clients=4, seed=0), seed=0)
    save_split(split, tmp_path / "partition.json")
    again = load_split(tmp_path / "partition.json", 50, seed=9)
    assert same(again.train, split.train)
    assert same(again.test, split.test)


def test_an_index_file_without_a_test_part_is_split(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    path.write_text("[[4, 2, 0, 1, 3], [9]]")
    got = load_split(path, 10, seed=0)
    expected = train_test_split([[0, 1, 2, 3, 4], [9]], seed=0)
    assert same(got.train, expected.train)
    assert same(got.test, expected.test)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot be read as JSON"),
        ("{}", "one list of indices per client"),
        ("[]", "one list of indices per client"),
        ('{"train": [[0]], "test": []}', "one list of indices per client, alone or under"),
        ('{"train": [[0]], "test": [[1], [2]]}', "1 clients in train but 2 in test"),
        ("[[0], [1.5]]", "client 1 is no list of whole numbers"),
        ("[[true]]", "client 0 is no list of whole numbers"),
        ("[[0, 10]]", r"index 10 is outside 0\.\.9"),
        ("[[-1]]", r"index -1 is outside 0\.\.9"),
        ('{"train": [[0]], "test": [[0]]}', "index 0 is used more than once"),
    ],
)
def test_index_files_that_cannot_be(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "index.json"
    path.write_text(content)
    with pytest.raises(OptionError, match=message) as caught:
        load_split(path, 10, seed=0)
    assert str(path) in str(caught.value)
