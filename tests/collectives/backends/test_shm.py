"""The shared-memory backend: real processes where processes matter, threads where they do not."""

import functools
import gc
import os
import secrets
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from collectives.api import (
    CollectiveTimeoutError,
    DType,
    HorovodInternalError,
    PeerLostError,
    ReduceOp,
    Topology,
    World,
)
from collectives.backends.base import Group
from collectives.backends.shm import ShmBootstrap
from collectives.backends.shm.segment import SegmentSource, receive_segment
from collectives.engine import start
from collectives.events import Started
from collectives.kernels.reduction import reduction
from collectives.net.attempts import ConnectAttempt
from collectives.settings import Settings
from collectives.store.memory import MemoryStore, PrefixStore
from collectives.store.server import RendezvousServer
from tests.collectives.backends.matrix import abort_from_thread, reduce_until_error, run_matrix
from tests.collectives.backends.members import Processes, group_of, in_threads
from tests.collectives.backends.offers import meet
from tests.collectives.engine.job import PATIENCE, ones, outcome, run, total

TIMEOUT = 20.0


def connect(group, store, timeout):
    """The backend of a member of a group that has ``store`` for itself; ``timeout`` bounds its operations."""
    return meet(ShmBootstrap(group, timeout, crowded=False), store, TIMEOUT)


def mappings():
    """How many pieces of shared memory this process has mapped."""
    with open("/proc/self/maps") as lines:
        return sum("memfd:hvd-cluster" in line for line in lines)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


# Processes.


@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes(size):
    """One launch for all that needs real processes but no death, because starting them takes longest."""
    with Processes(size, _work_in_a_process) as processes:
        results = [processes.hear(rank, 5 * PATIENCE) for rank in range(size)]
        for rank, (memories, left, names) in enumerate(results):
            assert (rank, memories, left) == (rank, 1, (0, 0))
            assert not [name for name in names if name.startswith("hvd")]


def _work_in_a_process(member):
    backend = connect(group_of(member.size, member.rank), PrefixStore(member.store, "matrix"), TIMEOUT)
    memories = mappings()
    run_matrix(backend, member.rank, member.size)
    backend.close()
    names = os.listdir("/dev/shm")
    before = descriptors()
    for number in range(100):
        backend = connect(group_of(member.size, member.rank), PrefixStore(member.store, f"again-{number}"), TIMEOUT)
        backend.barrier()
        backend.close()
    return memories, (mappings(), descriptors() - before), names


@pytest.mark.parametrize(
    ("moment", "victim"), [("busy", 0), ("busy", 2), ("inside", 0), ("inside", 1), ("idle", 0), ("idle", 2)]
)
def test_a_killed_rank_is_named_on_the_survivors(moment, victim):
    """Killed amid allreduces; after all agreed on one, while the others wait inside the backend; before it submits."""
    secret = secrets.token_bytes(16)
    shared = set(os.listdir("/dev/shm"))
    with RendezvousServer(secret) as server:
        body = functools.partial(_reduce_until_error, server.port, secret, victim, moment)
        with Processes(3, body) as processes:
            for rank in range(3):
                assert processes.hear(rank) == "started"
            assert processes.hear(victim, PATIENCE) == "ready to die"
            processes.kill(victim)
            for rank in {0, 1, 2} - {victim}:
                kind, text, left, deaths = processes.hear(rank, PATIENCE)
                assert deaths in ([], [(victim,)])
                assert (kind, left) == ("PeerLostError", 0)
                assert f"rank {victim} on host 'node' is gone" in text
    assert not {name for name in os.listdir("/dev/shm") if name.startswith("hvd")} - shared


def test_a_rank_is_lost_although_a_process_that_it_started_keeps_its_connections(tmp_path):
    os.mkfifo(tmp_path / "end")
    secret = secrets.token_bytes(16)
    with RendezvousServer(secret) as server:
        body = functools.partial(_reduce_until_error, server.port, secret, 1, tmp_path / "end")
        with Processes(3, body) as processes:
            for rank in range(3):
                assert processes.hear(rank) == "started"
            assert processes.hear(1, PATIENCE) == "ready to die"
            processes.kill(1)
            try:
                errors = [processes.hear(rank, PATIENCE) for rank in (0, 2)]
            finally:
                open(tmp_path / "end", "w").close()
    text = "rank 1 on host 'node' is gone: its process ended; look at the output of that rank"
    assert [error[:3] for error in errors] == [("PeerLostError", text, 0)] * 2
    # A rank that hears of the loss from the other one first does not report the death again.
    assert {str(error[3]) for error in errors} in ({"[(1,)]"}, {"[]", "[(1,)]"})


def _keep_connections(end):
    """In a process of its own, until somebody opens and closes the pipe ``end``."""
    if os.fork() == 0:
        with open(end) as file:
            file.read()
        os._exit(0)


def _reduce_until_error(port, secret, victim, moment, member):
    topology = Topology(member.rank, member.size, member.rank, member.size, hosts=(), cores=0)
    world = World(topology=topology, host="node", rendezvous=("127.0.0.1", port))
    engine = start.connect(world, Settings(secret=secret))
    np.testing.assert_array_equal(run(engine, ones(engine)), total(member.size))
    deaths = []
    engine.on_death(lambda error: deaths.append(error.ranks))
    member.tell("started")
    if member.rank == victim:
        _prepare_to_die(engine, moment, member)
    error = outcome(lambda: _reduce_for_ever(engine))
    engine.shutdown()
    kind, text = type(error).__name__, str(error)
    del error  # its traceback may hold views of the shared memory
    gc.collect()
    return kind, text, mappings(), deaths


def _prepare_to_die(engine, moment, member):
    def stay(event):
        if isinstance(event, Started):
            member.tell("ready to die")
            threading.Event().wait()

    if moment == "inside":
        engine.events.subscribe(stay)
        return
    if isinstance(moment, Path):
        _keep_connections(moment)
    member.tell("ready to die")
    if moment != "busy":
        threading.Event().wait()


def _reduce_for_ever(engine):
    while True:
        run(engine, ones(engine, 300_000))


# Members as threads.


def with_backends(size, body, timeout=TIMEOUT):
    """``body(backend)`` on a thread of each member."""

    def work(rank):
        backend = connect(group_of(size, rank), store, timeout)
        try:
            return body(backend)
        finally:
            backend.close()

    store = MemoryStore()
    return in_threads(size, work)


@pytest.mark.parametrize("length", [8, 1_000_000])
def test_abort_from_another_thread(length):
    def body(backend):
        if backend.rank == 0:
            abort_from_thread(backend, np.ones(length, np.float32))
        done.wait(TIMEOUT)

    done = threading.Barrier(2)
    with_backends(2, body)


def test_an_abort_before_the_call_and_after_the_end():
    def body(backend):
        error = HorovodInternalError("told to stop")
        backend.abort(error)
        backend.abort(HorovodInternalError("too late"))
        assert outcome(backend.barrier) is error
        backend.close()
        backend.close()
        backend.abort(error)

    with_backends(2, body)


@pytest.mark.parametrize("length", [8, 1_000_000])
def test_all_silent_members_are_named_and_no_others(length):
    """By their global ranks; the other members come to the same operation."""

    def body(position):
        backend = connect(Group((2, 3, 5, 7), position, tuple("aaaa")), store, 1.0)
        come.wait(TIMEOUT)
        if position in (0, 2):
            error = reduce_until_error(backend, length, 20)
            assert isinstance(error, CollectiveTimeoutError)
            assert "ranks 3, 7 on host 'a' did not enter the operation within 1 s" in str(error)
            assert error.ranks == (3, 7)
        done.wait(TIMEOUT)
        backend.close()

    store, come, done = MemoryStore(), threading.Barrier(4), threading.Barrier(4)
    in_threads(4, body)


def test_a_view_in_a_traceback_does_not_keep_a_backend_from_closing():
    def body(backend):
        buffer = backend._buffers.next(DType.UINT8)[0]
        backend.barrier()
        backend.close()
        return buffer

    gc.collect()  # what other tests kept
    before = mappings()
    buffers = with_backends(2, body)
    assert mappings() > before
    del buffers
    gc.collect()
    assert mappings() == before


def test_a_segment_is_zeroed_and_common():
    def body(rank):
        segment = share(source, group_of(3, rank), TIMEOUT)
        assert not segment.array.any()
        come.wait(TIMEOUT)
        segment.array[rank] = rank + 1
        come.wait(TIMEOUT)
        assert segment.array[:4].tolist() == [1, 2, 3, 0]
        segment.close()

    source, come = SegmentSource(100, 3), threading.Barrier(3)
    in_threads(3, body)
    source.close()


def share(source, group, timeout):
    """The segment of ``source``, for any member of ``group``."""
    with ConnectAttempt(timeout) as attempt:
        return (
            receive_segment(source.address, 100, group, attempt) if group.position else source.hand_out(group, attempt)
        )


def test_ranks_that_do_not_fetch_the_memory_are_named():
    source = SegmentSource(100, 3)
    with pytest.raises(CollectiveTimeoutError, match=r"ranks 1, 2 on host '.*' did not fetch the shared memory"):
        share(source, group_of(3), 0.05)
    source.close()


def test_a_first_rank_that_does_not_hand_out_the_memory_or_went_away():
    source, group = SegmentSource(100, 2), group_of(2, 1)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 on host '.*' did not hand out the shared memory in time"):
        share(source, group, 0.05)
    source.close()
    with pytest.raises(PeerLostError, match="the shared memory cannot be fetched from rank 0 on host") as caught:
        share(source, group, 0.05)
    assert caught.value.ranks == (0,)


def test_a_lack_of_descriptors_is_no_lost_rank(monkeypatch):
    """The kernel drops a descriptor that comes where none is left, and says so in a flag; see recvmsg(2)."""

    def body(rank):
        return outcome(lambda: share(source, group_of(2, rank), TIMEOUT))

    monkeypatch.setattr(socket, "recv_fds", lambda *_: (b"m", [], socket.MSG_CTRUNC, None))
    source = SegmentSource(100, 2)
    segment, error = in_threads(2, body)
    source.close()
    segment.close()
    assert type(error) is HorovodInternalError
    assert "no file descriptor is left; raise the limit of ulimit -n" in str(error)


def test_a_rank_that_leaves_while_it_is_handed_the_memory_is_not_counted(monkeypatch):
    def hand_out(connection, *arguments):
        if not attempts:
            attempts.append(connection)
            raise BrokenPipeError
        return send_fds(connection, *arguments)

    def body(rank):
        return outcome(lambda: share(source, group_of(2, min(rank, 1)), TIMEOUT).close())

    attempts, send_fds, source = [], socket.send_fds, SegmentSource(100, 2)
    monkeypatch.setattr(socket, "send_fds", hand_out)
    first, *others = in_threads(3, body)
    source.close()
    assert first is None
    assert sorted(type(other) for other in others if other) == [PeerLostError]


@pytest.mark.parametrize("length", [1, 100_000])
@pytest.mark.parametrize("count", [1, 2])
def test_an_overflow_is_no_warning_and_the_state_of_the_caller_stays(length, count):
    """Warnings are errors in these tests."""

    def body(backend):
        with np.errstate(over="raise"):
            arrays = [np.full(length, np.finfo(np.float32).max) for _ in range(count)]
            backend.allreduce_arrays(arrays, arrays, reduction(DType.FLOAT32, ReduceOp.SUM))
            return np.geterr()["over"], all(np.isinf(array).all() for array in arrays)

    assert with_backends(2, body) == [("raise", True)] * 2


def test_reductions_of_many_small_arrays_are_one_exchange():
    def body(backend):
        epoch = backend._barrier._epoch
        arrays = [np.full(length, backend.rank + 1.0) for length in (3, 0, 5, 1)]
        backend.allreduce_arrays(arrays, arrays, reduction(DType.FLOAT64, ReduceOp.SUM))
        assert all((array == 3.0).all() for array in arrays)
        return backend._barrier._epoch - epoch

    assert with_backends(2, body) == [1, 1]


def pieces(array, *ends):
    """``array`` as a list of arrays: up to each of ``ends``, and the rest; between two equal ends lies an empty one."""
    return np.split(array, ends)


def test_gathers_of_several_arrays_are_one_exchange():
    """More than a round, with empty arrays, cut differently on each side."""

    def body(backend):
        epoch = backend._barrier._epoch
        start, result = sum(counts[: backend.rank]), np.zeros_like(expected)
        mine = expected[start : start + counts[backend.rank]]
        backend.allgather_bytes(pieces(mine, 5, 5, 7), pieces(result, 3, 3, 1_400_000, 1_400_010), counts)
        assert (result == expected).all()
        return backend._barrier._epoch - epoch

    counts = [1_400_007, 10, 13]
    expected = np.random.default_rng(1).integers(0, 256, sum(counts), np.uint8)
    assert with_backends(3, body) == [2, 2, 2]


def test_scattered_reductions_of_several_arrays_are_one_exchange():
    def body(backend):
        epoch = backend._barrier._epoch
        values = np.arange(sum(counts), dtype=np.float64)
        result = np.full(counts[backend.rank], np.nan)
        sources, destinations = pieces(values * (backend.rank + 1), 2, 2, 70_000), pieces(result, 0, 2, 3, 3)
        backend.reducescatter_arrays(sources, destinations, counts, reduction(DType.FLOAT64, ReduceOp.SUM))
        start = sum(counts[: backend.rank])
        assert (result == 6.0 * values[start : start + counts[backend.rank]]).all()
        return backend._barrier._epoch - epoch

    counts = [80_000, 3, 70_000]
    assert with_backends(3, body) == [2, 2, 2]


LENGTHS = (10, 1_000_000, 10, 10, 10, 700_000, 20, 100_000, 100_000, 10, 100_000, 10, 10, 100_000, 1_000_000, 100_000)
"""Of float32: up to 8,192 are everybody's, up to 262,144 one round."""


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_as_far_ahead_as_the_gate_lets_it_overwrites_nothing(slow, gathers):
    """One rank begins nothing after a barrier before the other has done all it can and sleeps at the next one."""

    def body(backend):
        if backend.rank == slow:
            _hold_back(backend._barrier, 1 - slow, finished)
        for number, length in enumerate(LENGTHS):
            values = np.full(length, number + backend.rank, np.float32)
            backend.allreduce_arrays([values], [values], reduction(DType.FLOAT32, ReduceOp.SUM))
            assert (values == 2 * number + 1).all(), (number, length)
            if not gathers:
                continue
            everybody = np.empty(2 * length, np.float32)
            mine = values + backend.rank
            backend.allgather_bytes([mine.view(np.uint8)], [everybody.view(np.uint8)], [mine.nbytes] * 2)
            assert (everybody == np.repeat([2 * number + 1, 2 * number + 2], length)).all(), (number, length)
        if backend.rank != slow:
            finished.set()

    finished = threading.Event()
    with_backends(2, body)


def _hold_back(barrier, other, finished):
    def wait_longer():
        wait()
        while not finished.is_set() and (barrier._words[other * 8] == barrier._epoch or not barrier._flags[other]):
            finished.wait(0.0001)

    wait, barrier.wait = barrier.wait, wait_longer
