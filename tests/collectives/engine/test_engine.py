"""Engines of several ranks, as threads of this process."""

import random
import threading

import numpy as np
import pytest

from collectives.api import (
    DuplicateNameError,
    InvalidRequestError,
    MismatchError,
    Operation,
    ReduceOp,
    Request,
)
from collectives.buffers import as_buffer
from collectives.engine.work import Watch
from collectives.engine.work_table import UNNAMED
from collectives.events import Started
from tests.collectives.engine.job import (
    PATIENCE,
    Caller,
    Greedy,
    Job,
    Watched,
    ones,
    outcome,
    run,
    running,
    submit,
    total,
    until,
    wait,
)

SIZES = [1, 2, 3, 4]

pytestmark = pytest.mark.usefixtures("transport")


# Every collective.


def check_allreduce(engine, size):
    expected = {ReduceOp.SUM: sum(range(1, size + 1)), ReduceOp.MIN: 1, ReduceOp.MAX: size}
    expected[ReduceOp.AVERAGE] = expected[ReduceOp.SUM] / size
    for op, value in expected.items():
        np.testing.assert_array_equal(run(engine, ones(engine), op=op), np.full(3, float(value)))
    if size != 3:
        orthogonal = 3.0 * (np.arange(4) == engine.topology.rank)
        np.testing.assert_array_equal(run(engine, orthogonal, op=ReduceOp.ADASUM), 3.0 * (np.arange(4) < size))
    scaled = run(engine, ones(engine), prescale_factor=0.5, postscale_factor=4.0)
    np.testing.assert_array_equal(scaled, 2.0 * total(size))


def check_allgather(engine, size):
    rank = engine.topology.rank
    gathered = run(engine, np.full((rank, 2), rank), operation=Operation.ALLGATHER)
    np.testing.assert_array_equal(gathered, [[member] * 2 for member in range(size) for _ in range(member)] or 0)
    assert gathered.shape == (sum(range(size)), 2)


def check_broadcast(engine, size):
    for root in range(size):
        received = run(engine, ones(engine), operation=Operation.BROADCAST, root_rank=root)
        np.testing.assert_array_equal(received, np.full(3, root + 1.0))


def check_alltoall(engine, size):
    """Rank r sends s + r % 2 rows to rank s, and one row to nobody."""
    rank = engine.topology.rank
    splits = tuple(member + rank % 2 for member in range(size))
    rows = np.array([[rank, member] for member in range(size) for _ in range(splits[member])] + [[-1, -1]])
    work = submit(engine, rows, "exchange", Operation.ALLTOALL, splits=splits)
    received = wait(engine, work)
    expected = [[member, rank] for member in range(size) for _ in range(rank + member % 2)]
    np.testing.assert_array_equal(received, np.array(expected, int).reshape(-1, 2))
    assert work.received_splits == tuple(rank + member % 2 for member in range(size))


def check_reducescatter(engine, size):
    rows = np.arange(2 * (size + 1)).reshape(size + 1, 2)  # the first rank gets one row more
    for op, factor in ((ReduceOp.SUM, size), (ReduceOp.AVERAGE, 1)):
        scattered = run(engine, rows, operation=Operation.REDUCESCATTER, op=op)
        mine = slice(0, 2) if engine.topology.rank == 0 else slice(engine.topology.rank + 1, engine.topology.rank + 2)
        np.testing.assert_array_equal(scattered, rows[mine] * factor)


def check_barrier(engine, size):
    for _ in range(3):
        engine.barrier()


CHECKS = [
    check_allreduce,
    check_allgather,
    check_broadcast,
    check_alltoall,
    check_reducescatter,
    check_barrier,
]


@pytest.mark.parametrize("cache_capacity", [0, 1, 1024])
@pytest.mark.parametrize("size", SIZES)
def test_every_collective_on_every_rank(size, cache_capacity):
    with running(size, cache_capacity=cache_capacity) as job:
        for _ in range(2):
            for check in CHECKS:
                job.run(lambda engine, check=check: check(engine, size))


def test_an_in_place_destination_is_written():
    def body(engine):
        values = ones(engine)
        buffer = as_buffer(values)
        request = Request("x", Operation.ALLREDUCE, buffer.dtype, buffer.shape)
        assert engine.run(request, buffer, buffer).result() is buffer
        return values

    with running(2) as job:
        for values in job.run(body):
            np.testing.assert_array_equal(values, total(2))


# Order, names and handles.


@pytest.mark.parametrize("threshold", [0, 64, 1 << 20])
def test_ranks_may_submit_in_any_order(threshold):
    names = [f"t{number}" for number in range(40)]

    def body(engine):
        order = random.Random(engine.topology.rank)
        for step in range(3):
            works = {name: submit(engine, ones(engine) + step, name) for name in order.sample(names, len(names))}
            for name in order.sample(names, len(names)):
                np.testing.assert_array_equal(wait(engine, works[name]), total(3) + 3 * step)

    with running(3, fusion_threshold=threshold) as job:
        job.run(body)


def test_a_handle_is_done_without_being_waited_for():
    with running(2) as job:
        first = submit(job.engines[0], ones(job.engines[0]), "x")
        assert not job.engines[0].poll(first)
        second = submit(job.engines[1], ones(job.engines[1]), "x")
        until(lambda: job.engines[0].poll(first) and job.engines[1].poll(second))
        for engine, work in zip(job.engines, (first, second), strict=True):
            np.testing.assert_array_equal(wait(engine, work), total(2))
            np.testing.assert_array_equal(wait(engine, work), total(2))


@pytest.mark.parametrize("local_size", [1, 1000])
def test_whoever_asks_or_waits_is_served_whether_cores_are_scarce_or_not(local_size):
    def body(engine):
        works = [submit(engine, ones(engine), name) for name in "abc"]
        until(lambda: engine.poll(works[1]))
        return [wait(engine, work)[0] for work in works]

    with running(2, local_size=local_size) as job:
        assert job.run(body) == [[3.0] * 3] * 2


def ran_on(engine):
    """The threads that run batches of ``engine``, as they start them."""
    threads = []
    engine.events.subscribe(lambda event: isinstance(event, Started) and threads.append(threading.current_thread()))
    return threads


def test_where_cores_are_scarce_a_batch_is_left_to_the_caller_who_comes_soon(patience):
    with running(2, local_size=1000) as job:
        engine, other = job.engines
        threads = ran_on(other)
        late = submit(other, ones(other), "x")
        caller = Caller(engine, "x")
        until(lambda: other._loop.has_batches and not other._progress._driving.lock.locked())
        assert not late.done
        np.testing.assert_array_equal(wait(other, late), total(2))
        np.testing.assert_array_equal(caller.result(), total(2))
        assert threads == [threading.current_thread()]


def test_where_cores_are_scarce_a_batch_is_run_though_no_caller_comes():
    with running(2, local_size=1000) as job:
        engine, other = job.engines
        threads = ran_on(other)
        submit(other, ones(other), "x")
        np.testing.assert_array_equal(Caller(engine, "x").result(), total(2))
        assert [thread.name for thread in threads] == ["hvd-engine-1"]


@pytest.mark.parametrize("ask", ["poll", "wait"])
def test_who_waits_for_the_last_of_a_name_hurries_those_before_it(ask, patience):

    def body(engine):
        works = [submit(engine, ones(engine)) for _ in range(2 * UNNAMED + 1)]
        if ask == "poll":
            until(lambda: engine.poll(works[-1]))
        return wait(engine, works[-1])[0]

    with running(2, local_size=1000) as job:
        assert job.run(body) == [3.0] * 2


def test_a_caller_who_leaves_with_his_own_work_wakes_who_runs_the_rest(patience):
    """A polled batch is left to a waiting caller, whose own tensor is refused in the same step."""
    with running(2, local_size=1000) as job:
        engine, other = job.engines
        paused, pause, polled = threading.Event(), threading.Event(), submit(other, ones(other), "x")
        other._queue.call(lambda: (paused.set(), pause.wait(PATIENCE)))
        other._queue.notify()
        assert paused.wait(PATIENCE)
        refused = Caller(other, body=lambda engine: run(engine, ones(engine, 4), "bad"))
        until(lambda: other._parts.waiters.threads)
        theirs = [submit(engine, ones(engine), name) for name in ("bad", "x")]
        assert not [engine.poll(work) for work in theirs if work.done]
        other.poll(polled)
        pause.set()
        until(lambda: all([other.poll(polled), engine.poll(theirs[1])]))
        assert [wait(each, work)[0] for each, work in ((engine, theirs[1]), (other, polled))] == [3.0, 3.0]
        assert isinstance(refused.result(), MismatchError)


def test_a_name_in_flight_is_refused_to_the_caller_only():
    with running(2) as job:
        engine, other = job.engines
        work = submit(engine, ones(engine), "x")
        with pytest.raises(DuplicateNameError, match="tensor 'x' is still in flight on rank 0"):
            submit(engine, ones(engine), "x")
        assert not work.done
        assert wait(other, submit(other, ones(other), "x"))[0] == 3.0
        np.testing.assert_array_equal(wait(engine, work), total(2))
        job.run(lambda engine: run(engine, ones(engine), "x"))


def test_more_unnamed_tensors_than_there_are_names_wait_their_turn():
    count = 600

    def body(engine):
        works = [submit(engine, ones(engine) + number) for number in range(count)]
        return [wait(engine, work)[0] for work in works]

    with running(2) as job:
        for results in job.run(body):
            assert results == [3.0 + 2 * number for number in range(count)]


def test_unnamed_tensors_of_a_process_set_do_not_shift_the_names_of_others():
    def body(engine):
        if engine.topology.rank < 2:
            run(engine, ones(engine), process_set=1)
            engine.barrier(process_set=1)
        engine.barrier()
        return run(engine, ones(engine))[0]

    with running(3, sets=[(0, 1)]) as job:
        assert job.run(body) == [6.0] * 3


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"process_set": 1}, "Rank 1 is not a member"),
        ({"process_set": 9}, "process set 9 does not exist"),
    ],
)
def test_a_call_that_no_other_rank_waits_for_is_refused_at_once_and_nothing_is_submitted(fields, says):
    with running(2, sets=[(0,)]) as job:
        for call in (submit, run):
            with pytest.raises(InvalidRequestError, match=says):
                call(job.engines[1], np.ones(3), "x", **fields)
        job.run(lambda engine: run(engine, ones(engine), "x"))


# Disagreement.


def test_a_mismatch_is_raised_on_all_members_and_nothing_else_is_disturbed():
    def body(engine):
        other = submit(engine, ones(engine), "other")
        odd = outcome(lambda: run(engine, np.ones(3 + engine.topology.rank // 2), "x"))
        return odd, wait(engine, other)[0], run(engine, ones(engine), "x")[0]

    with running(3) as job:
        results = job.run(body)
    errors = [error for error, _, _ in results]
    assert [type(error) for error in errors] == [MismatchError] * 3
    assert {str(error) for error in errors} == {
        "tensor 'x': the ranks disagree about the shape: (3,) on ranks 0, 1; (4,) on rank 2. "
        "Submit the same shape under this name on every rank"
    }
    said = {0: "(3,)", 1: "(3,)", 2: "(4,)"}
    assert [(error.tensor, error.property, error.values) for error in errors] == [("x", "shape", said)] * 3
    assert [rest for _, *rest in results] == [[6.0, 6.0]] * 3


def test_what_is_held_goes_out_though_the_caller_that_drove_has_left():
    """Rank 0 holds "held" when its caller learns that "odd" is refused, and nobody drives afterwards."""
    with running(2, cycle_time=0.2, wrap=lambda channel: channel if channel.rank else Greedy(channel)) as job:
        coordinator, other = job.engines
        submit(coordinator, np.ones(1), "half")
        works = [submit(coordinator, ones(coordinator), "held")]
        until(job.channels[0].is_asleep)
        caller = Caller(coordinator, "odd")
        until(lambda: caller.ident in job.channels[0].sleeping)
        works.append(submit(other, ones(other), "held"))
        odd = submit(other, np.ones(2), "odd")
        assert isinstance(caller.result(), MismatchError)
        until(lambda: all(work.done for work in works))
        assert isinstance(outcome(lambda: wait(other, odd)), MismatchError)
        job.channels[0].greedy = False


# Process sets.


def test_overlapping_process_sets_in_any_order():
    sets = [(0, 1), (1, 2), (0, 1, 2)]

    def body(engine):
        rank = engine.topology.rank
        mine = [id for id, members in enumerate([*sets[:2], (0, 1, 2, 3)], 1) if rank in members and id < 3]
        ids = [0, *mine]
        for step in range(20):
            order = random.Random(100 * rank + step).sample(ids, len(ids))
            works = {id: submit(engine, ones(engine), "x", process_set=id) for id in order}
            sums = {id: wait(engine, works[id])[0] for id in order}
            assert sums == {id: {0: 10.0, 1: 3.0, 2: 5.0}[id] for id in ids}

    with running(4, sets=sets[:2]) as job:
        job.run(body)


def test_barriers_and_roots_of_a_process_set():
    def body(engine):
        rank = engine.topology.rank
        if rank:
            engine.barrier(process_set=1)
            received = run(engine, ones(engine), operation=Operation.BROADCAST, root_rank=2, process_set=1)
            gathered = run(engine, np.array([rank]), operation=Operation.ALLGATHER, process_set=1)
            return received[0], gathered.tolist()
        return None

    with running(3, sets=[(1, 2)]) as job:
        assert job.run(body) == [None, (3.0, [1, 2]), (3.0, [1, 2])]


def test_a_barrier_returns_when_all_have_come():
    come = []

    def body(engine):
        for number in range(10):
            come.append(number)
            engine.barrier()
            assert come.count(number) == 3

    with running(3) as job:
        job.run(body)


# Threads of one rank.


def test_threads_of_a_rank_submit_and_wait_at_once():
    threads, rounds = 4, 25

    def work(engine, number):
        sums = [run(engine, ones(engine) + step, f"thread-{number}")[0] for step in range(rounds)]
        results.append(sums == [3.0 + 2 * step for step in range(rounds)])

    def body(engine):
        numbers = random.Random(engine.topology.rank).sample(range(threads), threads)
        workers = [threading.Thread(target=work, args=(engine, number)) for number in numbers]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    results = []
    with running(2) as job:
        job.run(body)
    assert results == [True] * threads * 2


def test_a_caller_that_sleeps_as_the_driver_lets_others_submit():
    """A thread of rank 1 drives, asleep, until "late" comes; another then submits "early", for which rank 0 waits."""
    with running(2, wrap=Watched) as job:
        engine, other = job.engines
        threads = [Caller(other, "late"), Caller(engine, "early")]
        until(lambda: all(thread.ident in job.channels[thread.rank].sleeping for thread in threads))
        threads += [Caller(other, "early"), Caller(engine, "late")]
        assert [thread.result()[0] for thread in threads] == [3.0] * 4


@pytest.mark.parametrize("drives", [True, False])
def test_a_caller_that_sleeps_is_roused(drives):
    """Its list of works is interrupted while it sleeps: as the driver, or behind another caller that drives."""
    with running(2, wrap=Watched) as job:
        engine, watch = job.engines[1], Watch([submit(job.engines[1], ones(job.engines[1]), "late")])
        callers = [] if drives else [Caller(engine, "later")]
        until(lambda: all(caller.ident in job.channels[1].sleeping for caller in callers))
        waiting = Caller(engine, body=lambda engine: engine.await_any(watch))
        until(lambda: waiting.ident in (job.channels[1].sleeping if drives else engine._parts.waiters.threads))
        watch.interrupted = True
        engine.rouse()
        assert waiting.result() is None
        assert not watch.works[0].done
        callers += [Caller(job.engines[0], name) for name in (["late"] if drives else ["late", "later"])]
        assert [caller.result()[0] for caller in callers] == [3.0] * len(callers)
        wait(engine, watch.works[0])


@pytest.mark.parametrize("local_size", [1, 1000])
@pytest.mark.parametrize("size", [1, 2])
def test_an_idle_engine_sleeps_until_it_is_woken(size, local_size):
    with running(size, wrap=Watched, local_size=local_size, stall_warning=0.05) as job:
        for _ in range(3):
            job.run(lambda engine: run(engine, ones(engine), "x"))
            until(lambda: all(list(channel.sleeping.values()) == [None] for channel in job.channels))


def test_a_patient_communication_thread_parks_through_submissions():
    """The caller that submits next will probably wait: woken, the thread would take its core from it."""

    def park(seconds):
        naps.append(first._progress.napping)
        parked(seconds)

    def woken():
        first._queue.notify()  # again and again: the caller, which polls too, may take a wake
        return naps

    naps = []
    with running(2, local_size=2) as job:
        first, second = job.engines
        parked, first._queue.unpark.wait = first._queue.unpark.wait, park
        caller = Caller(first, "x")
        until(lambda: first._progress.is_driven_by(caller.ident))
        until(woken)
        assert run(second, ones(second), "x")[0] == 3.0
        assert caller.result()[0] == 3.0
    assert all(naps)


# Several jobs.


def test_a_job_is_made_of_any_number_of_engines_in_one_process():
    """Two jobs side by side do not meet."""
    first, second = Job(2), Job(2)
    try:
        assert first.run(lambda engine: run(engine, ones(engine), "x")[0]) == [3.0] * 2
        first.shutdown()
        assert second.run(lambda engine: run(engine, ones(engine), "x")[0]) == [3.0] * 2
    finally:
        first.shutdown(), second.shutdown()
