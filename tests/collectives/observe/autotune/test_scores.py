"""The speed of a job from the batches that start."""

import pytest

from collectives.observe.autotune import scores as module
from collectives.observe.autotune.scores import SETTLING_STEPS, Scores


def feed(scores, steps, seconds, begin=0.0, batches=(("a", "b"), ("c",)), nbytes=500_000):
    """The scores of so many steps of two batches each."""
    heard = []
    for step in range(steps):
        for place, names in enumerate(batches):
            heard.append(scores.start(names, nbytes, begin + seconds * (step + place / 2)))
    return [score for score in heard if score is not None]


def test_a_score_is_bytes_in_a_microsecond():
    scores = Scores(4, 3)
    assert feed(scores, SETTLING_STEPS + 12, 0.01) == []
    assert feed(scores, 1, 0.01, 0.01 * (SETTLING_STEPS + 12)) == [pytest.approx(100.0)]


def test_settling_steps_do_not_count():
    scores = Scores(2, 1)
    feed(scores, SETTLING_STEPS, 50.0)
    assert feed(scores, 3, 0.01, 50.0 * SETTLING_STEPS) == [pytest.approx(100.0)]


def test_a_score_is_the_median():
    scores = Scores(1, 3)
    feed(scores, SETTLING_STEPS, 0.01)
    found = [scores.start(["a"], 1_000_000, time) for time in (1.0, 1.01, 3.0, 3.01)]
    assert found[:3] == [None] * 3
    assert found[3] == pytest.approx(100.0)


def test_a_restart_drops_what_was_measured():
    scores = Scores(2, 1)
    feed(scores, SETTLING_STEPS + 1, 0.01)
    scores.restart()
    assert feed(scores, SETTLING_STEPS + 1, 0.01, 9.0) == []
    assert feed(scores, 2, 0.01, 9.0 + 0.01 * (SETTLING_STEPS + 1)) == [pytest.approx(100.0)]


def test_names_that_never_repeat_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(module, "MOST_NAMES", 10)
    scores = Scores(2, 1)
    assert not any(scores.start([f"unnamed {number}"], 1, float(number)) for number in range(100))
    assert len(scores._counts) <= 11
