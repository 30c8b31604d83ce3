"""The real driver beside a model of the ranks: no way leads to a job that stops, loses a step, or fails to agree."""

import json
import logging
from dataclasses import replace

import pytest

from tests.protocol.cases import EXHAUSTIVE, RANDOM
from tests.protocol.driver_states import silence
from tests.protocol.forgotten import forgetting
from tests.protocol.mutations import HOST_LEAVES, MUTATIONS, NEWCOMER, TWO, mutation
from tests.protocol.ranks import Job, Members, Rank, Violation
from tests.protocol.saves import PROGRESS, OtherSearchError

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


SMALL = EXHAUSTIVE["a newcomer"]


class Interrupts:
    """Takes a few lines about the progress of a search, then ends it."""

    def __init__(self, lines):
        self._lines = lines

    def __call__(self, line):
        self._lines -= 1
        if not self._lines:
            raise KeyboardInterrupt


def test_a_search_that_was_interrupted_goes_on(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        SMALL.search(folder=tmp_path, every=0, at_once=50, tell=Interrupts(9))
    for path in tmp_path.iterdir():
        if path.name != PROGRESS:
            path.write_bytes(path.read_bytes() + b"what a search has written that was killed before it was done")
    part = SMALL.search(most_states=1000, folder=tmp_path, every=0, at_once=50)
    assert part.cut
    assert SMALL.search(folder=tmp_path) == SMALL.search()


def test_a_search_that_is_complete_is_only_read_again(tmp_path):
    found = SMALL.search(folder=tmp_path)
    assert SMALL.search(folder=tmp_path, tell=Interrupts(2)) == found


def test_a_search_does_not_go_on_with_other_code(tmp_path):
    SMALL.search(most_states=100, folder=tmp_path)
    saved = json.loads((tmp_path / PROGRESS).read_text())
    saved["code"] |= {"executors/driver/driver.py": "another", "executors/gone.py": "this"}
    (tmp_path / PROGRESS).write_text(json.dumps(saved))
    expected = r"other code: executors/driver/driver\.py, executors/gone\.py differ; go back to the code"
    with pytest.raises(OtherSearchError, match=expected):
        SMALL.search(folder=tmp_path)


def test_a_folder_has_one_search(tmp_path):
    SMALL.search(most_states=100, folder=tmp_path)
    with pytest.raises(OtherSearchError, match="the search of another job"):
        replace(SMALL, faults=2).search(folder=tmp_path)


def test_a_success_in_a_later_world_than_that_of_a_rank_that_still_trains_is_kept():
    """That rank has heard of no later world; its loss is repaired already. The largest search came upon it."""
    worlds = tuple(Members(round, "worker-0", ("worker-1",), False) for round in range(4))
    ranks = Rank("worker-0", "finishes", 3), Rank("worker-1", "runs", 1)
    assert forgetting(Job(ranks, worlds, finished=3, may_be_lost=True)).finished == 3
    ranks = Rank("worker-0", "finishes", 3), Rank("worker-1", "runs", 3)
    assert forgetting(Job(ranks, worlds, finished=2, may_be_lost=True)).finished == 0
