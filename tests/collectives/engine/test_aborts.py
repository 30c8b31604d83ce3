"""Engines that end by an abort, a fault, a rank that vanishes or a signal handler."""

import itertools
import random
import sys
import threading

import pytest

from collectives.api import (
    EngineError,
    HorovodInternalError,
    Operation,
    PeerLostError,
    Request,
    ShutDownError,
)
from collectives.buffers import as_buffer
from collectives.controller.messages import Leave
from collectives.events import Sent, Started
from tests.collectives.engine.job import (
    PATIENCE,
    Caller,
    Job,
    Watched,
    ones,
    outcome,
    run,
    running,
    submit,
    until,
    wait,
)

pytestmark = pytest.mark.usefixtures("transport")


# Not polite.


def all_raise(job, kind, says, name="x"):
    """Every rank raises an error of ``kind`` that says this, for this operation and any later one."""
    for _ in range(2):
        for error in job.outcomes(lambda engine: run(engine, ones(engine), name)):
            assert type(error) is kind
            assert says in str(error)


@pytest.mark.parametrize("kind", [HorovodInternalError, PeerLostError, EngineError])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_abort_ends_all_ranks_with_its_error(rank, kind):
    with running(3) as job:
        waiting = submit(job.engines[0], ones(job.engines[0]), "pending")
        job.engines[rank].abort(kind("the cat pulled the plug"))
        assert isinstance(outcome(lambda: wait(job.engines[0], waiting)), kind)
        all_raise(job, kind, "the cat pulled the plug")


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("step", [0, 3])
def test_a_fault_of_a_backend_is_raised_on_all_ranks(rank, step):
    def body(engine):
        for _ in range(step + 2):
            run(engine, ones(engine), "x")

    with running(3, faults={(rank, step): HorovodInternalError("injected")}) as job:
        errors = job.outcomes(body)
        assert [(type(error), str(error)) for error in errors] == [(HorovodInternalError, "injected")] * 3
        assert job.group.fired == {(rank, step): 1}
        all_raise(job, HorovodInternalError, "injected")


def test_a_rank_that_has_the_reason_sends_it_as_its_only_answer(monkeypatch):
    """Rank 0 takes a rank that answers first for one without a reason, if the reason is late."""

    def break_off_later(error):
        until(job.channels[1].peek)  # the question of rank 0
        break_off(error)

    heard = []
    with running(2, faults={(1, 0): HorovodInternalError("injected")}) as job:
        break_off = job.engines[1]._ends.break_off
        monkeypatch.setattr(job.engines[1]._ends, "break_off", break_off_later)
        job.engines[1].events.subscribe(heard.append)
        errors = job.outcomes(lambda engine: run(engine, ones(engine), "x"))
    assert [str(error) for error in errors] == ["injected"] * 2
    assert {event.message for event in heard if isinstance(event, Sent)} == {"Ready", "Abort"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_foreign_error_is_a_bug_of_ours_and_keeps_its_cause(rank, caplog):
    with running(3, faults={(rank, 0): KeyError("oops")}) as job:
        errors = job.outcomes(lambda engine: run(engine, ones(engine), "x"))
        assert [type(error) for error in errors] == [EngineError] * 3
        assert {str(error) for error in errors} == {f"rank {rank}: unexpected KeyError: 'oops'"}
        assert isinstance(errors[rank].__cause__, KeyError)
    assert "unexpected error in the engine" in caplog.text


def test_a_destination_that_cannot_be_made_ends_the_job(caplog):
    def body(engine):
        def destination(shape):
            raise MemoryError("no room")

        source = as_buffer(ones(engine))
        request = Request("x", Operation.ALLREDUCE, source.dtype, source.shape)
        engine.run(request, source, destination if engine.topology.rank == 1 else source)

    with running(2) as job:
        assert {str(error) for error in job.outcomes(body)} == {"no memory for the result (3,) of 'x': no room"}


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("busy", [False, True])
def test_a_rank_that_vanishes_is_named_on_the_survivors(rank, busy):
    with running(3) as job:
        if busy:
            survivors = [engine for engine in job.engines if engine.topology.rank != rank]
            threads = [Caller(engine) for engine in survivors]
        job.vanish(rank)
        if busy:
            errors = [caller.result() for caller in threads]
        else:
            errors = job.outcomes(lambda engine: run(engine, ones(engine), "x"))
            del errors[rank]
        for error in errors:
            assert type(error) is PeerLostError
            assert f"rank {rank} on host 'host-{rank}' is gone" in str(error)
            assert (error.ranks, error.hosts) == ((rank,), (f"host-{rank}",))


def test_a_rank_that_vanishes_inside_a_backend_is_named():
    """Rank 2 never comes to the meeting of the backends, and then its connection ends."""
    inside, leave = threading.Event(), threading.Event()

    def stay_away():
        inside.set()
        leave.wait(10)

    with running(3, faults={(2, 0): stay_away}) as job:
        callers = [Caller(engine) for engine in job.engines]
        assert inside.wait(10)
        job.vanish(2)
        errors = [caller.result() for caller in callers[:2]]
        leave.set()
        assert {(type(error), "rank 2 on host 'host-2' is gone" in str(error)) for error in errors} == {
            (PeerLostError, True)
        }
        assert isinstance(callers[2].result(), HorovodInternalError)


def test_of_several_ranks_that_vanish_the_first_is_named():
    inside, leave = threading.Event(), threading.Event()

    def stay():
        inside.set()
        leave.wait(PATIENCE)

    with running(3, faults={(0, 0): stay}, wrap=Watched) as job:
        callers = [Caller(engine, "x") for engine in job.engines]
        assert inside.wait(PATIENCE)
        for rank in (1, 2):
            job.vanish(rank)
            until(lambda rank=rank: rank in job.channels[0].lost)
        leave.set()
        assert "rank 1 on host 'host-1' is gone" in str(callers[0].result())
        for caller in callers:
            assert isinstance(caller.result(), HorovodInternalError)


def test_an_abort_does_not_wait_for_the_verdict_of_a_silent_rank_0():
    """The driver of an elastic job knows that the host of rank 0 is gone; an operation is under way."""
    inside, leave = threading.Event(), threading.Event()

    def stay():
        inside.set()
        leave.wait(PATIENCE)

    with running(2, faults={(0, 0): stay}) as job:
        callers = [Caller(engine, "x") for engine in job.engines]
        assert inside.wait(PATIENCE)
        job.engines[1].abort(PeerLostError("world 3 has ended"))
        error = callers[1].result()
        leave.set()
        assert str(error) == "world 3 has ended"
        assert isinstance(callers[0].result(), HorovodInternalError)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("holder", [0, 1])
def test_an_abort_while_a_batch_is_left_to_a_caller(holder, culprit, patience, caplog):
    with running(2, local_size=1000) as job:
        left = submit(job.engines[holder], ones(job.engines[holder]), "x")
        caller = Caller(job.engines[1 - holder], "x")
        until(lambda: job.engines[holder]._loop.has_batches)
        job.engines[culprit].abort(HorovodInternalError("told to stop"))
        assert "told to stop" in str(caller.result())
        assert "told to stop" in str(outcome(lambda: wait(job.engines[holder], left)))
    assert not caplog.records


def test_a_handle_of_an_engine_that_was_replaced():
    with running(2) as job:
        work = submit(job.engines[0], ones(job.engines[0]), "x")
        assert isinstance(outcome(lambda: job.engines[1].synchronize(work)), ShutDownError)


# Signal handlers.


class InterruptedLock:
    """``_lock`` of an engine, whose holder is interrupted once, by ``handler``, before it releases it."""

    def __init__(self, lock, handler):
        self._lock, self._handler = lock, handler

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *_):
        handler, self._handler = self._handler, lambda: None
        handler()
        self._lock.release()


@pytest.mark.parametrize("lock", ["_lock", "_changed"])
def test_a_handler_that_interrupts_a_call_does_not_wait_for_the_end(lock):
    """A thread that holds a lock of the engine calls shutdown(), as a handler on it would."""
    with running(2) as job:
        engine, other = job.engines
        if lock == "_lock":
            engine._works._lock = InterruptedLock(engine._works._lock, engine.shutdown)
            mine = outcome(lambda: submit(engine, ones(engine), "x"))
            mine = outcome(lambda: wait(engine, mine))
        else:
            driving = Caller(engine, "never")
            until(lambda: engine._progress.is_driven_by(driving.ident))
            wait_for = engine._parts.waiters.changed.wait
            engine._parts.waiters.changed.wait = lambda timeout: (engine.shutdown(), wait_for(timeout))
            mine = outcome(lambda: run(engine, ones(engine), "nor this"))
            assert isinstance(driving.result(), ShutDownError)
        assert isinstance(mine, ShutDownError)
        assert isinstance(Caller(other, "x").result(), ShutDownError)
        engine.shutdown()
        assert not engine.is_ending


def test_an_interrupted_caller_leaves_nobody_waiting():
    """Two threads wait for one tensor; the one that drives is interrupted between the decision and the exchange."""

    def interrupt(event):
        if isinstance(event, Started):
            raise KeyboardInterrupt

    def body():
        try:
            wait(engine, work)
        except BaseException as error:  # noqa: BLE001
            caught.append(type(error))

    caught = []
    with running(2, wrap=Watched) as job:
        engine, other = job.engines
        engine.events.subscribe(interrupt)
        work = submit(engine, ones(engine), "x")
        threads = [threading.Thread(target=body) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: {thread.ident for thread in threads} & set(job.channels[0].sleeping))
        assert isinstance(Caller(other, "x").result(), ShutDownError)
        for thread in threads:
            thread.join(PATIENCE)
    assert sorted(error.__name__ for error in caught) == ["KeyboardInterrupt", "ShutDownError"]


def test_an_interrupted_caller_ends_the_job():
    """Like Ctrl-C while the main thread drives, inside a backend."""

    def interrupt():
        raise KeyboardInterrupt

    def body(engine):
        try:
            run(engine, ones(engine), "x")
        except KeyboardInterrupt as error:
            return error

    with running(2, wrap=Watched, faults={(0, 0): interrupt}) as job:
        caller = threading.Thread(target=lambda: caught.append(body(job.engines[0])))
        caught = []
        caller.start()
        until(lambda: caller.ident in job.channels[0].sleeping)
        other = Caller(job.engines[1], "x").result()
        caller.join()
        assert type(other) is ShutDownError
        assert "rank 0 was interrupted by KeyboardInterrupt" in str(other)
        assert [type(error) for error in caught] == [KeyboardInterrupt]


@pytest.mark.filterwarnings("ignore:Exception in thread hvd-engine")
def test_a_communication_thread_that_is_ended_ends_the_job():
    def leave():
        raise SystemExit

    with running(2, faults={(0, 0): leave}) as job:
        works = [submit(engine, ones(engine), "x") for engine in job.engines]
        until(lambda: all(work.done for work in works))
        assert {(type(work.error), str(work.error)) for work in works} == {
            (ShutDownError, "rank 0 was interrupted by SystemExit")
        }


class UnluckyLock:
    """The lock of a driver whose communication thread never finds it free, because callers drive all the time."""

    def __init__(self, driver):
        self._lock, self._unlucky = driver._driving.lock, driver._thread
        self.locked, self.release = self._lock.locked, self._lock.release

    def acquire(self, blocking):
        return threading.current_thread() is not self._unlucky and self._lock.acquire(blocking)


@pytest.mark.parametrize("call", [run, lambda *args: wait(args[0], submit(*args))])
def test_callers_that_drive_all_the_time_hear_messages(call):
    """Rank 0 hears that rank 1 leaves, although no call needs a message."""

    def body(engine):
        for step in itertools.count():
            call(engine, ones(engine), "x")
            steps[engine.topology.rank] = step

    steps = [0, 0]
    with running(2) as job:
        engine, other = job.engines
        callers = [Caller(engine, body=body) for engine in job.engines]
        until(lambda: min(steps) > 100)
        lock, engine._progress._driving.lock = engine._progress._driving.lock, UnluckyLock(engine._progress)
        try:
            other._queue.call(lambda: other._ends._link.tell(Leave("had enough")))
            assert [type(caller.result()) for caller in callers] == [ShutDownError, ShutDownError]
        finally:
            engine._progress._driving.lock = lock


@pytest.fixture
def _hectic():
    """Threads take turns so often that whatever can come between two steps does."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def give_up(job, rank):
    job.engines[rank].abort(HorovodInternalError(f"given up by {rank}"))


ENDINGS = {
    "vanish": (Job.vanish, PeerLostError, "rank {} on host"),
    "abort": (give_up, HorovodInternalError, "given up by {}"),
    "shutdown": (lambda job, rank: job.engines[rank].shutdown(), ShutDownError, "Horovod has been shut down"),
}


@pytest.mark.usefixtures("_hectic")
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_busy_job_that_ends_tells_all_ranks_why(ending):
    for seed in range(40):
        chance = random.Random(seed)
        errors = _end_while_busy(ENDINGS[ending][0], chance.randrange(20), culprit := chance.randrange(3))
        if ending == "vanish":
            del errors[culprit]
        for error in errors:
            assert type(error) is ENDINGS[ending][1], f"seed {seed}: {error!r}"
            assert ENDINGS[ending][2].format(culprit) in str(error), f"seed {seed}"


def _end_while_busy(end, after, culprit):
    """The errors that the callers of three ranks raise when the job is ended after some steps."""

    def body(engine):
        for step in itertools.count():
            run(engine, ones(engine), f"t{step % 7}")
            steps.append(step)

    steps = []
    with running(3) as job:
        callers = [Caller(engine, body=body) for engine in job.engines]
        until(lambda: len(steps) > after)
        end(job, culprit)
        return [caller.result() for caller in callers]
