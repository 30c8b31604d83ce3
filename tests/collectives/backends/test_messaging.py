"""The algorithms over messages, on a transport that can only send and receive."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from collectives.api import CollectiveTimeoutError, DType, ReduceOp, ShutDownError
from collectives.backends.messaging import DIRECT, MessagingBackend
from collectives.kernels.reduction import reduction
from tests.collectives.backends.matrix import abort_from_thread, run_matrix, shorten
from tests.collectives.backends.members import group_of, in_threads
from tests.collectives.backends.queues import Queues, QueueTransport
from tests.collectives.kernels.reductions import reduce_arrays


class Reducing(QueueTransport):
    """A transport that sums float64 itself, in the order of the members."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.reduced = 0

    def reduces(self, dtype: DType, op: ReduceOp) -> bool:
        return dtype is DType.FLOAT64 and op is ReduceOp.SUM

    def allreduce(self, array: np.ndarray, op: ReduceOp) -> None:
        self.reduced += 1
        everything = np.empty(array.size * self.group.size, array.dtype)
        self.allgather(array.view(np.uint8), everything.view(np.uint8))
        reduce_arrays(array, [*everything.reshape(self.group.size, array.size)], DType.FLOAT64, op)


def with_backends(size: int, body: Callable[[MessagingBackend], object], kind: type = QueueTransport) -> Queues:
    queues = Queues()
    in_threads(size, lambda rank: body(MessagingBackend(kind(group_of(size, rank), queues))))
    return queues


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_matrix(size, monkeypatch):
    shorten(monkeypatch, *(f"collectives.backends.messaging.{name}" for name in ("DIRECT", "ALONE", "PIECE")))
    with_backends(size, lambda backend: run_matrix(backend, backend.rank, size))


def test_many_pieces(monkeypatch):
    shorten(monkeypatch, "collectives.backends.messaging.DIRECT")
    monkeypatch.setattr("collectives.backends.messaging.PIECE", 1)
    with_backends(3, lambda backend: run_matrix(backend, backend.rank, 3))


def test_what_the_transport_reduces_is_left_to_it():
    def body(backend: MessagingBackend) -> None:
        run_matrix(backend, backend.rank, 3)
        reduced = backend._transport.reduced
        assert reduced
        small = np.ones(DIRECT // 8)
        backend.allreduce_arrays([small], [small], reduction(DType.FLOAT64, ReduceOp.SUM))
        assert backend._transport.reduced == reduced
        large = np.ones(DIRECT // 8 + 1)
        backend.allreduce_arrays([large], [large], reduction(DType.FLOAT64, ReduceOp.SUM))
        assert backend._transport.reduced == reduced + 1

    with_backends(3, body, Reducing)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("root", [0, 1])
def test_a_broadcast_sends_each_member_one_message(size, root):
    def body(backend: MessagingBackend) -> None:
        data = np.full(7, backend.rank, np.uint8)
        backend.broadcast_bytes(data, data, root)
        assert (data == root).all()

    queues = with_backends(size, body)
    assert queues.messages.total() == size - 1
    assert max(queues.messages.values()) == queues.messages[root] == (size - 1).bit_length()


def test_nobody_passes_a_barrier_before_all_have_come():
    def body(backend: MessagingBackend) -> None:
        for step in range(20):
            come[backend.rank] = step
            backend.barrier()
            assert min(come) >= step
            backend.barrier()

    come = [-1] * 5
    with_backends(5, body)


def test_an_allreduce_in_slices_sends_each_element_twice():
    """2 S (P - 1) / P bytes from each member."""
    count = 300_000

    def body(backend: MessagingBackend) -> None:
        values = np.ones(count, np.float32)
        backend.allreduce_arrays([values], [values], reduction(DType.FLOAT32, ReduceOp.SUM))

    assert with_backends(3, body).bytes == dict.fromkeys(range(3), 2 * 4 * count * 2 // 3)


def test_abort_close_and_a_silent_member():
    backend = MessagingBackend(QueueTransport(group_of(2), Queues()))
    abort_from_thread(backend, np.ones(3, np.float32))
    closed = MessagingBackend(QueueTransport(group_of(2), Queues()))
    closed.close()
    closed.close()
    empty = np.empty(0, np.uint8)
    for call in (closed.barrier, lambda: closed.broadcast_bytes(empty, empty, 0)):
        with pytest.raises(ShutDownError):
            call()
    waiting = MessagingBackend(QueueTransport(group_of(3, 1), Queues(), 0.05))
    with pytest.raises(CollectiveTimeoutError, match="rank 0 on host 'a' sent nothing"):
        waiting.barrier()
