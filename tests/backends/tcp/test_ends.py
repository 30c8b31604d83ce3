"""Members of a TCP group that are lost, late, aborted or closed."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError, ShutDownError
from collectives.backends.tcp import TcpBackend
from collectives.backends.tcp.pump import SLICE_SECONDS
from tests.backends.matrix import abort_from_thread, reduce_until_error
from tests.backends.members import Member, Processes
from tests.backends.tcp.groups import LENGTHS, join, with_backends

EMPTY = np.empty(0, np.uint8)


def test_killed_member():
    with Processes(3, _reduce_until_error) as processes:
        for rank in range(3):
            assert processes.hear(rank) == "reducing"
        processes.kill(1)
        assert [processes.hear(rank)[0] for rank in (0, 2)] == ["PeerLostError"] * 2


def test_stopped_member():
    """It is named by a member that still misses its data, and by none as the only one that may be late."""
    with Processes(3, _reduce_until_late) as processes:
        for rank in range(3):
            assert processes.hear(rank) == "reducing"
        processes.stop(1)
        errors = [processes.hear(rank) for rank in (0, 2)]
        assert "CollectiveTimeoutError" in [kind for kind, _ in errors]
        assert all(1 in ranks for kind, ranks in errors if kind == "CollectiveTimeoutError")


@LENGTHS
def test_abort_reaches_members_that_do_not_talk_to_the_aborted_one(length):
    def body(backend: TcpBackend) -> None:
        if backend.rank == 2:
            abort_from_thread(backend, np.ones(length, np.float32))
        elif backend.rank:  # Rank 0 takes no part, so that nobody can finish.
            assert isinstance(reduce_until_error(backend, length, 20), PeerLostError)
        left.wait(20)

    left = threading.Barrier(4)
    with_backends(4, body)


@LENGTHS
def test_silent_member(length):
    def body(backend: TcpBackend) -> None:
        if backend.rank == 0:
            error = reduce_until_error(backend, length, 20)
            assert isinstance(error, CollectiveTimeoutError)
            assert str(error).startswith("rank 1 on host 'a' did not answer in time")
            assert error.ranks == (1,)
            with pytest.raises(CollectiveTimeoutError):
                backend.barrier()
        noticed.wait(20)

    noticed = threading.Barrier(2)
    with_backends(2, body, timeout=0.5)


def test_a_member_that_does_not_read_is_late():
    """The data is more than the kernel keeps for it."""

    def body(backend: TcpBackend) -> None:
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match="rank 1 on host 'a' did not answer in time") as caught:
                backend.broadcast_bytes(*[np.zeros(1 << 27, np.uint8)] * 2, 0)
            assert caught.value.ranks == (1,)
        noticed.wait(20)

    noticed = threading.Barrier(2)
    with_backends(2, body, timeout=0.5)


def test_abort_before_a_call_and_after_close():
    def body(backend: TcpBackend) -> None:
        error = HorovodInternalError("told to stop")
        backend.abort(error)
        for call in (backend.barrier, lambda: backend.allgather_bytes([EMPTY], [EMPTY], [0, 0])):
            with pytest.raises(HorovodInternalError) as caught:
                call()
            assert caught.value is error
        backend.close()
        backend.abort(error)

    with_backends(2, body)


def test_an_aborted_member_moves_no_data():
    def body(backend: TcpBackend) -> None:
        error = HorovodInternalError("told to stop")
        backend.abort(error)
        with pytest.raises(HorovodInternalError) as caught:
            backend._tcp._pump.flush()
        assert caught.value is error

    with_backends(2, body)


def test_closing_is_idempotent_and_peers_notice():
    def body(backend: TcpBackend) -> None:
        if backend.rank == 0:
            backend.close()
            backend.close()
            with pytest.raises(ShutDownError):
                backend.barrier()
        else:
            error = reduce_until_error(backend, 8, 20)
            assert isinstance(error, PeerLostError)
            assert (error.ranks, error.hosts) == ((0,), ("a",))
            assert "the connection to rank 0 on host 'a' is gone" in str(error)

    with_backends(2, body)


def test_the_last_data_of_a_member_that_closes_arrives():
    def body(backend: TcpBackend) -> None:
        data = np.full(1 << 20, backend.rank, np.uint8)
        if backend.rank == 0:
            backend.broadcast_bytes(data, data, 0)
            backend.close()
            closed.set()
        else:
            assert closed.wait(20)
            backend.broadcast_bytes(data, data, 0)
            assert not data.any()

    closed = threading.Event()
    with_backends(2, body)


def test_a_member_that_closes_after_its_part_is_no_loss_for_those_that_still_work():
    """As when a process set is removed: the root of a broadcast is done long before the last member."""

    def body(backend: TcpBackend) -> None:
        data = np.full(1 << 20, backend.rank, np.uint8)
        if backend.rank == 1:
            assert closed.wait(20)  # while member 2 sleeps
            time.sleep(3 * SLICE_SECONDS)
        if backend.rank == 0:
            backend.allgather_bytes([EMPTY], [EMPTY], [0] * 3)
            backend._tcp.exchange([(other, data) for other in (1, 2)], [])
            backend.close()
            closed.set()
        else:
            others = [other for other in range(3) if other != backend.rank]
            backend._tcp.exchange(
                [(other, data) for other in others if other], [(other, np.empty_like(data)) for other in others]
            )

    closed = threading.Event()
    with_backends(3, body)


def _reduce_until_error(member: Member) -> tuple[str, tuple[int, ...]]:
    backend = join(member, "group")
    backend.barrier()
    member.tell("reducing")
    error = reduce_until_error(backend, 1_000_000, 60)
    backend.close()
    return type(error).__name__, error.ranks


def _reduce_until_late(member: Member) -> tuple[str, tuple[int, ...]]:
    backend = join(member, "group", timeout=1.0)
    backend.barrier()
    member.tell("reducing")
    error = reduce_until_error(backend, 1_000_000, 60)
    time.sleep(0.5)
    backend.close()
    return type(error).__name__, error.ranks
