"""Calls of one name and different kinds, which wait for each other."""

import itertools
import threading
from functools import partial

import pytest

from collectives.api import MismatchError, Operation
from collectives.buffers import as_buffer, empty
from collectives.controller.kind_mismatch import is_certain, kind_mismatches, subject
from collectives.controller.waits import Activity, CallInFlight, RankStatus, Waiting
from collectives.engine.work import Work
from tests.collectives.engine.job import (
    PATIENCE,
    Caller,
    kept_request,
    ones,
    outcome,
    run,
    running,
    submit,
    total,
    until,
    wait,
)

KINDS = (Operation.ALLREDUCE, Operation.BROADCAST, Operation.ALLGATHER)
NAME = "k"
ALLGATHER = f"allgather.{NAME}"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Rank 0 asks, and decides, early."""
    monkeypatch.setattr("collectives.stalls.deadlocks.PATIENCE_SECONDS", 0.02)


def call(engine, operation, name=NAME):
    """The sum of :func:`ones`, what rank 0 has, or all of it."""
    return run(engine, ones(engine), name and f"{operation.label}.{name}", operation, **fields_of(operation))


def fields_of(operation):
    return {"root_rank": 0} if operation is Operation.BROADCAST else {}


def assert_mismatch(errors, kinds, name=NAME):
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert isinstance(error, MismatchError)
        assert error.property == "operation"
        assert error.values == dict(enumerate(kinds))
        assert f"{name!r}" in str(error)


@pytest.mark.parametrize("kinds", [KINDS[:2], KINDS[1::-1], KINDS, (KINDS[0], KINDS[1], KINDS[0])])
@pytest.mark.parametrize("steps", [0, 10])  # later ones bypass the coordinator
@pytest.mark.usefixtures("transport")
def test_calls_of_different_kinds_under_one_name_fail_on_all_ranks(kinds, steps):
    def body(engine):
        for _ in range(steps):
            call(engine, KINDS[0])
        error = outcome(lambda: call(engine, kinds[engine.topology.rank]))
        return error, call(engine, KINDS[0])

    with running(len(kinds)) as job:
        errors, sums = zip(*job.run(body), strict=True)
    assert_mismatch(errors, [kind.label for kind in kinds])
    assert all((each == total(len(kinds))).all() for each in sums)


def test_calls_without_names_cross_too():
    with running(2) as job:
        errors = job.run(lambda engine: outcome(lambda: call(engine, KINDS[engine.topology.rank], None)))
    assert {str(error) for error in errors} == {
        "the ranks call different operations, each without a name: allreduce on rank 0; broadcast on rank 1. Call the "
        "same ones in the same order on every rank, or give them names; further calls without names "
        "do not meet"
    }


def call_group(engine):
    works = [
        Work(kept_request(f"{ALLGATHER}[{place}]", KINDS[2], group=ALLGATHER, group_size=2, **fields), source, make)
        for place, (source, make, fields) in enumerate(map(described, (ones(engine), ones(engine))))
    ]
    engine.submit_group(works)
    for work in works:
        engine.synchronize(work)


def described(array):
    """As a binding describes a tensor of a group."""
    source = as_buffer(array)
    return source, partial(empty, source.dtype), {"dtype": source.dtype, "shape": source.shape}


def test_a_group_crosses_with_a_tensor():
    """So do dense and sparse gradients of one name: the rows of sparse ones are gathered."""

    def body(engine):
        error = outcome(lambda: call(engine, KINDS[0]) if engine.topology.rank else call_group(engine))
        return error, call(engine, KINDS[0]), outcome(lambda: call_group(engine))

    with running(3) as job:
        errors, sums, groups = zip(*job.run(body), strict=True)
    assert_mismatch(errors, ["grouped allgather", "allreduce", "allreduce"])
    assert all((each == total(3)).all() for each in sums)
    assert groups == (None,) * 3


@pytest.mark.usefixtures("transport")
def test_a_rank_whose_other_thread_may_still_come_is_waited_for():
    """Rank 0 has asked both ranks, again and again, before that thread makes its call."""
    with running(2) as job:
        late = [Late(engine) for engine in job.engines]
        callers = [
            Caller(engine, body=lambda engine: call(engine, KINDS[engine.topology.rank])) for engine in job.engines
        ]
        statuses = job.engines[0]._parts.statuses
        for _ in range(3):
            heard = [statuses._answers.get(rank) for rank in range(2)]
            until(lambda: all(statuses._answers.get(rank) not in (None, heard[rank]) for rank in range(2)))  # noqa: B023
        for each in late:
            each.come.set()
        results = [caller.result()[0] for caller in (callers[0], late[1].caller, late[0].caller, callers[1])]
    assert results == [3.0, 3.0, 1.0, 1.0]


class Late:
    """A thread that has called a collective before, and makes the other call of its rank when it may ``come``."""

    def __init__(self, engine):
        self.come = threading.Event()
        self.caller = Caller(engine, body=self._run)

    def _run(self, engine):
        call(engine, KINDS[0], "before")
        assert self.come.wait(PATIENCE)
        return call(engine, KINDS[1 - engine.topology.rank])


@pytest.mark.usefixtures("transport")
def test_ranks_may_submit_the_kinds_in_different_orders():
    def body(engine):
        rank, sums = engine.topology.rank, []
        for order in [*itertools.permutations(KINDS)] * 2:
            mine = order if rank else order[::-1]
            works = [submit(engine, ones(engine), f"{each.label}.{NAME}", each, **fields_of(each)) for each in mine]
            results = [wait(engine, work) for work in works]
            sums.append(results[mine.index(KINDS[0])][0])
        return sums

    with running(3) as job:
        assert job.run(body) == [[6.0] * 12] * 3


# Pure.


def waiting(*ranks, of=3):
    return Waiting(0.0, tuple(rank for rank in range(of) if rank not in ranks), ranks)


def found(*kinds, of=3):
    """The kind_mismatches of calls of these kinds and ranks."""
    tensors = {subject(kept_request(f"{kind.label}.{NAME}", kind)): ranks for kind, *ranks in kinds}
    about = next(iter(tensors))[0]
    by_kind = {kind: {(0, kind.label): waiting(*ranks, of=of)} for (_, kind), ranks in tensors.items()}
    return kind_mismatches([(about, by_kind)])


def test_a_crossing_has_each_rank_in_one_call():
    reduced, root, gathered = KINDS
    (mismatch,) = found((reduced, 0, 2), (root, 1))
    assert mismatch.keys == ((0, "allreduce.k"), (0, "broadcast.k"))
    assert mismatch.why.text.startswith(
        "tensor 'k': the ranks disagree about the operation: allreduce on ranks 0, 2; broadcast on rank 1."
    )
    assert found((reduced, 0), (root, 1), (gathered, 2))
    assert not found((reduced, 0), (root, 1)), "rank 2 may come to one of them"
    assert not found((reduced, 0, 2), (root, 1, 2)), "rank 0 or 1 may come to the other one"


def answers(*waits, is_held=True):
    keys = [tuple(CallInFlight(f"{kind.label}.{NAME}", 0, 1.0) for kind in kinds) for kinds in waits]
    return [RankStatus(rank, Activity.WAITS, waits=each, is_held=is_held) for rank, each in enumerate(keys)]


def test_a_crossing_is_certain_when_all_ranks_wait_for_nothing_else():
    reduced, root, gathered = KINDS
    (mismatch,) = found((reduced, 0), (root, 1), of=2)
    assert is_certain(mismatch, answers([reduced], [root]))
    assert not is_certain(mismatch, answers([reduced], [root])[:1])
    assert not is_certain(mismatch, answers([reduced], []))
    assert not is_certain(mismatch, answers([reduced], [gathered]))
    assert not is_certain(mismatch, answers([reduced], [root, gathered])), (
        "the other call may end, and that thread go on"
    )
    assert not is_certain(mismatch, answers([reduced], [root], is_held=False))
