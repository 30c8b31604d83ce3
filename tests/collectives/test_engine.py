"""Engines of several ranks, as threads of this process."""

import gc
import random
import sys
import threading
import weakref

import numpy as np
import pytest

from collectives.api import (
    DuplicateNameError,
    EngineError,
    HorovodInternalError,
    InvalidRequestError,
    MismatchError,
    Operation,
    PeerLostError,
    ReduceOp,
    Request,
    ShutDownError,
)
from collectives.buffers import as_buffer
from collectives.control.base import Channel
from collectives.events import Failed, Finished, Negotiated, Started, Submitted
from tests.collectives.job import (
    PATIENCE,
    InprocTransport,
    Job,
    SocketTransport,
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


@pytest.fixture(autouse=True, params=[InprocTransport, SocketTransport])
def _transport(request, monkeypatch):
    """Every test of this file runs over both kinds of channel."""
    monkeypatch.setattr(Job, "transport", request.param)


# Every collective.


def check_allreduce(engine, size):
    expected = {ReduceOp.SUM: sum(range(1, size + 1)), ReduceOp.MIN: 1, ReduceOp.MAX: size}
    expected[ReduceOp.AVERAGE] = expected[ReduceOp.SUM] / size
    for op, value in expected.items():
        np.testing.assert_array_equal(run(engine, ones(engine), op=op), np.full(3, float(value)))
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
        ({"operation": Operation.BROADCAST, "root_rank": 7}, "root rank 7"),
    ],
)
def test_a_wrong_call_is_refused_at_once_and_nothing_is_submitted(fields, says):
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


class Caller(threading.Thread):
    """One more caller on a rank, who waits for the sum of a tensor, or does as ``body`` says."""

    def __init__(self, engine, name="never", body=None):
        super().__init__(daemon=True)
        self._body = lambda: body(engine) if body else run(engine, ones(engine), name)
        self._outcome = None
        self.rank = engine.topology.rank
        self.start()

    def run(self):
        self._outcome = outcome(self._body)

    def result(self):
        """What came of it, or the error."""
        self.join(PATIENCE)
        assert not self.is_alive()
        return self._outcome


class Watched(Channel):
    """A channel that knows who sleeps in it, for how long at most, and who was lost."""

    def __init__(self, inner):
        super().__init__(inner.rank, inner.size)
        self._inner = inner
        self.sleeping, self.lost = {}, []
        for name in ("send", "receive", "wake", "close"):
            setattr(self, name, getattr(inner, name))

    @property
    def has_unsent(self):
        return self._inner.has_unsent

    def poll(self, timeout):
        me = threading.get_ident()
        self.sleeping[me] = timeout
        try:
            self._sleep(timeout)
        finally:
            self.sleeping.pop(me, None)

    def _sleep(self, timeout):
        self._inner.poll(timeout)

    def watch(self, on_lost):
        self._inner.watch(lambda rank: (on_lost(rank), self.lost.append(rank)))

    send = receive = wake = close = None


class Greedy(Watched):
    """A channel where callers get hold of each message first, so that it never wakes the communication thread."""

    def __init__(self, inner):
        super().__init__(inner)
        self._woken = threading.Event()
        self.greedy = True
        self.wake = lambda: (self._woken.set(), inner.wake())

    def _sleep(self, timeout):
        if not (self.greedy and threading.current_thread().name.startswith("hvd-engine")):
            super()._sleep(timeout)
        elif self._woken.wait(timeout):
            del self.sleeping[threading.get_ident()]
            self._woken.clear()

    def is_asleep(self):
        """Whether one thread sleeps here, without limit, and nothing is about to wake it."""
        return not self._woken.is_set() and list(self.sleeping.values()) == [None]


@pytest.mark.parametrize("local_size", [1, 1000])
@pytest.mark.parametrize("size", [1, 2])
def test_an_idle_engine_sleeps_until_it_is_woken(size, local_size):
    with running(size, wrap=Watched, local_size=local_size) as job:
        for _ in range(3):
            job.run(lambda engine: run(engine, ones(engine), "x"))
            until(lambda: all(list(channel.sleeping.values()) == [None] for channel in job.channels))


# Ends: polite.


def test_shutting_down_fails_what_is_pending_elsewhere():
    with running(3) as job:
        pending = [submit(engine, ones(engine), "x") for engine in job.engines[:2]]
        job.engines[2].shutdown()
        for engine, work in zip(job.engines, pending, strict=False):
            with pytest.raises(ShutDownError, match="shut down by rank 2"):
                wait(engine, work)
        for engine in job.engines:
            until(lambda engine=engine: isinstance(outcome(lambda: submit(engine, np.ones(1), "y")), ShutDownError))
            with pytest.raises(ShutDownError, match=r"call hvd\.init"):
                run(engine, np.ones(1), "z")


def test_a_waiting_caller_is_told_of_the_shutdown():
    with running(2) as job:
        caller = Caller(job.engines[0])
        job.engines[1].shutdown()
        assert type(caller.result()) is ShutDownError


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


# Ends: not polite.


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
        assert job.groups[0].fired == {(rank, step): 1}
        all_raise(job, HorovodInternalError, "injected")


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
        assert {str(error) for error in job.outcomes(body)} == {"rank 1: unexpected MemoryError: no room"}


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
    """What the callers of three ranks raise when the job is ended after some steps."""

    def body(engine):
        for step in range(10_000):
            run(engine, ones(engine), f"t{step % 7}")
            steps.append(step)

    steps = []
    with running(3) as job:
        callers = [Caller(engine, body=body) for engine in job.engines]
        until(lambda: len(steps) > after)
        end(job, culprit)
        return [caller.result() for caller in callers]


# Events.


def names_of(event):
    return event.names if isinstance(event, Started | Finished) else (event.name,)


def test_events_tell_what_happened_in_order():
    heard = [[], []]

    def body(engine):
        engine.events.subscribe(heard[engine.topology.rank].append)
        engine.barrier()
        works = [submit(engine, ones(engine), name) for name in "ab"]
        for work in works:
            wait(engine, work)
        return outcome(lambda: run(engine, np.ones(3 + engine.topology.rank), "odd"))

    with running(2) as job:
        job.run(body)
    for events in heard:
        for name in "ab":
            story = [event for event in events if name in names_of(event)]
            assert [type(event) for event in story] == [Submitted, Negotiated, Started, Finished]
            assert (story[0].nbytes, story[2].operation, story[2].backend) == (24, "allreduce", "inproc")
            assert story[2].nbytes == 24 * len(story[2].names)
            assert sorted(event.time for event in story) == [event.time for event in story]
        odd = [event for event in events if "odd" in names_of(event)]
        assert [type(event) for event in odd] == [Submitted, Failed]
        assert isinstance(odd[1].error, MismatchError)


def test_what_fails_at_the_end_is_an_event_too():
    heard = []
    with running(2) as job:
        job.engines[0].events.subscribe(heard.append)
        submit(job.engines[0], np.ones(3), "x")
        job.engines[1].shutdown()
        until(lambda: len(heard) == 2)
    assert [type(event) for event in heard] == [Submitted, Failed]
    assert isinstance(heard[1].error, ShutDownError)


def test_a_subscriber_that_raises_is_dropped_and_harms_nobody(caplog):
    def clumsy(event):
        raise KeyError("oops")

    heard = []
    with running(2) as job:
        for engine in job.engines:
            engine.events.subscribe(clumsy)
            engine.events.subscribe(heard.append)
        for _ in range(3):
            job.run(lambda engine: run(engine, ones(engine), "x"))
        assert len([event for event in heard if isinstance(event, Finished)]) == 6
    assert caplog.text.count("is removed") == 2


def test_a_job_is_made_of_any_number_of_engines_in_one_process():
    """Two jobs side by side do not meet."""
    first, second = Job(2), Job(2)
    try:
        assert first.run(lambda engine: run(engine, ones(engine), "x")[0]) == [3.0] * 2
        first.shutdown()
        assert second.run(lambda engine: run(engine, ones(engine), "x")[0]) == [3.0] * 2
    finally:
        first.shutdown(), second.shutdown()
