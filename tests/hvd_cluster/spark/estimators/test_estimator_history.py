"""Averages over the rows of all ranks, the best epoch, and when to stop."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_cluster.core import basics
from hvd_cluster.spark.estimators.history import (
    BestEpoch,
    RowAverages,
    has_stalled,
    is_better,
    merged,
    over_all_ranks,
)

batches = st.lists(st.tuples(st.integers(1, 50), st.floats(-100, 100)), max_size=8)


def averages_of(found):
    averages = RowAverages()
    for rows, value in found:
        averages.add(rows, {"loss": value})
    return averages


@given(st.lists(batches, max_size=4))
def test_ranks_together_have_the_average_of_all_rows(ranks):
    total = merged(averages_of(rank) for rank in ranks)
    together = [each for rank in ranks for each in rank]
    rows = sum(count for count, _ in together)
    assert total.rows == rows
    expected = {"loss": pytest.approx(sum(count * value for count, value in together) / rows)} if rows else {}
    assert total.means() == expected


def test_tensors_are_read_at_the_end_only():
    class Lazy:
        def __init__(self, value):
            self.value = value

        def __mul__(self, rows):
            return Lazy(self.value * rows)

        def __radd__(self, other):
            return Lazy(self.value + other)

        __add__ = __radd__

        def __float__(self):
            return float(self.value)

    averages = RowAverages()
    averages.add(4, {"loss": Lazy(2.0)})
    assert isinstance(averages.sums["loss"], Lazy)
    assert averages.means() == {"loss": 2.0}


def test_the_exchange_between_ranks(ranks):
    def exchange():
        from hvd_cluster.core import basics

        own = RowAverages()
        own.add(basics.rank() + 1, {"loss": float(basics.rank())})
        return over_all_ranks({"train": own, "validation": RowAverages()})

    for found in ranks.run(exchange):
        assert found["train"].rows == sum(range(1, ranks.size + 1))
        assert found["train"].means()["loss"] == pytest.approx({1: 0.0, 2: 2 / 3}[ranks.size])
        assert found["validation"].means() == {}


@pytest.mark.parametrize(
    ("value", "best", "better"),
    [
        (1.0, None, True),
        (None, None, True),
        (1.0, 2.0, True),
        (2.0, 1.0, False),
        (1.0, 1.0, False),
        (math.nan, 1.0, False),
        (1.0, math.nan, True),
    ],
)
def test_which_epoch_is_better(value, best, better):
    assert is_better(value, best) is better


def test_validations_over_other_rows_are_compared_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(basics, "rank", lambda: 0)
    best = BestEpoch(1, 0.5, {}, "mse", rows=80)
    assert best.yields_to(0.4, "mse", 80)
    assert best.yields_to(9.0, "mae", 40)
    assert best.yields_to(None, "mse", 0)
    assert not caplog.records
    assert not best.yields_to(0.6, "mse", 40)
    (record,) = caplog.records
    assert "best epoch so far, 2, was validated over 80 rows, and the present one over 40" in record.getMessage()


@pytest.mark.parametrize(
    ("values", "patience", "stalled"),
    [
        ([], 2, False),
        ([3.0, 2.0, 1.0], 1, False),
        ([3.0, 2.0, 1.0], 0, False),
        ([3.0, 2.0, 2.0], 0, True),
        ([1.0, 2.0], 2, False),
        ([1.0, 2.0, 3.0], 2, True),
        ([1.0, 2.0, 0.5, 0.6], 2, False),
        ([1.0, math.nan, math.nan], 2, True),
    ],
)
def test_when_the_loss_does_not_fall_any_more(values, patience, stalled):
    assert has_stalled(values, patience) is stalled


def test_a_loss_must_fall_by_enough():
    assert has_stalled([1.0, 0.95, 0.9], 2, min_delta=0.2)
    assert not has_stalled([1.0, 0.7, 0.4], 2, min_delta=0.2)
