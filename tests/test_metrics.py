"""Fairness figures, and the evaluation they come from."""

from __future__ import annotations

import math
from dataclasses import astuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from craft_adapters.metrics import Fairness, fairness, per_client_accuracy

accuracy = st.floats(0, 1)


def test_each_mean_has_its_own_deviation() -> None:  # MET-01
    correct, total = [90, 1, 30], [100, 2, 40]
    result = fairness([c / t for c, t in zip(correct, total, strict=True)], total)
    assert result.mean_weighted == pytest.approx(0.852112676056338, abs=1e-15)
    assert result.std_weighted == pytest.approx(0.07936216668721582, abs=1e-15)
    assert result.mean_unweighted == pytest.approx(0.7166666666666667, abs=1e-15)
    assert result.std_unweighted == pytest.approx(0.16499158227686112, abs=1e-15)
    assert (result.min, result.max, result.num_evaluated, result.num_left_out) == (0.5, 0.9, 3, 0)


@pytest.mark.parametrize("missing", [None, math.nan, 0.0])
def test_a_client_without_test_data_is_left_out(missing: float | None) -> None:  # MET-02
    result = fairness({"a": 0.8, "b": missing, "c": 0.75}, {"a": 10, "b": 0, "c": 4})
    assert result.mean_unweighted == pytest.approx(0.775, abs=1e-15)
    assert result.mean_weighted == pytest.approx(0.7857142857142857, abs=1e-15)
    assert result.std_unweighted == pytest.approx(0.025, abs=1e-15)
    assert (result.num_evaluated, result.num_left_out) == (2, 1)


@pytest.mark.parametrize("clients", [[], [None, None]])
def test_nobody_to_evaluate_is_a_warning(clients: list[None]) -> None:  # MET-02
    with pytest.warns(RuntimeWarning, match=f"none of the {len(clients)} clients has test data"):
        result = fairness(clients, [0] * len(clients))
    assert result == Fairness(*[None] * 8, num_evaluated=0, num_left_out=len(clients))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (9, 1), (10, 1), (11, 2), (30, 3), (31, 4), (70, 7)])
def test_ten_per_cent_is_rounded_up(n: int, k: int) -> None:
    values = np.arange(n) / n
    result = fairness(values)
    assert result.worst10 == pytest.approx(values[:k].mean())
    assert result.best10 == pytest.approx(values[-k:].mean())


def test_left_out_clients_do_not_count_for_the_ten_per_cent() -> None:
    result = fairness([None] * 90 + [i / 10 for i in range(10)])
    assert result.worst10 == 0.0
    assert result.best10 == 0.9


def test_without_counts_there_is_no_weighted_mean() -> None:
    result = fairness([0.25, 0.75])
    assert result.mean_unweighted == 0.5
    assert (result.mean_weighted, result.std_weighted) == (None, None)


def test_numbers_of_other_libraries() -> None:
    expected = fairness([0.5, 0.25], [1, 3])
    assert fairness(np.array([0.5, 0.25], "f4"), np.array([1, 3])) == expected
    assert fairness(torch.tensor([0.5, 0.25]), torch.tensor([1, 3])) == expected
    assert all(type(value) in (float, int) for value in astuple(expected))


def test_messages_name_the_client() -> None:
    with pytest.raises(ValueError, match=r"in one of the two only: 'b', 'c'"):
        fairness({"a": 1, "b": 1}, {"a": 1, "c": 1})
    with pytest.raises(ValueError, match="client 1: num_examples must be finite and >= 0, got -2"):
        fairness([1, 1], [1, -2])
    with pytest.raises(ValueError, match="client 'x': accuracy must be finite, got inf"):
        fairness({"x": math.inf})


@settings(deadline=None)
@given(st.lists(st.tuples(accuracy, st.integers(1, 1000)), min_size=1, max_size=60), st.randoms())
def test_order_and_ranking_hold_to_the_last_bit(
    clients: list[tuple[float, int]], shuffler: object
) -> None:
    result = fairness(*zip(*clients, strict=True))
    shuffler.shuffle(clients)  # type: ignore[attr-defined]
    assert fairness(*zip(*clients, strict=True)) == result
    figures = (result.min, result.worst10, result.mean_unweighted, result.best10, result.max)
    assert list(figures) == sorted(figures)
    assert result.min <= result.mean_weighted <= result.max
    assert 0 <= result.std_unweighted <= (result.max - result.min) / 2 * (1 + 1e-15)


@settings(deadline=None)
@given(st.lists(accuracy, min_size=1, max_size=60), st.integers(1, 9))
def test_against_numpy(values: list[float], count: int) -> None:
    result = fairness(values, [count] * len(values))
    assert result.mean_unweighted == pytest.approx(np.mean(values), abs=1e-14)
    assert result.std_unweighted == pytest.approx(np.std(values), abs=1e-7)
    assert result.mean_weighted == result.mean_unweighted, "equal weights change nothing"
    assert result.std_weighted == result.std_unweighted


@settings(deadline=None)
@given(accuracy, st.integers(1, 40))
def test_clients_that_are_all_the_same(value: float, n: int) -> None:
    result = fairness([value] * n)
    assert astuple(result)[:2] == (value, 0.0)
    assert result.worst10 == result.best10 == value


@settings(deadline=None)
@given(st.lists(accuracy, min_size=1, max_size=30), st.integers(0, 30))
def test_a_left_out_client_changes_the_count_alone(values: list[float], at: int) -> None:
    more = fairness([*values[:at], None, *values[at:]])
    assert astuple(more)[:-1] == astuple(fairness(values))[:-1]
    assert more.num_left_out == 1


class Threshold(nn.Module):
    """Class 1 if the first entry is above 0.5; notes how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm1d(1).eval()
        self.dropout = nn.Dropout(0.5)
        self.batches: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.training
        assert not self.dropout.training
        assert not torch.is_grad_enabled()
        self.batches.append(len(x))
        return torch.stack([0.5 - x[:, 0], x[:, 0] - 0.5], dim=1) * 4


def test_clients_share_batches() -> None:
    x = torch.linspace(0, 1, 40).reshape(40, 1)
    y = (torch.arange(40) >= 18).long()  # two labels the model gets wrong: 18 and 19
    parts = {"a": np.arange(18), 7: np.arange(16, 20), "none": np.array([]), "z": [18]}
    model = Threshold()
    model.train()
    model.frozen.eval()
    scores = per_client_accuracy(model, x, y, parts, batch_size=10)
    assert model.batches == [10, 10, 3]
    assert scores.accuracy == {"a": 1.0, 7: 0.5, "none": None, "z": 0.0}
    assert scores.num_examples == {"a": 18, 7: 4, "none": 0, "z": 1}
    assert model.training
    assert model.dropout.training
    assert not model.frozen.training, "a layer frozen in eval mode stays frozen"
    for client, part in parts.items():
        if len(part):
            with torch.no_grad():
                alone = nn.functional.cross_entropy(model.eval()(x[part]), y[part])
            assert scores.loss[client] == pytest.approx(alone.item(), rel=1e-6)
    assert scores.loss["none"] is None
    assert fairness(scores.accuracy, scores.num_examples).num_left_out == 1


def test_nobody_has_test_data() -> None:
    scores = per_client_accuracy(Threshold(), torch.zeros(3, 1), torch.zeros(3), [[], []])
    assert scores.accuracy == scores.loss == {0: None, 1: None}
    assert per_client_accuracy(nn.Identity(), torch.zeros(0, 2), torch.zeros(0), []).accuracy == {}


def test_the_mode_comes_back_after_an_error() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError):
        per_client_accuracy(model, torch.zeros(2, 5), torch.zeros(2), [[0]])
    assert model.training


def test_refusals() -> None:
    x, y = torch.zeros(3, 2), torch.zeros(3)
    with pytest.raises(IndexError, match=r"client 'b': indices must be in 0\.\.2"):
        per_client_accuracy(nn.Identity(), x, y, {"a": [0], "b": [3]})
    with pytest.raises(IndexError, match="client 0"):
        per_client_accuracy(nn.Identity(), x, y, [[-1]])
    with pytest.raises(ValueError, match=r"client 0: .* float64 of shape \(1,\)"):
        per_client_accuracy(nn.Identity(), x, y, [[0.5]])
    with pytest.raises(ValueError, match="3 examples in x but 2 labels"):
        per_client_accuracy(nn.Identity(), x, y[:2], [[0]])
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        per_client_accuracy(nn.Identity(), x, y, [[0]], batch_size=0)
