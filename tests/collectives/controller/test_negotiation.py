"""The rules of negotiation, without clock, socket or thread."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.api import DType, EngineError, Operation, Parameters, ReduceOp, Request
from collectives.controller.coordinator import Coordinator
from collectives.controller.messages import Leave, Left, Ready, Refuse, Run, Stop, Unknown
from collectives.controller.process_sets import ProcessSets
from collectives.controller.waits import Waiting
from collectives.controller.worker import Worker
from tests.collectives.controller.negotiation_simulation import CYCLE, Script, World, outcomes, runs_of_set


def tensor(name="a", shape=(4,), **fields):
    return Request(name, fields.pop("operation", Operation.ALLREDUCE), DType.FLOAT32, shape, **fields)


def gather(name, rows, **fields):
    return tensor(name, (rows, 3), operation=Operation.ALLGATHER, **fields)


# Readiness.


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_tensor_runs_once_when_the_last_member_has_it(size):
    world = World(size)
    for rank in range(size):
        assert not world.log
        world.submit(tensor(), rank)
        world.settle()
    assert [world.ran(rank) for rank in range(size)] == [[["a"]]] * size


def test_ranks_that_submit_in_different_orders_run_in_one_order():
    world = World(3, threshold=0)
    for rank, names in enumerate(("abc", "cab", "bca")):
        for name in names:
            world.submit(tensor(name), rank)
    world.settle()
    assert world.ran(0) == world.ran(1) == world.ran(2)
    assert sorted(world.ran(0)) == [["a"], ["b"], ["c"]]


def test_the_same_name_in_two_process_sets_is_two_tensors():
    world = World(3, sets=((0, 1), (1, 2)))
    for process_set in (0, 1, 2):
        world.submit(tensor(shape=(process_set + 1,), process_set=process_set))
    world.settle()
    assert [runs_of_set(world, 1, {process_set}) for process_set in (0, 1, 2)] == [
        [((0, "a"),)],
        [((1, "a"),)],
        [((2, "a"),)],
    ]
    assert not runs_of_set(world, 0, {2})
    assert not runs_of_set(world, 2, {1})


def test_overlapping_sets_run_in_one_order_on_the_ranks_they_share():
    world = World(4, sets=((0, 1, 2), (1, 2, 3), (1, 2)))
    for rank, order in ((1, (1, 2, 3)), (2, (3, 2, 1)), (0, (1,)), (3, (2,))):
        for process_set in order:
            world.submit(tensor(process_set=process_set), rank)
    world.settle()
    shared = {1, 2, 3}
    assert runs_of_set(world, 1, shared) == runs_of_set(world, 2, shared)
    assert len(runs_of_set(world, 1, shared)) == 3


def test_what_is_missing_is_known_by_name_and_rank():
    coordinator = Coordinator(ProcessSets(3, [(1, 2)]), Parameters())
    coordinator.receive(1, Ready((tensor("a"), tensor("b", process_set=1))), 0.0)
    coordinator.receive(0, Ready((tensor("a"),)), 0.0)
    assert coordinator.waiting() == {(0, "a"): Waiting(0.0, (2,), (0, 1)), (1, "b"): Waiting(0.0, (2,), (1,))}


# Disagreement.

ASPECTS = {
    "operation": (tensor(), tensor(operation=Operation.BARRIER)),
    "device": (tensor(), tensor(device="cuda")),
    "dtype": (tensor(), replace(tensor(), dtype=DType.INT64)),
    "shape": (tensor(), tensor(shape=(2, 2))),
    "op": (tensor(), tensor(op=ReduceOp.MAX)),
    "prescale factor": (tensor(), tensor(prescale_factor=0.5)),
    "postscale factor": (tensor(), tensor(postscale_factor=2.0)),
    "tag": (tensor(tag=3), tensor(tag=4)),
    "root rank": tuple(tensor(operation=Operation.BROADCAST, root_rank=root) for root in (0, 1)),
}


@pytest.mark.parametrize("aspect", ASPECTS)
@pytest.mark.parametrize("cached", [False, True])
def test_a_disagreement_is_one_text_on_all_members_and_disturbs_nothing(aspect, cached):
    usual, odd = ASPECTS[aspect]
    world = World(4, sets=((0, 2, 3),))
    usual, odd = replace(usual, process_set=1), replace(odd, process_set=1)
    other = tensor("other")
    if cached:
        world.submit(usual)
        world.settle()
    world.submit(other, 0, 1, 2)
    world.submit(usual, 0, 3)
    world.submit(odd, 2)
    world.settle()
    assert world.refused(0) == world.refused(2) == world.refused(3)
    assert not world.refused(1)
    (text,) = world.refused(0)
    assert f"tensor 'a': the ranks disagree about the {aspect}: " in text
    assert "on ranks 0, 3; " in text
    assert " on rank 2. " in text

    world.log.clear()
    world.submit(other, 3)
    world.submit(odd)
    world.settle()
    assert sorted(world.ran(0)) == [["a"], ["other"]]
    assert not any(world.refused(rank) for rank in range(4))


def test_after_a_disagreement_the_old_parameters_work_again():
    world = World(2)
    usual, odd = tensor(), tensor(shape=(9,))
    for requests in ((usual, usual), (usual, odd), (usual, usual), (usual, usual)):
        world.sent()
        for rank, request in enumerate(requests):
            world.submit(request, rank)
        world.settle()
    assert world.ran(0) == world.ran(1) == [["a"]] * 3
    assert len(world.refused(0)) == len(world.refused(1)) == 1
    assert all(not message.requests for message in world.sent(Ready))


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


def leftovers(machine):
    """The containers of a machine."""
    return {name: kept for name, kept in vars(machine).items() if isinstance(kept, dict | list | set)}


# When ready tensors are released.


def test_nothing_else_half_submitted_goes_out_at_once():
    world = World(2)
    world.submit(tensor())
    world.settle()
    assert world.coordinator.deadline is None
    assert world.ran(1) == [["a"]]


def test_a_patient_coordinator_holds_what_nobody_waits_for():
    world = World(2, patient=True)
    for name in "ab":
        world.submit(tensor(name))
        world.settle()
    assert not world.log
    assert world.coordinator.deadline == CYCLE
    world.wait()
    assert world.ran(0) == world.ran(1) == [["a", "b"]]


@pytest.mark.parametrize("late", [False, True])
def test_a_patient_coordinator_lets_nobody_wait(late):
    world = World(2, patient=True)
    world.submit(tensor("a"))
    world.settle()
    if late:
        world.workers[1].urge((0, "a"))
    else:
        world.submit(tensor("b"), urgent=True)
    world.settle()
    assert world.ran(0) == ([["a"]] if late else [["a", "b"]])


@pytest.mark.parametrize("threshold", [0, 32])
def test_a_patient_coordinator_sends_what_is_enough(threshold):
    world = World(2, patient=True, threshold=threshold)
    for name in "ab":
        world.submit(tensor(name))
    world.settle()
    assert [name for names in world.ran(0) for name in names] == ["a", "b"]


def held(**fields):
    """A world where "a" is ready, and held because "b" is half-submitted."""
    world = World(2, **fields)
    world.submit(tensor("b"), 0)
    world.submit(tensor("a"))
    world.settle()
    assert not world.log
    assert world.coordinator.deadline == CYCLE
    return world


def test_a_ready_tensor_is_held_for_the_cycle_time_at_most():
    world = held()
    world.now = CYCLE - 0.01
    world.settle()
    assert not world.log
    world.now = CYCLE
    world.settle()
    assert world.ran(0) == [["a"]]
    assert world.coordinator.deadline is None


def test_the_first_ready_tensor_sets_the_deadline():
    world = held()
    world.now = 1.0
    world.submit(tensor("c"))
    world.settle()
    assert world.coordinator.deadline == CYCLE


def test_what_becomes_ready_meanwhile_shares_the_batch():
    world = held()
    world.submit(tensor("b"), 1)
    world.settle()
    assert world.ran(0) == world.ran(1) == [["a", "b"]]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_waiting_caller_ends_the_hold(cached, late):
    world = World(2)
    if cached:
        world.submit(tensor("a"))
        world.settle()
        world.log.clear()
    world.submit(tensor("b"), 0)
    world.submit(tensor("a"), 0)
    world.submit(tensor("a"), 1, urgent=not late)
    world.settle()
    if late:
        assert not world.log
        world.workers[0].urge((0, "a"))
        world.settle()
    assert world.ran(0) == world.ran(1) == [["a"]]


def test_an_urgent_tensor_takes_the_held_ones_along():
    world = held()
    world.submit(tensor("c"), 0, urgent=True)
    world.settle()
    assert not world.log
    world.submit(tensor("c"), 1)
    world.settle()
    assert world.ran(0) == [["a", "c"]]


def test_what_was_urgent_once_is_not_the_next_time():
    world = held()
    for urgent in (True, False):
        world.log.clear()
        world.submit(tensor("c"), 0, urgent=urgent)
        world.submit(tensor("c"), 1)
        world.settle()
        assert bool(world.log) is urgent


def test_urging_what_is_over_changes_nothing():
    world = World(2)
    world.submit(tensor("a"))
    world.settle()
    world.workers[0].urge((0, "a"))
    world.sent()
    world.settle()
    assert not world.sent()


def test_an_urge_that_comes_too_late_does_not_cut_the_next_hold_short():
    world = World(2)
    world.submit(tensor("a"))
    for rank in (0, 1):
        world.flush(rank), world.rise(rank)
    world.decide()
    world.workers[0].urge((0, "a"))  # the coordinator has let "a" run, but rank 0 does not know yet
    world.settle()
    world.log.clear()
    world.submit(tensor("b"), 0)
    world.submit(tensor("c"))
    world.settle()
    assert not world.log
    world.wait()
    assert world.ran(0) == [["c"]]


def test_enough_bytes_end_the_hold():
    world = held(threshold=32)
    for name in "cde":
        world.submit(tensor(name))
        world.settle()
        assert world.ran(0) == ([["a", "c"], ["d", "e"]] if name == "e" else [["a", "c"]])


def test_without_fusion_nothing_is_held():
    world = World(2, threshold=0)
    world.submit(tensor("b"), 0)
    world.submit(tensor("a"))
    world.settle()
    assert world.ran(0) == [["a"]]


def test_a_rank_that_submits_nothing_says_nothing():
    assert Worker(Parameters()).outgoing() is None


def test_what_was_said_is_not_said_again():
    worker = Worker(Parameters())
    worker.submit(tensor())
    assert worker.outgoing() == Ready((tensor(),))
    assert worker.outgoing() is None


# The end.


def test_leaving_runs_what_is_ready_and_then_stops_everybody():
    world = held()
    for rank, cause in ((1, "raised ValueError"), (0, "raised ShutDownError")):
        world.coordinator.receive(rank, Leave(cause), world.now)
    world.submit(tensor("b"), 1)
    world.settle()
    for rank in (0, 1):
        assert [entry[0] for entry in world.log[rank]] == ["run", "Stop"]
    assert world.ran(0) == [["a"]]
    assert world.sent(Stop) == [Stop(1, cause="raised ValueError")] * 2
    world.submit(tensor("late"))
    world.settle()
    world.wait()
    assert world.ran(0) == [["a"]]


def test_everybody_has_left_when_the_last_one_has():
    world = World(3)
    world.coordinator.receive(2, Leave(), 0.0)
    world.settle()
    for rank in range(3):
        assert not world.sent(Left)
        world.coordinator.receive(rank, Left(), 0.0)
        world.settle()
    assert world.sent(Left) == [Left()] * 3


@pytest.mark.parametrize("message", [Run(()), Refuse(0, "a", "text"), Unknown((1,)), Stop(1)])
def test_what_only_a_coordinator_may_send_is_refused(message):
    with pytest.raises(EngineError, match="rank 1 sent"):
        World(2).coordinator.receive(1, message, 0.0)


# Everything at once.


@st.composite
def scripts(draw):
    """Some ranks, some process sets, and calls that repeat a few names with mostly the same parameters."""
    size = draw(st.integers(2, 4))
    subsets = st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1).map(lambda ranks: tuple(sorted(ranks)))
    sets = tuple(draw(st.lists(subsets, unique=True, max_size=3)))
    members = [tuple(range(size)), *sets]
    calls = [draw(one_call(members)) for _ in range(draw(st.integers(1, 14)))]
    return size, sets, Script(calls)


@st.composite
def one_call(draw, members):
    process_set = draw(st.integers(0, len(members) - 1))
    name = draw(st.sampled_from("ab"))
    operation = draw(st.sampled_from([Operation.ALLREDUCE, Operation.ALLREDUCE, Operation.ALLGATHER]))
    dtype = draw(st.sampled_from([DType.FLOAT32, DType.FLOAT32, DType.INT8]))
    request = Request(name, operation, dtype, (draw(st.sampled_from([3, 3, 4])), 2), process_set=process_set)
    call = {rank: request for rank in members[process_set]}
    if draw(st.integers(0, 3)) == 0:  # one rank says something else: a mismatch, or its own number of rows
        rank = draw(st.sampled_from(sorted(call)))
        call[rank] = replace(request, shape=(draw(st.sampled_from([5, 6])), 2))
    return call


@settings(max_examples=250)
@given(scripts(), st.integers(0, 3), st.sampled_from([0, 30, 1 << 20]), st.booleans(), st.integers(0, 1 << 32))
def test_whatever_the_order_all_ranks_agree_and_nothing_is_lost(scripted, capacity, threshold, patient, seed):
    size, sets, script = scripted
    world = World(size, sets, threshold, capacity, patient)
    script.play(world, random.Random(seed))
    for rank in range(size):
        assert outcomes(world, rank) == script.expected(rank)
    for one in range(size):
        for other in range(one):
            shared = {id for id in world.process_sets.ids() if {one, other} <= set(world.process_sets.ranks(id))}
            assert runs_of_set(world, one, shared) == runs_of_set(world, other, shared)
    for worker in world.workers:
        kept = leftovers(worker)
        assert not {
            name: kept[name]
            for name in kept
            if kept[name] and name not in ("_ids", "_responses", "_ids_of_sets", "introduced")
        }


def test_a_long_job_with_a_small_cache():
    """More rounds than hypothesis has patience for."""
    for seed in range(20):
        chance = random.Random(seed)
        calls = []
        for _ in range(60):
            request = tensor(chance.choice("abcd"), (chance.choice((3, 3, 3, 4)),), process_set=chance.randrange(2))
            call = dict.fromkeys(((0, 1, 2), (0, 2))[request.process_set], request)
            if chance.random() < 0.1:
                call[2] = replace(request, shape=(1,))
            calls.append(call)
        world, script = World(3, ((0, 2),), capacity=2), Script(calls)
        script.play(world, chance)
        for rank in range(3):
            assert outcomes(world, rank) == script.expected(rank), f"seed {seed}"
