"""The requests of each rank that the coordinator keeps."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.api import DType, Operation, Parameters, Request
from collectives.controller.coordinator import Coordinator
from collectives.controller.messages import Ready, Response, decode, encode
from collectives.controller.process_sets import ProcessSets
from collectives.controller.response_cache import Known, ResponseCache, Uniform, compact

REQUEST = Request("a", Operation.ALLGATHER, DType.FLOAT32, (4, 2))


@given(st.sets(st.integers(0, 9), min_size=1), st.integers(0, 2), st.data())
def test_a_compact_form_says_what_the_requests_say(ranks, missing, data):
    members = tuple(sorted(ranks))
    present = members[: max(1, len(members) - missing)]
    requests = {rank: replace(REQUEST, shape=(data.draw(st.integers(1, 2)), 2)) for rank in present}
    kept = compact(requests, members)
    assert dict(kept) == requests
    assert list(kept) == list(present)
    assert len(kept) == len(requests)
    for rank in range(-1, 11):
        assert (rank in kept) == (rank in requests)


def test_equal_requests_of_all_members_are_kept_once():
    members = tuple(range(100))
    kept = compact({rank: replace(REQUEST) for rank in members}, members)
    assert isinstance(kept, Uniform)
    with pytest.raises(KeyError):
        kept[100]


def test_equal_requests_of_many_ranks_are_one_object_where_they_arrive():
    frames = [encode(Ready((replace(REQUEST),))) for _ in range(3)]
    first, *others = [decode(frame).requests[0] for frame in frames]
    assert first == REQUEST
    assert all(other is first for other in others)


@pytest.mark.parametrize("operation", [Operation.ALLREDUCE, Operation.ALLGATHER])
def test_a_name_of_a_thousand_ranks_takes_the_memory_of_one(operation):
    size, coordinator = 1000, Coordinator(ProcessSets(1000), Parameters())
    frame = encode(Ready((replace(REQUEST, operation=operation),)))
    for rank in range(size):
        coordinator.receive(rank, decode(frame), 0.0)
    (known,) = coordinator._cache._known.values()
    assert isinstance(known.requests, Uniform)
    assert dict(known.requests) == dict.fromkeys(range(size), known.response.request)


class Unseen(dict):
    """Must not be iterated: it holds the names of all sets."""

    def __iter__(self):
        raise AssertionError("looked at all names")

    items = keys = values = __iter__


def known(id, name, process_set):
    request = replace(REQUEST, name=name, process_set=process_set)
    return Known(Response(id, request), {0: request}, True)


def test_the_names_of_a_removed_set_are_dropped_without_a_look_at_the_others():
    """A job with many names that adds and removes sets took a time that grows with both."""
    cache = ResponseCache(100)
    for id in range(50):
        cache.learn(known(id, f"name {id}", id % 2))
    cache._known = Unseen(cache._known)
    cache.drop_set(1)
    cache.drop_set(7)
    assert [id in cache for id in range(4)] == [True, False, True, False]
    cache.learn(known(50, "name 1", 1))
    assert 50 in cache
    assert [each.response.id for each in cache.drop((1, "name 1"))] == [50]
    assert cache.drop((1, "name 3")) == []
