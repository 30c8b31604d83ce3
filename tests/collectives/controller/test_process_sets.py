"""Ids -> ranks."""

import pytest

from collectives.api import InvalidRequestError
from collectives.controller.process_sets import GLOBAL, ProcessSets


def test_the_global_set_always_exists():
    sets = ProcessSets(3)
    assert (sets.size, sets.ids(), sets.ranks(GLOBAL)) == (3, [0], (0, 1, 2))


def test_ids_follow_the_order_and_ranks_are_sorted():
    sets = ProcessSets(4, [(3, 1), [0]])
    assert sets.ids() == [0, 1, 2]
    assert [sets.ranks(id) for id in sets.ids()] == [(0, 1, 2, 3), (1, 3), (0,)]
    assert sets.add([2, 0]) == 3
    assert sets.ranks(3) == (0, 2)


@pytest.mark.parametrize("ranks", [(), (0, 0), (-1,), (3,), (0, 1, 2, 3)])
def test_each_member_is_a_rank_named_once(ranks):
    with pytest.raises(InvalidRequestError, match=r"must name each rank once, out of 0\.\.2, and at least one"):
        ProcessSets(3, [ranks])


@pytest.mark.parametrize("ranks", [(0, 2), (2, 0), (0, 1, 2)])
def test_a_set_exists_once(ranks):
    sets = ProcessSets(3, [(0, 2)])
    with pytest.raises(InvalidRequestError, match="exists already"):
        sets.add(ranks)
    assert sets.ids() == [0, 1]


@pytest.mark.parametrize("id", [-1, 2, 100])
def test_an_unknown_id_is_answered_with_the_known_ones(id):
    with pytest.raises(InvalidRequestError, match=rf"process set {id} does not exist; known ids: \[0, 1\]"):
        ProcessSets(3, [(0, 2)]).ranks(id)


def test_in_a_world_of_one_the_global_set_is_the_only_one():
    with pytest.raises(InvalidRequestError, match="exists already"):
        ProcessSets(1, [(0,)])
