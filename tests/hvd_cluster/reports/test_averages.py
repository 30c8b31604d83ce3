"""Averages over ranks, weighted by samples."""

import math

import numpy as np
import pytest

from collectives.api import InvalidRequestError
from hvd_cluster.reports.averages import combined, share_of
from hvd_cluster.reports.metrics_reader import metrics
from tests.ranks import player


@pytest.fixture
def on_ranks(monkeypatch):
    return player(monkeypatch)


def average(*given):
    """Of ranks that give these values and samples."""
    return combined([share_of(values, samples) for values, samples in given])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_get_the_same_averages(on_ranks, size):
    def body(rank):
        own = {"loss": float(rank.number), "accuracy": np.float32(0.5)}
        each = metrics.average(own, samples=rank.number + 1, process_set=rank.process_set)
        one = metrics.average(rank.number, rank.number, process_set=rank.process_set, name="one")
        return each, one

    weights = range(1, size + 1)
    loss = sum(number * weight for number, weight in enumerate(weights)) / sum(weights)
    found = on_ranks(size, body)
    assert len({repr(each) for each in found}) == 1
    assert found[0][0] == pytest.approx({"loss": loss, "accuracy": 0.5})
    expected = [0.0, 1.0, 5 / 3][size - 1]
    assert found[0][1] == pytest.approx(expected) or (size == 1 and math.isnan(found[0][1]))


def test_an_error_of_one_rank_is_raised_on_all(on_ranks):
    def body(rank):
        values = {"loss": 1.0 if rank.number else "high"}
        with pytest.raises(InvalidRequestError, match=r"metrics.average: rank 0: 'loss' is a str, which is no number"):
            metrics.average(values, process_set=rank.process_set)
        return metrics.average(2, process_set=rank.process_set)

    assert on_ranks(2, body) == [2.0, 2.0]


def test_empty_ranks_count_nothing():
    assert average(({"a": 1.0}, 3), (None, 0), ({}, 0), ({"b": math.nan}, 0), ("text", 0)) == {"a": 1.0}
    assert average((4, 2), (None, 0), ({"b": 1}, 0)) == 4.0


def test_nobody_has_samples():
    found = average((None, 0), ({"a": 1.0}, 0), ({"b": 1.0}, 0))
    assert list(found) == ["a", "b"]
    assert all(map(math.isnan, found.values()))
    assert math.isnan(average((None, 0), (1, 0)))


def test_nan_and_infinity_are_not_hidden():
    found = average(({"a": math.nan, "b": math.inf, "c": math.inf}, 1), ({"a": 1, "b": 1, "c": -math.inf}, 1))
    assert math.isnan(found["a"])
    assert found["b"] == math.inf
    assert math.isnan(found["c"])


def test_great_numbers_do_not_overflow():
    assert average((1e308, 10), (1e308, 10)) == 1e308


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([({"a": 1}, 1), ({"b": 1}, 1)], r"ranks \[0\]: \['a'\]; ranks \[1\]: \['b'\]"),
        ([({"a": 1}, 1), (1, 1)], r"ranks \[0\]: \['a'\]; ranks \[1\]: one number"),
        (
            [(1, 1), (1, -1), (1, math.nan), (1, "x")],
            r"rank 1: samples=-1 .*; rank 2: samples=nan .*; rank 3: samples='x'",
        ),
        ([(np.ones(2), 1)], "'values' is a ndarray, which is no number"),
        ([(None, 1)], "'values' is a NoneType, which is no number"),
    ],
)
def test_values_that_are_refused(given, said):
    with pytest.raises(InvalidRequestError, match=said):
        average(*given)


class Loss:
    """As torch's with a gradient, for which float() warns."""

    def __float__(self):
        raise UserWarning

    def detach(self):
        return 2.0


def test_a_loss_with_a_gradient_gives_its_value():
    assert average((Loss(), 1), ({}, 0)) == 2.0
