"""Which thread of a rank drives its engine, and which one it wakes."""

import threading

import numpy as np
import pytest

from collectives.api import (
    MismatchError,
)
from collectives.engine.work import Watch
from collectives.engine.work_table import UNNAMED
from collectives.events import Started
from tests.collectives.engine.job import (
    PATIENCE,
    Caller,
    Greedy,
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

pytestmark = pytest.mark.usefixtures("transport")


# Order, names and handles.


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


# Disagreement.


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


# Threads of one rank.


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
