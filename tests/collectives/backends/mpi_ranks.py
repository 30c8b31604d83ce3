"""The ranks of test_mpi.py: ``python -m tests.collectives.backends.mpi_ranks NAME``. They end with the line "done"."""

import itertools
import os
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from collectives.api import CollectiveTimeoutError, DType, HorovodInternalError, ReduceOp, SettingsError, Topology
from collectives.backends import registry
from collectives.backends.mpi import MpiBootstrap, transport
from collectives.backends.mpi.library import start_mpi
from collectives.kernels.reduction import reduction
from collectives.net.attempts import ConnectAttempt
from collectives.settings import Settings
from tests.collectives.backends import matrix
from tests.collectives.backends.members import group_of
from tests.collectives.engine.job import until

SECONDS = 60.0
MPI = start_mpi(SECONDS, os.environ.get("HOROVOD_MPI_THREADS_DISABLE") != "1")
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()


def exchanged(offer, members):
    """The offers of ``members``, by messages of the script."""
    others = [member for member in members if member != RANK]
    sent = [WORLD.isend(offer, member, 1) for member in others]
    offers = [offer if member == RANK else WORLD.recv(source=member, tag=1) for member in members]
    MPI.Request.waitall(sent)
    return offers


def connected(members=range(SIZE), timeout=SECONDS, seconds=SECONDS):
    bootstrap = MpiBootstrap(group_of(len(members), list(members).index(RANK)), timeout)
    with ConnectAttempt(seconds) as attempt:
        return bootstrap.connect(exchanged(bootstrap.offer, members), attempt)


def everything():
    """The whole matrix; then the operations of long arrays in many messages, and groups of some of the ranks."""
    with ExitStack() as stack:
        backend = connected()
        stack.callback(backend.close)
        matrix.run_matrix(backend, RANK, SIZE)
        if SIZE == 2:
            transport.LARGEST, transport.MOST_COUNTED = 100_000, 10_000
            matrix.check_allreduce_large(backend)
            matrix.check_broadcast(backend)
            matrix.check_alltoall(backend)
        if RANK < SIZE - 1 and SIZE > 2:
            some = connected(range(SIZE - 1))
            stack.callback(some.close)
            matrix.check_allgather(some)
        if RANK % 2 == 0:
            some = connected(range(0, SIZE, 2))
            stack.callback(some.close)
            matrix.check_barrier(some)
        if SIZE == 4:
            matrix.check_allreduce(staged(stack))
        matrix.check_barrier(backend)


def staged(stack):
    """The backend of two hosts with two ranks each. Open MPI's allreduce would be slow between them."""
    topology = Topology(RANK, 4, RANK % 2, 2, RANK // 2, 2, hosts=("a", "a", "b", "b"), cores=2)
    bootstrap, _ = registry.prepare(range(4), topology, Settings(cpu_operations="mpi"), "127.0.0.1")
    with ConnectAttempt(SECONDS) as attempt:
        backend = bootstrap.connect(exchanged(bootstrap.offer, range(4)), attempt)
    stack.callback(backend.close)
    assert [part.name for part in backend._parts] == ["mpi"] * 3
    is_fast_across = MPI.get_vendor()[0] != "Open MPI"
    reduces = [part._transport.reduces(DType.FLOAT32, ReduceOp.SUM) for part in backend._parts]
    assert reduces == [True, is_fast_across, is_fast_across]
    return backend


def late_peer():
    """A member that does not come ends the attempt of the others. What they have sent does not disturb the next one."""
    first = MpiBootstrap(group_of(SIZE, RANK), SECONDS)
    offers = exchanged(first.offer, range(SIZE))
    if RANK:
        with ConnectAttempt(0.2) as attempt, pytest.raises(CollectiveTimeoutError, match="did not connect to MPI with"):
            first.connect(offers, attempt)
        error = HorovodInternalError("told to stop")
        with ConnectAttempt(SECONDS) as attempt:
            threading.Timer(0.1, attempt.abort, (error,)).start()
            with pytest.raises(HorovodInternalError) as caught:
                first.connect(offers, attempt)
            assert caught.value is error
    backend = connected()
    matrix.check_allreduce(backend)
    backend.close()


def abort():
    """Rank 0 is aborted in operations that the others do not join. Nobody may use MPI any more, nor waits for it."""
    backends = [connected() for _ in range(2)]
    backends[1].barrier()
    if RANK == 0:
        for backend, length in zip(backends, (10, 1_000_000), strict=True):
            matrix.abort_from_thread(backend, np.ones(length, np.float32))
        with pytest.raises(SettingsError, match=r"MPI cannot be used again in this process \(told to stop\); start"):
            MpiBootstrap(group_of(SIZE, RANK), SECONDS)
    WORLD.barrier()  # mpirun ends the others when the first of them ends
    for backend in backends:
        backend.abort(HorovodInternalError("rank 0 has ended"))
        backend.close()


def silence():
    """The timeout names the ranks that may be late."""
    backends = [connected(timeout=0.3) for _ in range(3)]
    backends[2].barrier()
    if RANK == 0:
        late = "ranks 1, 2 on host 'a'" if SIZE > 2 else "rank 1 on host 'a'"
        text = rf"{late} did not answer in time \(no message of MPI has ended for 0\.\d s\)"
        for backend, length in zip(backends, (0, 10, 1_000_000), strict=True):
            with pytest.raises(CollectiveTimeoutError, match=text) as caught:
                reduce(backend, length) if length else backend.barrier()
            assert caught.value.ranks == tuple(range(1, SIZE))
    WORLD.barrier()  # mpirun ends the others when the first of them ends
    for backend in backends:
        backend.abort(HorovodInternalError("rank 0 has ended"))
        backend.close()


def reduce(backend, length):
    values = np.ones(length, np.float32)
    backend.allreduce_arrays([values], [values], reduction(DType.FLOAT32, ReduceOp.SUM))


def waits():
    """A member that waits calls ``on_wait`` again and again: rank 0 comes after the third call of the other one."""
    backend, calls, called = connected(), itertools.count(1), Path.home() / "called"
    if RANK == 0:
        until(called.exists)
    else:
        backend.attend(lambda: next(calls) == 3 and called.touch())
    backend.barrier()
    backend.close()


def loss():
    """Rank 1 is killed; mpirun ends the others, who wait."""
    backend = connected()
    backend.barrier()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    matrix.reduce_until_error(backend, 1000, SECONDS)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    os.write(1, b"done\n")
