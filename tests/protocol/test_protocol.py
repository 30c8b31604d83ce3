"""The real driver beside a model of the ranks: no way leads to a job that stops, loses a step, or fails to agree."""

import logging

import pytest

from tests.protocol.cases import EXHAUSTIVE, RANDOM, notice
from tests.protocol.driver_states import silence
from tests.protocol.ranks import Rules, Violation
from tests.protocol.search import Case


@pytest.fixture(autouse=True)
def quiet():
    """The driver tells of each loss, which is no news here; other tests look at its log."""
    executors = logging.getLogger("executors")
    level = executors.level
    silence()
    yield
    executors.setLevel(level)


@pytest.mark.parametrize("name", ["a newcomer", "a host leaves"])
def test_all_ways_of_small_jobs(name):
    found = EXHAUSTIVE[name].search()
    assert not found.cut
    assert None in found.ends, "no way leads to success"


@pytest.mark.parametrize("name", RANDOM)
def test_random_ways_of_larger_jobs(name):
    found = RANDOM[name].walk(seed=1, count=50)
    assert None in found.ends, "no way leads to success"


def test_a_search_finds_ranks_of_which_only_some_skip_the_sync():
    """A rank that leaves by a notice is killed in the last step before, which only some of the others have."""
    case = Case({"a": 1, "b": 1, "c": 1}, changes=(notice(2),), most=3, trains=True)
    with pytest.raises(Violation, match=r"some ranks skip the sync, and others do not after .*'kill worker-2'"):
        case.search(rules=Rules(agree_on_skips=False))


def test_a_search_finds_a_rank_that_is_taken_for_one_with_the_state():
    """The only rank with the state has sent it, tells that the world has formed, and is killed."""
    with pytest.raises(Violation, match=r"begins with commit 0, but 1 was there"):
        EXHAUSTIVE["a newcomer"].search(rules=Rules(meet=False))
