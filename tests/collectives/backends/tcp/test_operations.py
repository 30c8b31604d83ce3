"""All operations of a TCP group, with short and long data, and how much memory they take."""

from __future__ import annotations

import os
import socket
import threading
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from collectives.api import DType, PeerLostError, ReduceOp
from collectives.backends.tcp import TcpBackend
from collectives.kernels.reduction import reduction
from collectives.store.memory import MemoryStore
from tests.collectives.backends import offers
from tests.collectives.backends.matrix import abort_from_thread, reduce_until_error, run_matrix
from tests.collectives.backends.members import Member, Processes, group_of
from tests.collectives.backends.tcp.groups import connect, join, with_backends


@pytest.mark.parametrize("size", [2, 3])
def test_processes(size):
    """One launch for all that needs real processes but no death, because starting them takes longest."""
    with Processes(size, _work_in_a_process) as processes:
        assert processes.results() == ["done"] * size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_threads(size):
    with_backends(size, lambda backend: run_matrix(backend, backend.rank, size))


@pytest.mark.parametrize("size", [2, 3])
def test_many_pieces(size, monkeypatch):
    """Nothing is small, packed tensors go in pieces, and no piece is long."""
    monkeypatch.setattr("collectives.backends.tcp.backend.DIRECT", 0)
    monkeypatch.setattr("collectives.backends.tcp.backend.PIECE", 1 << 10)
    monkeypatch.setattr("collectives.backends.tcp.transport.CHAIN", 4)
    monkeypatch.setattr("collectives.backends.tcp.transport.CHAIN_PIECE", 1 << 12)
    monkeypatch.setattr("collectives.backends.tcp.reducing.PIECE", 1 << 12)
    monkeypatch.setattr("collectives.backends.tcp.reducing.LEAST_PIECE", 1 << 12)
    with_backends(size, lambda backend: run_matrix(backend, backend.rank, size))


def test_a_tiny_buffer_of_the_kernel(monkeypatch):
    """So that most calls send and receive a part only."""

    def connect_narrowly(rank: int) -> TcpBackend:
        backend = connect(group_of(3, rank), store)
        for link in backend._tcp._links.values():
            link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return backend

    def body(backend: TcpBackend) -> None:
        for length in (5, 100_001):
            values = np.full(length, backend.rank, np.int64)
            backend.allreduce_arrays([values], [values], reduction(DType.INT64, ReduceOp.SUM))
            assert (values == 3).all()
            result = np.empty(3 * length, np.uint8)
            backend.allgather_bytes([np.full(length, backend.rank, np.uint8)], np.split(result, 3), [length] * 3)
            assert (result.reshape(3, length) == [[0], [1], [2]]).all()

    store = MemoryStore()
    offers.with_backends(3, connect_narrowly, body)


@pytest.mark.parametrize("operation", ["allreduce", "packed", "reducescatter", "allgather", "broadcast"])
def test_memory_is_bounded(operation, monkeypatch):
    """By some pieces, whatever the tensors have; there are two members in this process."""

    def body(backend: TcpBackend) -> None:
        backend.barrier()
        operations[operation](backend)

    def allgather(backend: TcpBackend) -> None:
        result = results[backend.rank]
        half = np.split(result, 2)[backend.rank]
        backend.allgather_bytes([half], [result[:5], result[5:]], [total // 2] * 2)

    monkeypatch.setattr("collectives.backends.tcp.backend.PIECE", 1 << 20)
    total = 1 << 25
    results = [np.zeros(total, np.uint8) for _ in range(2)]
    floats = [each.view(np.float32) for each in results]
    kept = [np.zeros(total // 8, np.float32) for _ in range(2)]
    operations: dict[str, Callable[[TcpBackend], None]] = {
        "allreduce": lambda backend: backend.allreduce_arrays(
            *[[results[backend.rank].view(np.uint16)]] * 2, reduction(DType.BFLOAT16, ReduceOp.SUM)
        ),
        "packed": lambda backend: backend.allreduce_arrays(
            *[np.split(floats[backend.rank], 1 << 13)] * 2, reduction(DType.FLOAT32, ReduceOp.SUM)
        ),
        "reducescatter": lambda backend: backend.reducescatter_arrays(
            [floats[backend.rank]], [kept[backend.rank]], [total // 8] * 2, reduction(DType.FLOAT32, ReduceOp.SUM)
        ),
        "allgather": allgather,
        "broadcast": lambda backend: backend.broadcast_bytes(*[results[backend.rank]] * 2, 1),
    }
    tracemalloc.start()
    try:
        with_backends(2, body)
        assert tracemalloc.get_traced_memory()[1] < total // 2
    finally:
        tracemalloc.stop()


def test_a_hundred_groups_leave_nothing():
    threads = set(threading.enumerate())
    descriptors = os.listdir("/proc/self/fd")
    for _ in range(100):
        with_backends(2, TcpBackend.barrier)
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def _work_in_a_process(member: Member) -> str:
    backend = join(member, "matrix")
    run_matrix(backend, member.rank, member.size)
    backend.close()
    backend = join(member, "abort")
    member.meet_others("connected")
    if member.rank == 0:
        abort_from_thread(backend, np.ones(1_000_000, np.float32))
    member.meet_others("aborted")
    if member.rank:
        assert isinstance(reduce_until_error(backend, 1_000_000, 20), PeerLostError)
    backend.close()
    return "done"
