"""Sets of tensors that run again as they ran before, without the coordinator."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.api import DType, Operation, Parameters, Request
from collectives.controller.messages import Ready, Response, Run
from collectives.controller.schedules import KEPT, Schedules, alone
from tests.collectives.controller.negotiation_simulation import CYCLE, runs_of_set, tensor
from tests.collectives.controller.test_parameters import by_id
from tests.collectives.engine.bypass_simulation import BypassWorld


def response(id, **fields):
    return Response(id, tensor(f"t{id}", **fields))


def batches(*ids, **fields):
    """A batch for each of ``ids``, which are tuples of ids."""
    return [tuple(response(id, **fields) for id in batch) for batch in ids]


# Known schedules.


def test_a_set_is_found_in_any_order_with_its_last_batches():
    schedules = Schedules()
    schedules.record(5, batches((1, 2), (3,)))
    schedules.record(7, batches((1,), (2,)))
    schedules.record(9, batches((3,), (1, 2)))
    found = schedules.find([2, 3, 1])
    assert found.batches == batches((3,), (1, 2))
    assert found is schedules.find([3, 2, 1])
    assert schedules.find([2, 1]).batches == batches((1,), (2,))
    assert (schedules.find([1]), schedules.find([]), schedules.find([1, 2, 3, 4])) == (None, None, None)


@given(st.lists(st.sets(st.integers(1, 6), min_size=1), min_size=1), st.integers(0, 100))
def test_no_two_schedules_have_the_same_number(sets, first):
    schedules = Schedules()
    numbers = {alone(response(id)).number: frozenset([id]) for id in range(1, 1000)}
    for ids in sets:
        schedules.record(first, batches(*((id,) for id in sorted(ids))))
        first += len(ids)
        found = schedules.find(ids)
        if len(ids) == 1:
            assert found is None
        else:
            assert numbers.setdefault(found.number, frozenset(ids)) == ids
            assert list(numbers).count(found.number) == 1
    assert 0 not in numbers


@pytest.mark.parametrize("fields", [{"process_set": 1}, {"device": "cuda"}])
def test_tensors_of_other_sets_and_devices_have_none(fields):
    schedules = Schedules()
    schedules.record(0, [(response(1), response(2, **fields))])
    assert schedules.find([1, 2]) is None
    assert alone(response(1, **fields)) is None
    assert alone(response(1)).batches == ((response(1),),)


def test_a_tensor_of_a_group_has_none_unless_it_is_the_whole_group():
    assert alone(response(1, group="g", group_size=2)) is None
    assert alone(response(1, group="g", group_size=1)) is not None


def test_forgotten_tensors_take_their_schedules_along():
    schedules = Schedules()
    for first, ids in enumerate([(1, 2), (2, 3), (3, 4)]):
        schedules.record(first, batches(ids))
    schedules.forget([])
    schedules.forget([2, 7])
    assert [schedules.find(ids) is None for ids in [(1, 2), (2, 3), (3, 4)]] == [True, True, False]
    schedules.clear()
    assert schedules.find((3, 4)) is None


def test_the_schedules_recorded_last_are_kept():
    schedules = Schedules()
    for first in range(KEPT):
        schedules.record(first, batches((first, first + 1)))
    schedules.record(1000, batches((0, 1)))
    schedules.record(1001, batches((2000, 2001)))
    assert [schedules.find((first, first + 1)) is None for first in range(4)] == [False, True, False, False]


# Workers and a coordinator.


GROUP = [tensor(f"g{number}", group="g", group_size=3) for number in range(3)]
SINGLES = [tensor("a"), tensor("b", (7,)), tensor("r", (4, 2), operation=Operation.ALLGATHER)]


def together(world, requests, *ranks):
    """``requests`` on ``ranks``, or on all, one caller a rank."""
    for rank in ranks or range(world.size):
        for number, request in enumerate(requests):
            world.submit(request, rank, urgent=number == rank % len(requests))


def repeat(world, requests, times=3):
    for _ in range(times):
        together(world, requests)
        world.settle()


@pytest.mark.parametrize("requests", [GROUP, SINGLES, GROUP + SINGLES, SINGLES[:1], GROUP[:1]], ids=len)
@pytest.mark.parametrize("threshold", [0, 1 << 20])
def test_what_ran_together_runs_so_again_without_messages(requests, threshold):
    if requests == GROUP[:1]:
        requests = [replace(GROUP[0], group_size=1)]
    world = BypassWorld(3, threshold=threshold)
    repeat(world, requests)
    world.sent()
    repeat(world, requests, 5)
    assert [len(ran) for ran in world.bypassed] == [5] * 3
    assert not world.traffic
    assert world.ran(0) == world.ran(1) == world.ran(2)
    assert len({tuple(map(tuple, world.ran(0)[-len(world.bypassed[0][0].batches) :]))}) == 1
    assert sorted(by_id(world)) == list(range(len(world.batches[0])))
    repeat(world, [tensor("other")], 1)
    assert world.batches[0][-1].id == len(world.batches[0]) - 1


def test_a_rank_with_more_or_less_in_flight_brings_all_back_to_the_coordinator():
    world = BypassWorld(2)
    repeat(world, GROUP)
    for extra in (0, 1):
        repeat(world, GROUP)
        assert world.on == [True, True]
        world.submit(tensor("extra"), extra)
        together(world, GROUP)
        world.settle()
        assert world.on == [False, False]
        world.submit(tensor("extra"), 1 - extra, urgent=True)
        world.settle()
    assert world.ran(0) == world.ran(1)
    assert not any(world.in_flight)


def test_a_rank_that_does_not_come_declines_when_it_is_asked():
    world = BypassWorld(3)
    repeat(world, SINGLES)
    together(world, SINGLES, 0, 2)
    world.settle()
    assert not any(world.on)
    assert world.ran(0) == world.ran(2)
    together(world, SINGLES, 1)
    world.settle()
    assert world.ran(0) == world.ran(1)


def test_new_parameters_make_new_schedules():
    """The ranks would otherwise run batches of the earlier fusion threshold."""
    world = BypassWorld(2)
    repeat(world, SINGLES[:2])
    assert world.on == [True, True]
    together(world, SINGLES[:2])
    world.settle()
    assert world.ran(0)[-1] == ["a", "b"]
    world.decline(0)  # as the engine does
    world.coordinator.propose(replace(world.workers[0].parameters, fusion_threshold=0))
    together(world, [tensor("c"), tensor("d")])
    world.settle()
    for worker in world.workers:
        for request in SINGLES[:2]:
            worker.submit(request, urgent=True)
        assert worker.schedule() is None
        for rank in range(2):
            world.in_flight[rank] |= {request.key for request in SINGLES[:2]}
    world.settle()
    repeat(world, SINGLES[:2])
    assert world.on == [True, True]
    assert {tuple(schedule.number for schedule in ran) for ran in world.bypassed} == {
        tuple(schedule.number for schedule in world.bypassed[0])
    }
    assert world.ran(0)[-2:] == world.ran(1)[-2:] == [["a"], ["b"]]


def test_a_rank_that_waits_behind_a_refused_call_has_none():
    """The coordinator would otherwise not hear that a caller waits there."""
    world = BypassWorld(2)
    repeat(world, SINGLES)
    worker = world.workers[0]
    worker.reject(tensor("bad"), "wrong")
    worker.outgoing()
    for request in SINGLES:
        worker.submit(request)
    worker.urge((0, "bad"))
    assert worker.schedule() is None
    assert worker.outgoing().urgent == ((0, "bad"),)


def test_a_rank_that_missed_the_requests_has_none():
    """It had joined when the others ran the tensors for the first time."""
    world = BypassWorld(2)
    world.submit(tensor("join", operation=Operation.JOIN), 1)
    for _ in range(3):
        together(world, SINGLES[:2], 0)
        world.settle()
    world.submit(tensor("join", operation=Operation.JOIN), 0)
    world.settle()
    together(world, SINGLES[:2])
    assert [worker.schedule() is None for worker in world.workers] == [False, True]
    world.settle()
    repeat(world, SINGLES[:2], 4)
    assert world.on == [True, True]
    assert world.ran(0)[-1] == world.ran(1)[-1] == ["a", "b"]


def test_the_cache_drops_the_tensors_that_ran_longest_ago_also_in_the_bypass():
    world = BypassWorld(2, capacity=4)
    repeat(world, [tensor("a"), tensor("b")])
    repeat(world, [tensor("c"), tensor("d")])
    repeat(world, [tensor("a"), tensor("b")], 4)
    assert world.bypassed[0]
    repeat(world, [tensor("e")], 1)
    world.sent()
    together(world, [tensor("a"), tensor("b")])
    together(world, [tensor("c")])
    world.settle()
    assert {request.name for message in world.sent(Ready) for request in message.requests} == {"c"}


# Random jobs.

KINDS = {
    "sum": (Operation.ALLREDUCE, DType.FLOAT32),
    "long": (Operation.ALLREDUCE, DType.INT64),
    "rows": (Operation.ALLGATHER, DType.FLOAT32),
}
bundles = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from([*KINDS]), st.sampled_from(["", "", "g"])),
    min_size=1,
    max_size=4,
    unique_by=lambda each: each[0],
)
changes = st.builds(
    Parameters,
    fusion_threshold=st.sampled_from([0, 60, 1 << 20]),
    patient=st.booleans(),
    cache_capacity=st.sampled_from([0, 3, 16]),
)


@st.composite
def jobs(draw):
    """Steps that repeat: (what, details) for all ranks."""
    size = draw(st.integers(2, 4))
    known = draw(st.lists(bundles, min_size=1, max_size=3))
    steps = [("bundle", known[0])] * draw(st.integers(0, 4))
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["bundle"] * 5 + ["join", "pair", "tune", "late", "alone"]))
        repetitions = draw(st.integers(1, 6))
        if kind in ("bundle", "late"):
            steps += [("bundle", draw(st.sampled_from(known)))] * (repetitions - 1)
            steps += [(kind, draw(st.sampled_from(known)))]
        elif kind == "tune":
            steps += [("tune", draw(changes))]
        elif kind == "join":
            steps += [("join", draw(st.integers(0, size - 1)))]
        else:
            steps += [(kind, draw(st.sampled_from("abcd")))] * repetitions
    return size, steps


class Player:
    """All ranks do the same steps, each in its own order and at its own pace; messages travel as chance has it."""

    def __init__(self, world, steps, chance):
        self.world, self.steps, self.chance = world, steps, chance

    def play(self):
        world, chance = self.world, self.chance
        tracks = [(rank, self._track(rank)) for rank in range(world.size)]
        moves = (world.flush, world.rise, world.fall, world.complain, world.withdraw)
        pace = [chance.choice((0.1, 1.0)) for _ in range(world.size)]
        for _ in range(60_000):
            if not tracks:
                break
            if chance.random() < 0.3:
                track = chance.choice(tracks)
                if chance.random() < pace[track[0]] and next(track[1], track) is track:
                    tracks.remove(track)
            elif chance.random() < 0.2:
                world.decide()
                world.now += chance.choice((0.0, 1.0, CYCLE))
            else:
                chance.choice(moves)(chance.randrange(world.size))
        assert not tracks, f"stuck: {world.coordinator.waiting()}"
        world.settle()
        world.wait()

    def _track(self, rank):
        for number, (kind, details) in enumerate(self.steps):
            yield from getattr(self, f"_{kind}")(rank, number, details)

    def _bundle(self, rank, number, names, late=False):
        size = sum(group != "" for _, _, group in names)
        requests = [self._request(rank, name, kind, group, size) for name, kind, group in names]
        grouped, single = [each for each in requests if each.group], [[each] for each in requests if not each.group]
        order = ([grouped] if grouped else []) + single
        self.chance.shuffle(order)
        for bundle in order:
            for request in bundle:
                self.world.submit(request, rank, urgent=late)
            if late or self.chance.random() < 0.1:
                yield
        yield from self._wait(rank, {request.key for request in requests})

    def _late(self, rank, number, names):
        """Somebody waits for each tensor as soon as it is submitted."""
        yield from self._bundle(rank, number, names, late=rank == number % self.world.size)

    def _alone(self, rank, number, name):
        request = self._request(rank, f"alone {name}", "sum", "", 0)
        self.world.submit(request, rank, urgent=True)
        yield from self._wait(rank, {request.key})

    def _request(self, rank, name, kind, group, size):
        operation, dtype = KINDS[kind]
        shape = (rank + 1, 2) if operation is Operation.ALLGATHER else (5,)
        label = f"{name} {kind}{group and f' of {group} with {size}'}"
        return Request(label, operation, dtype, shape, group=group and f"g{size}", group_size=size if group else 0)

    def _wait(self, rank, keys):
        missing = sorted(keys & self.world.in_flight[rank])
        if missing:
            self.world.workers[rank].urge(self.chance.choice(missing))
        while keys & self.world.in_flight[rank]:
            yield
            if self.chance.random() < 0.1 and keys & self.world.in_flight[rank]:
                self.world.workers[rank].urge(self.chance.choice(sorted(keys & self.world.in_flight[rank])))

    def _join(self, rank, number, absent):
        """One rank has no tensor where the others have one."""
        if rank != absent:
            yield from self._alone(rank, number, "before join")
        request = Request(f"join {number}", Operation.JOIN)
        self.world.submit(request, rank, urgent=True)
        yield from self._wait(rank, {request.key})

    def _pair(self, rank, number, name):
        if rank < 2:
            request = Request(f"pair {name}", Operation.ALLREDUCE, DType.FLOAT32, (3,), process_set=1)
            self.world.submit(request, rank, urgent=self.chance.random() < 0.5)
            yield from self._wait(rank, {request.key})

    def _tune(self, rank, number, parameters):
        if rank == 0:
            while self.world.attempt[0] is not None:
                yield
            self.world.decline(0)
            self.world.coordinator.propose(parameters)
        yield


def play(size, steps, capacity, threshold, patient, seed):
    world = BypassWorld(size, ((0, 1),) if size > 2 else ((0,),), threshold, capacity, patient)
    if size == 2:
        steps = [each for each in steps if each[0] != "pair"]
    Player(world, steps, random.Random(seed)).play()
    return world


@settings(max_examples=300)
@given(jobs(), st.sampled_from([0, 3, 16]), st.sampled_from([0, 60, 1 << 20]), st.booleans(), st.integers(0, 1 << 32))
def test_in_and_out_of_the_bypass_all_ranks_run_the_same(job, capacity, threshold, patient, seed):
    world = play(*job, capacity, threshold, patient, seed)
    check(world)


def check(world):
    """Every rank ran the same batches in the same order, under the same numbers and parameters, and nothing is left."""
    assert not any(world.in_flight)
    assert not world.coordinator.is_waiting
    assert not any(world.refused(rank) for rank in range(world.size))
    assert len({tuple(schedule.number for schedule in ran) for ran in world.bypassed}) == 1
    for rank in range(1, world.size):
        assert runs_of_set(world, rank, {0}) == runs_of_set(world, 0, {0})
    numbered = by_id(world)
    assert sorted(numbered) == list(range(len(numbered)))
    for ran in numbered.values():
        process_set = next(iter(ran.values()))[0][0].request.process_set
        assert sorted(ran) == list(world.process_sets.ranks(process_set))
        assert len(set(ran.values())) == 1


def test_random_jobs_are_in_the_bypass_now_and_then():
    counts = Counter()
    names = [("a", "sum", ""), ("b", "rows", ""), ("c", "sum", "g"), ("d", "long", "g")]
    for seed in range(30):
        steps = [("bundle", names)] * 10 + [("join", 1)] + [("alone", "a")] * 6 + [("bundle", names)] * 6
        world = play(3, steps, 16, 60, bool(seed % 2), seed)
        check(world)
        counts.update(len([*schedule.batches]) for schedule in world.bypassed[0])
    assert counts[1] > 5
    assert sum(count for length, count in counts.items() if length > 1) > 5
    assert any(isinstance(message, Run) for _, message in world.traffic)
