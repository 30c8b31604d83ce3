"""The real driver beside a model of the ranks: no way leads to a job that stops, loses a step, or fails to agree."""

import logging
from dataclasses import replace

import pytest

from tests.protocol.cases import EXHAUSTIVE, RANDOM
from tests.protocol.driver_states import silence
from tests.protocol.mutations import HOST_LEAVES, MUTATIONS, NEWCOMER, TWO, mutation
from tests.protocol.ranks import Violation

QUICK = [name for name in MUTATIONS if name != "only some ranks skip the sync"]


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


@pytest.mark.parametrize("case", [TWO, *(replace(case, faults=0) for case in (HOST_LEAVES, NEWCOMER))])
def test_the_reduced_states_have_the_same_ends(case):
    reduced, full = case.search(), case.search(is_reduced=False)
    assert reduced.kinds == full.kinds
    assert reduced.states * 2 < full.states


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_search_finds_each_fault(name):
    with mutation(name) as (case, rules, shown), pytest.raises(Violation, match=shown):
        case.search(rules=rules)


@pytest.mark.parametrize("name", QUICK)
def test_a_search_of_all_states_finds_the_same_faults(name):
    with mutation(name) as (case, rules, shown), pytest.raises(Violation, match=shown):
        case.search(rules=rules, is_reduced=False)
