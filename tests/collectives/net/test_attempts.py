"""Attempts at what did not work, on a clock that goes on only in the pauses."""

import random
from types import SimpleNamespace

import pytest

from collectives.net import attempts as retries
from collectives.net.attempts import LONGEST_PAUSE, attempts


@pytest.fixture
def pauses(monkeypatch):
    """The seconds of each pause."""
    found = []
    monkeypatch.setattr(retries, "time", SimpleNamespace(monotonic=lambda: 100.0 + sum(found)))
    return found


def test_they_become_rare_and_end_in_time(pauses):
    left = list(attempts(30.0, pauses.append))
    assert left == pytest.approx([30.0 - sum(pauses[:count]) for count in range(len(left))])
    assert left[-1] >= 0
    assert len(pauses) == len(left) - 1
    assert all(LONGEST_PAUSE / 2 <= pause <= LONGEST_PAUSE for pause in pauses[6:])
    assert pauses[0] <= 0.02
    assert sum(pauses) >= 30.0 - LONGEST_PAUSE


def test_not_all_ranks_come_at_once(pauses):
    for _ in attempts(5.0, pauses.append):
        pass
    first = list(pauses)
    pauses.clear()
    for _ in attempts(5.0, pauses.append):
        pass
    assert pauses != first


def test_there_is_always_one(pauses):
    assert list(attempts(0.0, pauses.append)) == [0.0]


def test_the_numbers_of_a_script_stay_the_same(pauses):
    state = random.getstate()
    for _ in attempts(5.0, pauses.append):
        pass
    assert random.getstate() == state
