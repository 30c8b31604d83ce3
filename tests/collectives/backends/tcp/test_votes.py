"""Members of a TCP group that vote late, never, or with other data; and the data of attempts that fail."""

from __future__ import annotations

import socket
import threading
import time
import weakref

import numpy as np
import pytest

from collectives.api import DType, EngineError, HorovodInternalError, PeerLostError, ReduceOp
from collectives.backends.tcp import TcpBackend
from collectives.backends.tcp.ballot import RIDING
from collectives.kernels.reduction import reduction
from collectives.store.memory import MemoryStore
from tests.collectives.backends import offers
from tests.collectives.backends.members import group_of
from tests.collectives.backends.tcp.groups import SHAPES, connect, with_backends
from tests.collectives.backends.tcp.votes import ignore, nothing, vote_of


@SHAPES
@pytest.mark.parametrize("observer", [0, 1])
def test_a_member_that_waits_names_those_that_have_not_voted(observer: int, crowded: bool) -> None:
    def body(member: TcpBackend) -> None:
        vote, seen = vote_of(member), []

        def waiting(absent: list[int]) -> None:
            seen.append(absent)
            if absent == [2]:
                noticed.set()

        if member.rank == 2:
            assert noticed.wait(20)
        assert vote.attempt(7, nothing, waiting if member.rank == observer else ignore, nothing)
        if member.rank == observer:
            assert seen[-1] == [2]
            late, inside = member.waited()
            assert late > 0.0 == inside
            assert member.waited() == (0.0, 0.0)

    noticed = threading.Event()
    with_backends(3, body, crowded=crowded)


def test_a_member_may_vote_later_than_the_timeout_of_operations() -> None:
    def body(member: TcpBackend) -> None:
        begin = time.monotonic()

        def waiting(absent: list[int]) -> None:
            if time.monotonic() > begin + 3 * timeout:
                late.set()

        if member.rank:
            assert late.wait(20)
        assert vote_of(member).attempt(7, nothing, waiting, nothing)

    timeout, late = 0.05, threading.Event()
    with_backends(2, body, timeout=timeout)


def test_a_lost_member_ends_an_attempt_but_no_decline() -> None:
    def body(member: TcpBackend) -> None:
        vote = vote_of(member)
        if member.rank:
            member.close()
            closed.set()
            vote.decline()
            return
        assert closed.wait(20)
        with pytest.raises(PeerLostError, match="rank 1 on host 'a'"):
            vote.attempt(7, nothing, ignore, pytest.fail)
        vote.decline()
        with pytest.raises(PeerLostError):
            vote.attempt(8, nothing, ignore, pytest.fail)

    closed = threading.Event()
    with_backends(2, body)


def test_an_abort_ends_an_attempt() -> None:
    def body(member: TcpBackend) -> None:
        if member.rank == 0:
            error, calls = HorovodInternalError("told to stop"), []

            def waiting(absent: list[int]) -> None:
                calls.append(absent)
                member.abort(error)

            with pytest.raises(HorovodInternalError) as caught:
                vote_of(member).attempt(7, nothing, waiting, pytest.fail)
            assert caught.value is error
            assert calls == [[1]]
        over.wait(20)

    over = threading.Barrier(2)
    with_backends(2, body)


@SHAPES
def test_data_of_an_attempt_that_fails_is_no_longer_needed_here(crowded: bool) -> None:
    """The kernel has not taken all of it, and its owner changes it: what is left was copied, and is dropped there."""

    def connect_narrowly(rank: int) -> TcpBackend:
        member = connect(group_of(3, rank), store, crowded=crowded)
        for link in member._tcp._links.values():
            link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        return member

    def body(member: TcpBackend) -> None:
        vote, data = vote_of(member), np.full(RIDING // 8, member.rank)
        call = lambda: member.allreduce_arrays([data], [data], reduction(DType.INT64, ReduceOp.SUM))  # noqa: E731
        if member.rank == 0:
            vote.decline()
            left.wait(20)
        else:
            assert not vote.attempt(7, call, ignore, pytest.fail)
            unsent = [np.frombuffer(view, np.uint8) for link in member._tcp._links.values() for view in link._unsent]
            assert unsent
            assert not any(np.may_share_memory(view, data) for view in unsent)
            left.wait(20)
        assert (data == member.rank).all()
        call()
        assert (data == 3).all()

    store, left = MemoryStore(), threading.Barrier(3)
    offers.with_backends(3, connect_narrowly, body)


@SHAPES
@pytest.mark.parametrize("all_agree", [True, False])
def test_an_attempt_that_is_over_keeps_no_memory_of_the_caller(all_agree: bool, crowded: bool) -> None:
    """The calls of the caller refer to it, too."""

    def body(member: TcpBackend) -> None:
        vote, data = vote_of(member), np.full(8, member.rank, np.uint8)
        kept = weakref.ref(data)
        if member.rank == 2 and not all_agree:
            vote.decline()
        else:
            call = lambda data=data: member.broadcast_bytes(data, data, 0)  # noqa: E731
            assert vote.attempt(7, call, ignore, lambda data=data: None) == all_agree
            assert (data == (0 if all_agree else member.rank)).all()
            del call
        del data
        assert kept() is None
        over.wait(20)

    over = threading.Barrier(3)
    with_backends(3, body, crowded=crowded)


def test_a_vote_that_did_not_fit_comes_when_somebody_waits_for_it() -> None:
    """The root of a long broadcast declines before the others have read it."""

    def body(member: TcpBackend) -> None:
        vote, data = vote_of(member), np.full(length, member.rank, np.uint8)
        if member.rank == 0:
            fill(member)
            vote.decline()
            assert all(link.is_sending for link in member._tcp._links.values())
            declined.set()
            assert late.wait(20)
            vote.hurry()
            return
        assert declined.wait(20)
        member._tcp.exchange([], [(0, data[: sent[0]])])
        assert not vote.attempt(7, nothing, lambda absent: late.set(), pytest.fail)

    def fill(member: TcpBackend) -> None:
        (link,) = member._tcp._links.values()
        view = memoryview(bytes(1 << 16))
        while True:
            try:
                sent[0] += link._socket.send(view)
            except BlockingIOError:
                return

    length, sent = 1 << 26, [0]
    declined, late = threading.Event(), threading.Event()
    with_backends(2, body)


@pytest.mark.parametrize(("size", "odd"), [(2, 1), (3, 1), (3, 0)])
def test_members_that_vote_for_the_same_number_with_different_data_are_told(size: int, odd: int) -> None:
    def body(member: TcpBackend) -> None:
        data = np.zeros(1 + (member.rank == odd))
        with pytest.raises((EngineError, PeerLostError)) as caught:
            vote_of(member).attempt(
                7,
                lambda: member.allreduce_arrays([data], [data], reduction(DType.FLOAT64, ReduceOp.SUM)),
                ignore,
                nothing,
            )
        errors.append(caught.type)
        member.abort(HorovodInternalError("over"))

    errors: list[type] = []
    with_backends(size, body)
    assert EngineError in errors
