"""Members of a TCP group that are lost, late, aborted or closed."""

from __future__ import annotations

import itertools
import threading
from functools import partial

import numpy as np
import pytest

from collectives.api import CollectiveTimeoutError, HorovodInternalError
from collectives.backends.tcp import TcpBackend
from tests.collectives.backends import group_cases
from tests.collectives.backends.matrix import reduce_until_error
from tests.collectives.backends.members import Member, Processes
from tests.collectives.backends.tcp.groups import LENGTHS, bootstrap_of, join, with_backends

EMPTY = np.empty(0, np.uint8)


def test_killed_member():
    with Processes(3, partial(group_cases.reduce_in_a_process, bootstrap_of)) as processes:
        for rank in range(3):
            assert processes.hear(rank) == "reducing"
        processes.kill(1)
        assert [processes.hear(rank) for rank in (0, 2)] == ["PeerLostError"] * 2


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
    group_cases.check_abort_reaches_others(bootstrap_of, length)


@LENGTHS
def test_silent_member(length):
    group_cases.check_silent_member(bootstrap_of, length, 0.5)


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
    group_cases.check_abort_before_a_call_and_after_close(bootstrap_of)


def test_an_aborted_member_moves_no_data():
    def body(backend: TcpBackend) -> None:
        error = HorovodInternalError("told to stop")
        backend.abort(error)
        with pytest.raises(HorovodInternalError) as caught:
            backend._tcp._pump.flush()
        assert caught.value is error

    with_backends(2, body)


def test_closing_is_idempotent_and_peers_notice():
    group_cases.check_closing(bootstrap_of, ((0,), ("a",)), "the connection to rank 0 on host 'a' is gone")


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
            assert waited.wait(20)
        if backend.rank == 2:
            slices = itertools.count()
            backend.attend(lambda: closed.is_set() and next(slices) == 3 and waited.set())
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

    closed, waited = threading.Event(), threading.Event()
    with_backends(3, body)


def _reduce_until_late(member: Member) -> tuple[str, tuple[int, ...]]:
    backend = join(member, "group", timeout=1.0)
    backend.barrier()
    member.tell("reducing")
    error = reduce_until_error(backend, 1_000_000, 60)
    member.store.set(f"late/{member.rank}", b"")  # none that closes is lost for the other one
    for other in (0, 2):
        member.store.get(f"late/{other}", 60.0)
    backend.close()
    return type(error).__name__, error.ranks
