"""Groups, joins and process sets that come and go, on the engines of several ranks."""

import threading

import numpy as np
import pytest

from collectives.api import (
    CollectiveTimeoutError,
    DType,
    DuplicateNameError,
    InvalidRequestError,
    MismatchError,
    Operation,
    Parameters,
    PeerLostError,
    ReduceOp,
    Request,
)
from collectives.backends.inproc import InprocBackend, InprocGroup
from collectives.backends.memory import HostMemory
from collectives.buffers import as_buffer, empty
from collectives.controller.messages import Response
from collectives.controller.process_sets import ProcessSets
from collectives.controller.worker import Batch
from collectives.engine.counters import Counters
from collectives.engine.registration import Registration, SetBackends
from collectives.engine.runner import Runner
from collectives.engine.threads import CommandQueue, Waiters
from collectives.engine.work import Work, neutral
from collectives.engine.work_table import UNNAMED, WorkTable
from collectives.events import EventStream
from collectives.net.channel import InprocHub
from collectives.stalls.stragglers import WaitWindows
from tests.collectives.backends.members import group_of
from tests.collectives.engine.job import (
    PATIENCE,
    Caller,
    Formation,
    Job,
    ones,
    outcome,
    run,
    running,
    submit,
    total,
    until,
    wait,
)

AVERAGE = ReduceOp.AVERAGE

pytestmark = pytest.mark.usefixtures("transport")


# Groups.


def group(engine, names, label="g", **fields):
    """A group of allreduces, in flight; unnamed when ``names`` is a number."""
    unnamed = isinstance(names, int)
    works = []
    for place in range(names) if unnamed else names:
        values = as_buffer(ones(engine, 4) + (place if unnamed else 0))
        request = Request(
            "" if unnamed else place,
            Operation.ALLREDUCE,
            values.dtype,
            values.shape,
            group=label,
            group_size=names if unnamed else len(names),
            **fields,
        )
        works.append(Work(request, values, lambda shape: empty(DType.FLOAT64, shape)))
    engine.submit_group(works, unnamed=unnamed)
    return works


def test_a_group_comes_out_whole():
    def body(engine):
        order = ["a", "b"][:: 1 if engine.topology.rank else -1]
        works = group(engine, order)
        results = {work.request.name: wait(engine, work)[0] for work in works}
        unnamed = [[wait(engine, work)[0] for work in group(engine, 3)] for _ in range(3)]
        return results, unnamed

    with running(2) as job:
        assert job.run(body) == [({"a": 3.0, "b": 3.0}, [[3.0, 5.0, 7.0]] * 3)] * 2


def test_more_unnamed_groups_than_there_are_names():
    def body(engine):
        works = [group(engine, 2) for _ in range(300)]
        return {wait(engine, work)[0] for pair in reversed(works) for work in pair}

    with running(2) as job:
        assert job.run(body) == [{3.0, 5.0}] * 2


@pytest.mark.parametrize("names", [["x", "a"], ["a", "x"], ["a", "a"]])
def test_of_a_group_with_a_name_in_flight_nothing_is_submitted(names):
    with running(2) as job:
        engine, other = job.engines
        flying = submit(engine, ones(engine), "x")
        with pytest.raises(DuplicateNameError):
            group(engine, names)
        works = [group(each, ["a", "b"]) for each in job.engines]
        assert [wait(engine, work)[0] for work in works[0]] == [3.0, 3.0]
        run(other, ones(other), "x")
        wait(engine, flying)


def test_of_a_group_with_a_wrong_tensor_nothing_is_submitted():
    with running(2) as job:
        with pytest.raises(InvalidRequestError):
            group(job.engines[0], ["a", "b"], process_set=9)
        job.run(lambda engine: [wait(engine, work) for work in group(engine, ["a", "b"])])


def test_a_group_fails_on_all_ranks():
    def body(engine):
        works = group(engine, ["a", "b"], op=ReduceOp.MAX if engine.topology.rank else ReduceOp.SUM)
        return [str(outcome(lambda work=work: wait(engine, work))) for work in works]

    with running(2) as job:
        texts = {text for rank in job.run(body) for text in rank}
    assert len(texts) == 1
    assert "the ranks disagree about the op" in texts.pop()


# Joins.


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_with_less_data_join(size):
    """Rank r has r + 1 batches."""

    def body(engine):
        batches = range(engine.topology.rank + 1)
        steps = [(run(engine, ones(engine), "x")[0], run(engine, ones(engine), op=AVERAGE)[0]) for _ in batches]
        last = engine.join()
        return steps, last, run(engine, ones(engine))[0]

    with running(size) as job:
        for rank, (steps, last, after) in enumerate(job.run(body)):
            alive = [sum(range(first + 1, size + 1)) for first in range(rank + 1)]
            np.testing.assert_allclose(steps, [(each, each / size) for each in alive])
            assert last == size - 1
            assert after == total(size)[0]


def test_a_joined_rank_changes_nothing_in_any_operation():
    checks = {}

    def body(engine):
        if engine.topology.rank == 1:
            return engine.join()
        for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
            for values in (np.array([-3.0, 2.0]), np.array([-3, 2], np.int8), np.array([-2.0, 4.0], np.float16)):
                np.testing.assert_array_equal(run(engine, values, op=op), values)
        np.testing.assert_array_equal(run(engine, ones(engine), op=ReduceOp.ADASUM), ones(engine))
        rows = np.array([[1, 2], [3, 4]])
        np.testing.assert_array_equal(run(engine, rows, operation=Operation.ALLGATHER), rows)
        np.testing.assert_array_equal(run(engine, rows, operation=Operation.REDUCESCATTER), rows[:1])
        np.testing.assert_array_equal(run(engine, rows, operation=Operation.BROADCAST, root_rank=0), rows)
        received = run(engine, rows, operation=Operation.ALLTOALL, splits=(1, 1))
        np.testing.assert_array_equal(received, rows[:1])
        engine.barrier()
        error = outcome(lambda: run(engine, rows, operation=Operation.BROADCAST, root_rank=1))
        assert isinstance(error, MismatchError)
        checks["done"] = True
        return engine.join()

    with running(2) as job:
        assert job.run(body) == [0, 0]
    assert checks


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.real is dtype])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_the_neutral_element(op, dtype):
    buffer = empty(dtype, (1,))
    HostMemory().fill(buffer, neutral(op, dtype))
    element = buffer.host
    values = np.array([0, 1, 0x3F80, 0xBF80]).astype(dtype.storage)
    if dtype is DType.BFLOAT16:
        element, values = ((each.astype(np.uint32) << 16).view(np.float32) for each in (element, values))
    combine = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}[op]
    np.testing.assert_array_equal(combine(values, element), values)


def test_a_process_set_joins_for_itself():
    def body(engine):
        rank = engine.topology.rank
        if rank == 2:
            return run(engine, ones(engine), "all")[0]
        if rank == 0:
            sums = [run(engine, ones(engine), "pair", process_set=1)[0] for _ in range(2)]
        last = engine.join(process_set=1)
        return run(engine, ones(engine), "all")[0], last, rank or sums

    with running(3, sets=[(0, 1)]) as job:
        first, second, third = job.run(body)
    assert first == (6.0, 0, [1.0, 1.0])
    assert second == (6.0, 0, 1)
    assert third == 6.0


@pytest.mark.parametrize("operation", [Operation.ALLREDUCE, Operation.ALLGATHER])
def test_more_unnamed_tensors_than_there_are_names_come_before_a_join(operation):
    """Rank r has UNNAMED * r + 100, so that ranks join while others, and they themselves, wait for names."""

    def body(engine):
        counts = [UNNAMED * (rank + 1) + 100 for rank in range(3)]
        works = [submit(engine, ones(engine, 1), operation=operation) for _ in range(counts[engine.topology.rank])]
        last = engine.join()
        for number, work in enumerate(works):
            rows = [rank + 1.0 for rank, count in enumerate(counts) if number < count]
            expected = rows if operation is Operation.ALLGATHER else [sum(rows)]
            assert wait(engine, work).tolist() == expected, number
        return last, run(engine, ones(engine))[0]

    with running(3) as job:
        (last,) = {last for last, _ in job.run(body)}
    assert last in range(3)


def test_of_two_threads_that_join_at_once_one_is_refused():
    with running(2) as job:
        engine, other = job.engines
        check, both = engine._submitter.check, threading.Barrier(2)
        engine._submitter.check = lambda request: (check(request), both.wait(PATIENCE))
        threads = [Caller(engine, body=lambda engine: engine.join()) for _ in range(2)]
        until(lambda: not all(thread.is_alive() for thread in threads))
        other.join()
        results = [thread.result() for thread in threads]
        assert [type(each) for each in sorted(results, key=str)] == [int, InvalidRequestError]
        engine._submitter.check = check
        job.run(lambda engine: run(engine, ones(engine)))


def test_sets_are_changed_by_one_thread_while_a_join_of_another_ends():
    def change(engine):
        return engine.add_process_set([1])

    with running(2) as job:
        engine, other = job.engines
        job.run(lambda engine: engine.add_process_set([0]))
        joined = Caller(engine, body=lambda engine: engine.join())
        until(lambda: engine._submitter._joins)
        changed = Caller(engine, body=change)
        until(lambda: len(engine._works._works) == 2)
        assert other.join() == joined.result() == 1
        assert change(other) == changed.result() == 2


def test_a_rank_that_has_joined_submits_nothing():
    with running(2, sets=[(0,)]) as job:
        engine, other = job.engines
        joined = Caller(engine, body=lambda engine: engine.join())
        until(lambda: engine._works)
        for call in (lambda: submit(engine, ones(engine), "x"), engine.join, engine.barrier):
            error = outcome(call)
            assert isinstance(error, InvalidRequestError)
            assert "rank 0 has joined process set 0; submit tensors before join()" in str(error)
        assert run(engine, ones(engine), process_set=1)[0] == 1.0
        assert other.join() == 1
        assert joined.result() == 1
        job.run(lambda engine: run(engine, ones(engine), "x"))


def test_a_join_that_was_interrupted_is_still_a_join(monkeypatch):
    """Or tensors of this rank would meet others that were computed without it."""
    with running(2) as job:
        engine, other = job.engines
        with monkeypatch.context() as patch:
            patch.setattr(engine._progress, "wait", lambda work: interrupt())
            with pytest.raises(KeyboardInterrupt):
                engine.join()
        with pytest.raises(InvalidRequestError, match="rank 0 has joined process set 0"):
            submit(engine, ones(engine), "x")
        assert run(other, ones(other), "x")[0] == 2.0
        assert other.join() == 1
        until(
            lambda: not isinstance(outcome(lambda: engine._submitter.check(Request("x", Operation.BARRIER))), Exception)
        )
        assert job.run(lambda engine: run(engine, ones(engine))[0]) == [3.0, 3.0]


def interrupt():
    raise KeyboardInterrupt


# Process sets that come and go.


def test_sets_are_added_used_removed_and_added_again():
    def body(engine):
        rank, results = engine.topology.rank, []
        for ranks in ((0, 1), (1, 2)):
            id = engine.add_process_set(ranks)
            other = engine.add_process_set((0, 2))
            if rank in ranks:
                results.append(run(engine, ones(engine), "x", process_set=id)[0])
                results.append(run(engine, ones(engine), process_set=id)[0])
            results.append((id, other))
            engine.remove_process_set(id)
            engine.remove_process_set(other)
        return results, engine.process_sets.ids()

    with running(3) as job:
        assert job.run(body) == [
            ([3.0, 3.0, (1, 2), (1, 2)], [0]),
            ([3.0, 3.0, (1, 2), 5.0, 5.0, (1, 2)], [0]),
            ([(1, 2), 5.0, 5.0, (1, 2)], [0]),
        ]


def test_a_set_cannot_be_used_after_its_removal():
    def body(engine):
        id = engine.add_process_set([0])
        engine.remove_process_set(id)
        return outcome(lambda: run(engine, ones(engine), process_set=id))

    with running(2) as job:
        for error in job.run(body):
            assert isinstance(error, InvalidRequestError)
            assert "process set 1 does not exist" in str(error)


def test_all_that_is_in_flight_on_a_removed_set_fails_also_what_waits_for_a_name():
    def body(engine):
        id = engine.add_process_set([0, 1])
        stuck = [submit(engine, ones(engine), process_set=id) for _ in range(600 * (engine.topology.rank == 0))]
        engine.barrier()
        engine.remove_process_set(id)
        again = engine.add_process_set([0, 1])
        texts = {str(outcome(lambda work=work: wait(engine, work))) for work in stuck}
        return texts, id == again, engine.topology.rank < 2 and run(engine, ones(engine), process_set=again)[0]

    with running(3) as job:
        (texts, *rest), *others = job.run(body)
    assert texts == {"process set 1 was removed while the tensor was in flight"}
    assert [rest, *others] == [[True, 3.0], (set(), True, 3.0), (set(), True, False)]


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([0, 0], "must name each rank once"),
        ([5], "must name each rank once"),
        ([1, 0], "exists already"),
        ([], "least"),
    ],
)
def test_a_set_that_cannot_be_is_refused_on_the_rank_that_asks(ranks, says):
    with running(2) as job:
        for engine in job.engines:
            with pytest.raises(InvalidRequestError, match=says):
                engine.add_process_set(ranks)
        for id, text in ((0, "cannot be removed"), (3, "does not exist")):
            with pytest.raises(InvalidRequestError, match=text):
                job.engines[0].remove_process_set(id)


def test_sets_may_be_forbidden():
    with running(2, dynamic_process_sets=False) as job, pytest.raises(InvalidRequestError, match="DYNAMIC_PROCESS_SET"):
        job.engines[0].add_process_set([0])


def test_ranks_that_ask_for_different_sets_are_told_and_go_on():
    def body(engine):
        rank = engine.topology.rank
        error = outcome(lambda: engine.add_process_set([rank]))
        return str(error), engine.add_process_set([1])

    with running(2) as job:
        results = job.run(body)
    assert [id for _, id in results] == [1, 1]
    assert len({text for text, _ in results}) == 1
    assert "the ranks disagree about the ranks: (0,) on rank 0; (1,) on rank 1" in results[0][0]


def test_a_rank_that_is_lost_while_a_set_connects_is_named():
    class Silent(Job):
        def _connect(self, rank, members, scope):
            if rank == 0:
                self.vanish(1)
                until(lambda: self.engines[0]._ends.ending.lost is not None)
                raise CollectiveTimeoutError("a member did not come")
            return super()._connect(rank, members, scope)

    job = Silent(3)
    error, _, third = job.outcomes(lambda engine: (engine.add_process_set([0, 1]), run(engine, ones(engine))))
    job.shutdown()
    for each in (error, third):
        assert isinstance(each, PeerLostError)
        assert "rank 1 on host" in str(each)


def test_a_set_that_connects_while_everything_is_aborted_does_not_come_about():
    error = PeerLostError("rank 1 is gone")

    def connect(scope):
        runner.abort(error)
        return SetBackends.of([InprocBackend(group_of(2), InprocGroup(2))])

    queue = CommandQueue(InprocHub(1).channel(0))
    works, counters = WorkTable(0, queue), Counters(WaitWindows(3), lambda report: None)
    runner = Runner(0, ProcessSets(3), {}, works, EventStream(), counters, Waiters(), queue, Parameters())
    request = Request("add", Operation.ADD_PROCESS_SET, splits=(0, 1))
    registration = Registration(request)
    registration.formation = Formation(connect)
    works.enter([registration], unnamed=False)
    with pytest.raises(PeerLostError):
        runner.run(
            Batch(
                (Response(1, request, (1,), (b"here", b"there")),), begins_rounds=False, id=0, parameters=Parameters()
            )
        )
    assert runner.backends()  # which are aborted and closed with the rest


def test_what_is_in_flight_on_a_removed_set_fails():
    def body(engine):
        id = engine.add_process_set([0, 1])
        stuck = submit(engine, ones(engine), "x", process_set=id) if engine.topology.rank == 0 else None
        engine.barrier()
        engine.remove_process_set(id)
        return stuck and outcome(lambda: wait(engine, stuck))

    with running(3) as job:
        error, *rest = job.run(body)
    assert isinstance(error, MismatchError)
    assert "process set 1 was removed while the tensor was in flight" in str(error)
    assert rest == [None, None]
