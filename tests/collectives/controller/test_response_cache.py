"""The records that the coordinator and the ranks keep of earlier tensors."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.api import DType, Operation, Parameters, ReduceOp, Request
from collectives.controller.coordinator import Coordinator
from collectives.controller.messages import Ready, Response, Run, Unknown, decode, encode
from collectives.controller.process_sets import ProcessSets
from collectives.controller.response_cache import Known, ResponseCache, Uniform, compact
from collectives.controller.worker import Worker
from tests.collectives.controller.negotiation_simulation import World, gather, leftovers, tensor

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


# The response cache.


def test_a_known_tensor_costs_integers_only():
    world = World(3)
    requests = [tensor("a"), tensor("b", shape=(7,)), gather("g", 2)]
    for _ in range(2):
        world.sent()
        for request in requests:
            world.submit(request, urgent=True)
        world.settle()
    ready, runs = [message for _, message in world.traffic if isinstance(message, Ready)], world.sent(Run)
    assert len(ready) == 3
    assert all(len(message.ids) == len(message.urgent_ids) == 3 for message in ready)
    assert not any(message.requests or message.urgent for message in ready)
    assert runs
    assert not any(message.responses or message.forget for message in runs)


def test_a_tensor_whose_rows_differ_between_ranks_is_cached_too():
    world = World(3)
    for _ in range(3):
        world.sent()
        for rank in range(3):
            world.submit(gather("g", rank + 1), rank)
        world.settle()
    assert all(not message.requests for message in world.sent(Ready))
    assert [entry[1].sizes for entry in world.log[0]] == [(1, 2, 3)] * 3


@pytest.mark.parametrize("changing", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_a_changed_tensor_is_negotiated_again(changing):
    world = World(3)
    for step in range(4):
        for rank in range(3):
            world.submit(gather("g", 10 + step if rank in changing else 10), rank)
        world.settle()
    expected = [tuple(10 + step if rank in changing else 10 for rank in range(3)) for step in range(4)]
    for rank in range(3):
        assert [entry[1].sizes for entry in world.log[rank]] == expected


@pytest.mark.parametrize("capacity", [0, 1, 2, 3])
def test_a_small_cache_forgets_the_least_used_and_loses_nothing(capacity):
    world = World(2, capacity=capacity)
    for step in range(6):
        for name in ("abc", "cba")[step % 2]:
            world.submit(tensor(name))
            world.settle()
    assert [names for (names,) in world.ran(0)] == list("abccba" * 3)
    assert world.ran(0) == world.ran(1)
    whole = [request for message in world.sent(Ready) for request in message.requests]
    assert len(whole) == {0: 36, 1: 26, 2: 16, 3: 6}[capacity]


def test_an_id_that_was_dropped_under_way_is_asked_for():
    world = World(2, capacity=1)
    world.submit(tensor("a"))
    world.settle()
    world.submit(tensor("b"))
    world.flush(0), world.flush(1)
    world.rise(0), world.rise(1)  # "b" pushes "a" out of the cache ...
    world.submit(tensor("a"), urgent=True)
    world.submit(tensor("half"), 0)
    world.sent()
    world.settle()  # ... while both ranks send the id of "a"
    assert [message.ids for message in world.sent(Unknown)] == [(1,), (1,)]
    assert world.ran(0) == world.ran(1) == [["a"], ["b", "a"]]


def test_a_tensor_that_is_forgotten_while_half_submitted_still_runs():
    world = World(2, capacity=1)
    world.submit(tensor("a"))
    world.settle()
    world.submit(tensor("a"), 0)
    world.settle()
    world.submit(tensor("b"))
    world.settle()
    world.wait()
    world.submit(tensor("a"), 1)
    world.settle()
    assert world.ran(0) == world.ran(1) == [["a"], ["b"], ["a"]]


@pytest.mark.parametrize(("capacity", "caching"), [(0, (True, True)), (4, (False, False)), (4, (True, False))])
def test_ranks_with_different_settings_of_the_cache_still_agree(capacity, caching):
    world = World(2, capacity=capacity)
    world.workers = [Worker(Parameters(cache_capacity=int(cache), version=9)) for cache in caching]
    for rows in (1, 1, 2, 2):
        world.submit(gather("g", rows), 0)
        world.submit(gather("g", 7), 1)
        world.settle()
    assert [entry[1].sizes for entry in world.log[0]] == [(1, 7), (1, 7), (2, 7), (2, 7)]
    assert world.log[0] == world.log[1]


def test_what_is_forgotten_before_it_was_sent_still_runs():
    """Set 0 gets two messages at once, and the second one runs an id that was dropped meanwhile."""
    world = World(2, sets=((0,),), capacity=3, patient=True)
    known = tensor("known", op=ReduceOp.MAX)
    world.submit(known, urgent=True)
    world.settle()
    world.sent()
    for request in (tensor("first"), tensor("between", process_set=1), known):
        world.submit(request)
        world.settle()
    for name in "xyz":
        world.submit(tensor(name, process_set=1))
        world.settle()
    assert not world.sent(Run)
    world.wait()
    assert world.ran(0) == [["known"], ["first"], ["between", "x", "y", "z"], ["known"]]
    assert world.ran(1) == [["known"], ["first"], ["known"]]
    assert [len(message.forget) for message in world.sent(Run)] == [1, 1, 1, 1, 1]  # to the members of set 0, 1, 0


def test_nothing_is_kept_of_what_is_over():
    world = World(2, capacity=1)
    for step in range(20):
        for name in ("a", "b"):
            world.submit(tensor(name), 0)
            world.settle()
        for name in ("b", "a"):
            world.submit(tensor(name, shape=(5 if step % 3 == 0 else 4,)), 1)
            world.settle()
        world.wait()
    for machine in (world.coordinator, *world.workers):
        assert not {name: kept for name, kept in leftovers(machine).items() if len(kept) > 2}
