"""Estimates of another clock."""

import random

import pytest

from collectives.observe.timeline.sending import Offset, Trip, offset


def trips(truth, delays):
    """One trip for each pair of delays, of the question and of the answer, by a clock that is ``truth`` ahead."""
    return [Trip(start, start + there + truth, start + there + back) for start, (there, back) in enumerate(delays, 100)]


@pytest.mark.parametrize("truth", [5.0, -3.0, 1e6])
def test_equal_ways_give_the_truth(truth):
    assert offset(trips(truth, [(0.1, 0.1)])) == pytest.approx(Offset(truth, 0.1))


def test_each_trip_bounds_the_others():
    found = offset(trips(5.0, [(0.001, 0.4), (0.4, 0.001), (0.2, 0.3)]))
    assert found == pytest.approx(Offset(5.0, 0.001))


def test_the_truth_is_within_the_error():
    numbers = random.Random(3)
    for _ in range(200):
        truth = numbers.uniform(1.0, 9.0)
        delays = [(numbers.expovariate(1000.0), numbers.expovariate(1000.0)) for _ in range(6)]
        found = offset(trips(truth, delays))
        assert abs(found.seconds - truth) <= found.error + 1e-9


def test_processes_of_one_host_have_one_clock():
    assert offset(trips(0.0, [(0.001, 0.01), (0.02, 0.001)])) == Offset(0.0, 0.0)


def test_a_clock_that_was_set_meanwhile():
    found = offset([*trips(5.0, [(0.1, 0.1)]), *trips(9.0, [(0.01, 0.01)])])
    assert found == pytest.approx(Offset(9.0, 0.01))
