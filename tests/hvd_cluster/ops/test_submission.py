"""Requests of calls that repeat: an equal call finds its request again, any other makes its own."""

import gc
import weakref
from dataclasses import fields

import numpy as np
import pytest

from collectives.api import DType, Operation, Parameters, ReduceOp, Request
from collectives.buffers import as_buffer, empty
from collectives.controller.messages import Response, Run
from collectives.controller.worker import Worker
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.ops import submission
from hvd_cluster.ops.arguments import Reduction
from tests.ranks import AllRanks, player

LONG = submission.LONGEST_KEPT


class Recorder:
    """Stands for the engine, and keeps the last request."""

    def submit(self, request, source, destination, unnamed=False):
        self.last = request

    def submit_group(self, works, unnamed=False):
        self.last = works[-1].request


@pytest.fixture
def engine(monkeypatch):
    submission._request.cache_clear()
    engine = Recorder()
    monkeypatch.setattr(basics, "engine", lambda: engine)
    return engine


def a_set(id):
    process_set = ProcessSet([0, 1])
    process_set._register(id, (0, 1), 0)
    return process_set


USUAL = {
    "operation": Operation.ALLREDUCE,
    "array": np.ones((2, 3), np.float32),
    "name": "x",
    "process_set": 0,
    "op": ReduceOp.SUM,
    "prescale_factor": 1.0,
    "postscale_factor": 1.0,
    "root_rank": -1,
    "splits": (),
    "tag": 0,
}


def request_of(engine, **changed):
    """The request of a call, with arguments that are equal to those of an earlier one, but not the same."""
    call = USUAL | changed
    operation, source = call.pop("operation"), as_buffer(call.pop("array").copy())
    name, process_set = "".join([*call.pop("name")]), a_set(call.pop("process_set"))
    call["splits"] = tuple([*call["splits"]])
    how = Reduction(call.pop("op"), call.pop("prescale_factor"), call.pop("postscale_factor"))
    submission.submit(operation, source, None, name, process_set, how, **call)
    return engine.last


CHANGES = [
    {"operation": Operation.BROADCAST},
    {"array": np.ones((2, 3), np.int32)},
    {"array": np.ones((3, 2), np.float32)},
    {"array": np.ones((2, 3, 1), np.float32)},
    {"name": "y"},
    {"process_set": 1},
    {"op": ReduceOp.MAX},
    {"prescale_factor": 0.5},
    {"postscale_factor": 0.5},
    {"root_rank": 1},
    {"splits": (1, 1)},
    {"tag": 1},
]


def test_an_equal_call_has_the_request_of_the_earlier_one(engine):
    assert request_of(engine) is request_of(engine)
    assert request_of(engine, splits=(1, 1)) is request_of(engine, splits=(1, 1))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(next(iter(change.items())))[:40])
def test_each_property_makes_another_request(engine, change):
    usual, other = request_of(engine), request_of(engine, **change)
    assert other != usual
    assert request_of(engine) is usual
    assert request_of(engine, **change) is other


def test_every_field_of_a_request_is_among_the_changes(engine):
    """The rest: the device is the buffer's, shape and dtype give the bytes, groups have a test, a set its offer."""
    usual = request_of(engine)
    seen = {
        each.name
        for change in CHANGES
        for each in fields(Request)
        if getattr(request_of(engine, **change), each.name) != getattr(usual, each.name)
    }
    rest = {"device", "group", "group_size", "nbytes", "offer"}
    assert seen | rest == {each.name for each in fields(Request)}
    assert not seen & rest


def test_the_request_is_that_of_its_own_call(engine):
    for _ in range(2):
        request = request_of(engine, process_set=3, op=ReduceOp.MIN, prescale_factor=2.0, tag=4)
        expected = Request(
            "allreduce.x",
            Operation.ALLREDUCE,
            DType.FLOAT32,
            (2, 3),
            op=ReduceOp.MIN,
            prescale_factor=2.0,
            process_set=3,
            tag=4,
        )
        assert request == expected
        assert request.key == (3, "allreduce.x")


def group_of(engine, name, *arrays, operation=Operation.ALLREDUCE):
    tensors = [(as_buffer(array), None) for array in arrays]
    submission.submit_group(operation, tensors, name, a_set(0))
    return engine.last


def test_a_group_is_another_request_than_one_of_another_length_or_name(engine):
    one, two = np.ones(2), np.ones(2)
    pair = group_of(engine, "g", one, two)
    assert group_of(engine, "g", two, one) is pair
    assert (pair.group, pair.group_size, pair.name) == ("allreduce.g", 2, "allreduce.g[1]")
    others = [group_of(engine, "g", one), group_of(engine, "h", one, two), group_of(engine, "g", one, two, one)]
    assert [(each.group, each.group_size) for each in others] == [
        ("allreduce.g", 1),
        ("allreduce.h", 2),
        ("allreduce.g", 3),
    ]


def test_the_number_of_kept_requests_is_bounded(engine):
    first = request_of(engine, name="first")
    for number in range(submission.KEPT_REQUESTS):
        request_of(engine, name=f"other {number}")
    assert submission._request.cache_info().currsize == submission.KEPT_REQUESTS
    again = request_of(engine, name="first")
    assert again == first
    assert again is not first


@pytest.mark.parametrize("long", [{"name": "n" * LONG}, {"operation": Operation.ALLTOALL, "splits": (1,) * LONG}])
def test_a_long_request_takes_no_memory_after_its_call(engine, long):
    """An alltoall of many ranks has other splits each time."""
    before = submission._request.cache_info().currsize
    request, again = request_of(engine, **long), request_of(engine, **long)
    assert request == again
    assert request is not again
    assert len(request.name) + len(request.splits) > LONG
    assert submission._request.cache_info().currsize == before


def test_a_group_with_a_long_name_takes_no_memory_either(engine):
    before = submission._request.cache_info().currsize
    request = group_of(engine, "n" * LONG, np.ones(2), np.ones(2))
    assert (request.group_size, request.name[-3:]) == (2, "[1]")
    assert submission._request.cache_info().currsize == before


def test_a_kept_request_keeps_no_tensor(engine):
    array = np.ones(4)
    reference = weakref.ref(array)
    submission.submit(Operation.ALLREDUCE, as_buffer(array), None, "kept", a_set(0))
    del array
    gc.collect()
    assert reference() is None


# The engine knows a repeated request by identity.


def test_another_engine_does_not_know_a_request_of_an_earlier_one(engine):
    """As after shutdown() and init(), or a change of the world: the response id is of the earlier coordinator."""
    request = request_of(engine)
    earlier, later = Worker(Parameters()), Worker(Parameters())
    earlier.submit(request)
    earlier.outgoing()
    earlier.run(Run(((7,),), (Response(7, request),)))
    for worker, known in ((earlier, True), (later, False)):
        worker.submit(request_of(engine))
        ready = worker.outgoing()
        assert (ready.ids, ready.requests) == (((7,), ()) if known else ((), (request,)))


def total(values, name, process_set):
    source = as_buffer(values)
    work = submission.submit(
        Operation.ALLREDUCE, source, lambda shape: empty(source.dtype, shape), name, process_set, wait=True
    )
    return work.output.owner.tolist()


def test_worlds_of_other_sizes_one_after_the_other(monkeypatch):
    on_ranks = player(monkeypatch)
    for size in (2, 3, 1, 2):
        sums = on_ranks(size, lambda rank: [total(np.full(3, 1.0), "x", rank.process_set) for _ in range(5)])
        assert sums == [[[float(size)] * 3] * 5] * size


def test_a_process_set_that_follows_a_removed_one(monkeypatch):
    """Sets of other members, one after the other, with one name of a tensor."""

    def body(rank):
        results = []
        for members in ([0, 1], [1, 2], [0, 2], [0, 1]):
            id = rank.engine.add_process_set(members)
            ids.add(id)
            if rank.number in members:
                process_set = AllRanks(members)
                process_set._register(id, tuple(members), rank.number)
                results += [total(np.full(2, 1.0 + rank.number), "x", process_set) for _ in range(4)]
            rank.engine.remove_process_set(id)
        return results

    ids = set()
    sums = player(monkeypatch)(3, body)
    assert sums == [
        [[3.0] * 2] * 4 + [[4.0] * 2] * 4 + [[3.0] * 2] * 4,
        [[3.0] * 2] * 4 + [[5.0] * 2] * 4 + [[3.0] * 2] * 4,
        [[5.0] * 2] * 4 + [[4.0] * 2] * 4,
    ]
