"""Engines that are shut down: what still runs, what fails, and nothing is left."""

import gc
import threading
import weakref

import numpy as np
import pytest

from collectives.api import (
    EngineError,
    ShutDownError,
    Timeouts,
)
from collectives.engine import progress
from collectives.engine.engine import Engine
from collectives.events import Started
from tests.collectives.backends.inproc import InprocBackend
from tests.collectives.engine.job import (
    PATIENCE,
    Caller,
    ones,
    outcome,
    run,
    running,
    submit,
    until,
    wait,
)

pytestmark = pytest.mark.usefixtures("transport")


# Polite.


def test_shutting_down_fails_what_is_pending_elsewhere():
    with running(3) as job:
        pending = [submit(engine, ones(engine), "x") for engine in job.engines[:2]]
        job.engines[2].shutdown()
        for engine, work in zip(job.engines, pending, strict=False):
            with pytest.raises(ShutDownError, match="shut down by rank 2"):
                wait(engine, work)
        for engine in job.engines:
            until(lambda engine=engine: isinstance(outcome(lambda: submit(engine, np.ones(1), "y")), ShutDownError))
            is_own = engine is job.engines[2]
            told = r"down\. Call hvd\.init" if is_own else "by rank 2; it has called no collective; let all ranks"
            with pytest.raises(ShutDownError, match=told):
                run(engine, np.ones(1), "z")


def test_the_remedy_follows_from_the_last_call_of_the_rank_that_ended():
    with running(2) as job:
        works = [submit(engine, ones(engine), "optimizer.gradient.w") for engine in job.engines]
        for engine, work in zip(job.engines, works, strict=True):
            wait(engine, work)
        names = ("optimizer.gradient.w", "avg_loss")
        pending = [submit(job.engines[0], np.ones(1), name) for name in names]
        job.engines[1].shutdown()
        texts = [str(outcome(lambda work=work: wait(job.engines[0], work))) for work in pending]
    ended = "Horovod has been shut down by rank 1 while the tensor was in flight; it has "
    assert texts[0] == f"{ended}had fewer batches; let each rank call hvd.join() after its last batch"
    assert texts[1].startswith(f"{ended}not called 'avg_loss'; let all ranks make that call")


def test_a_waiting_caller_is_told_of_the_shutdown():
    with running(2) as job:
        caller = Caller(job.engines[0])
        job.engines[1].shutdown()
        assert type(caller.result()) is ShutDownError


def test_a_communication_thread_that_ends_does_not_wait_for_callers_to_drive(monkeypatch):
    """It parks for long right after a caller drove; the answers of the other ranks come to the channel."""

    def body(engine):
        run(engine, ones(engine))
        monkeypatch.setattr(progress, "PARK_SECONDS", 10 * PATIENCE)
        engine._progress._park_seconds = 10 * PATIENCE
        engine.shutdown()
        return engine.is_ending

    monkeypatch.setattr(progress, "LONG_PARK_SECONDS", 10 * PATIENCE)
    with running(2) as job:
        assert job.run(body) == [False, False]


class Slow:
    """Gives the global backend of ``engine`` a close() that lasts until ``go_on`` is set."""

    def __init__(self, engine):
        self.go_on = threading.Event()
        backend = engine._parts.runner.backends()[0]
        self._close, backend.close = backend.close, self.close

    def close(self):
        assert self.go_on.wait(PATIENCE)
        self._close()


def test_a_process_that_goes_on_does_not_wait_for_backends_that_close_aside(monkeypatch):
    monkeypatch.setattr(InprocBackend, "closes_aside", True)
    with running(2) as job:
        pending = submit(job.engines[0], np.ones(1), "x")
        slow = [Slow(engine) for engine in job.engines]
        job.run(Engine.step_out)
        assert [engine.is_ending for engine in job.engines] == [True, True]
        assert type(outcome(lambda: wait(job.engines[0], pending))) is ShutDownError
        for each in slow:
            each.go_on.set()
        until(lambda: not any(engine.is_ending for engine in job.engines))


def test_a_process_that_goes_on_waits_for_any_other_backend(monkeypatch):
    monkeypatch.setattr(InprocBackend, "closes_aside", False)
    with running(2) as job:
        slow = [Slow(engine) for engine in job.engines]
        threads = [threading.Thread(target=engine.step_out, daemon=True) for engine in job.engines]
        for thread in threads:
            thread.start()
        until(lambda: all(engine._ends.ending.finished for engine in job.engines))
        assert all(thread.is_alive() for thread in threads)
        for each, thread in zip(slow, threads, strict=True):
            each.go_on.set()
            thread.join(PATIENCE)
        assert [engine.is_ending for engine in job.engines] == [False, False]


def test_a_process_steps_out_of_an_engine_that_has_failed(monkeypatch):
    monkeypatch.setattr(InprocBackend, "closes_aside", True)
    with running(2) as job:
        job.engines[0].abort(EngineError("a test"))
        for engine in job.engines:
            until(lambda engine=engine: engine.has_ended)
        job.run(Engine.step_out)
        until(lambda: not any(engine.is_ending for engine in job.engines))


def test_what_was_agreed_on_before_the_shutdown_still_runs():
    def body(engine):
        works = [submit(engine, ones(engine), f"t{number}") for number in range(20)]
        engine.barrier()
        engine.shutdown()
        return [wait(engine, work)[0] for work in works]

    with running(3) as job:
        assert job.run(body) == [[6.0] * 20] * 3


def test_what_arrives_together_with_the_stop_still_runs():
    """Rank 1 is busy with a set of its own while rank 0, no member of set 2, lets "y" run and then shuts down."""

    def stay(event):
        if isinstance(event, Started) and event.process_set == 1:
            busy.set()
            leave.wait(PATIENCE)

    busy, leave, heard = threading.Event(), threading.Event(), []
    with running(3, sets=[(1,), (1, 2)]) as job:
        job.engines[1].events.subscribe(stay)
        pending = submit(job.engines[0], np.ones(1), "pending")
        works = [submit(job.engines[1], ones(job.engines[1]), "y", process_set=2)]
        submit(job.engines[1], np.ones(1), "x", process_set=1)
        assert busy.wait(PATIENCE)
        job.engines[2].events.subscribe(heard.append)
        works.append(submit(job.engines[2], ones(job.engines[2]), "y", process_set=2))
        until(lambda: any(isinstance(event, Started) for event in heard))
        leaving = threading.Thread(target=job.engines[0].shutdown)
        leaving.start()
        until(lambda: pending.done)
        leave.set()
        assert [wait(engine, work)[0] for engine, work in zip(job.engines[1:], works, strict=True)] == [5.0, 5.0]
        leaving.join(PATIENCE)


def test_a_rank_that_does_not_answer_the_shutdown_is_named(caplog):
    def stay(event):
        if isinstance(event, Started):
            busy.set()
            leave.wait(PATIENCE)

    busy, leave = threading.Event(), threading.Event()
    timeouts = Timeouts(connect=10.0, collective=10.0, shutdown=0.2)
    with running(2, sets=[(1,)], timeouts=timeouts) as job:
        job.engines[1].events.subscribe(stay)
        submit(job.engines[1], np.ones(1), "x", process_set=1)
        assert busy.wait(PATIENCE)
        job.engines[0].shutdown()
        leave.set()
    assert "rank 0: rank 1 did not answer the shutdown within 0.2 s" in caplog.messages


def test_shutting_down_any_number_of_times_from_anywhere():
    with running(2) as job:
        for _ in range(3):
            job.run(lambda engine: engine.shutdown())


@pytest.mark.parametrize("size", [1, 3])
def test_starting_and_shutting_down_a_hundred_times_leaves_nothing(size):
    engines = []
    for _ in range(100):
        with running(size) as job:
            job.run(lambda engine: run(engine, ones(engine), "x"))
        engines.extend(weakref.ref(engine) for engine in job.engines)
    del job
    gc.collect()
    assert not [engine for engine in engines if engine() is not None]
