"""Members of a large group connect when an operation needs it."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from contextlib import suppress

import msgpack
import numpy as np
import pytest

from collectives.api import (
    CollectiveTimeoutError,
    DType,
    HorovodInternalError,
    NoDescriptorError,
    PeerLostError,
    ReduceOp,
)
from collectives.backends import base
from collectives.backends.tcp import TcpBackend, pump, transport
from collectives.kernels.reduction import reduction
from collectives.net.attempts import ConnectAttempt
from collectives.net.strangers import Strangers
from tests.collectives.backends.matrix import abort_from_thread, reduce_until_error, run_matrix, shorten
from tests.collectives.backends.tcp.groups import bootstrap_of, with_backends

PATIENCE = 20.0


@pytest.fixture(autouse=True)
def sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group is large."""
    monkeypatch.setattr(base, "MOST_LINKED", 1)


def partners(member: TcpBackend) -> list[int]:
    return sorted(member._tcp._links)


@pytest.mark.parametrize(("size", "encrypted"), [(2, False), (5, False), (3, True)])
def test_matrix(size, encrypted, monkeypatch):
    shorten(monkeypatch)
    with_backends(size, lambda member: run_matrix(member, member.rank, size), encrypted=encrypted)


def test_operations_connect_those_that_exchange_data(monkeypatch):
    """A broadcast goes along a tree, or a chain if it is long; a barrier tells the members 1, 2, 4... ahead."""

    def body(member: TcpBackend) -> None:
        rank, data = member.rank, np.zeros(1 << 10, np.uint8)
        assert partners(member) == []
        member.broadcast_bytes(data[:8], data[:8], 0)
        assert partners(member) == tree[rank]
        member.broadcast_bytes(data, data, 0)
        assert partners(member) == sorted({*tree[rank], (rank - 1) % 6, (rank + 1) % 6})
        member.alltoall_bytes(data[:0], data[:0], [0] * 6, [0] * 6)
        assert partners(member) == sorted({*tree[rank], (rank - 1) % 6, (rank + 1) % 6})
        member.allreduce_arrays([data], [data], reduction(DType.UINT8, ReduceOp.SUM))
        assert partners(member) == member.group.others

    monkeypatch.setattr("collectives.backends.tcp.sparse.CHAIN", 1 << 10)
    monkeypatch.setattr(transport, "CHAIN", 1 << 10)
    tree = {0: [1, 2, 4], 1: [0], 2: [0, 3], 3: [2], 4: [0, 5], 5: [4]}
    with_backends(6, body)


@pytest.mark.parametrize("first", [0, 1])
def test_a_member_that_comes_late_is_waited_for_and_named(first):
    """It has not begun the operation, so nobody answers the call of the other one, or nobody calls."""

    def body(member: TcpBackend) -> None:
        late = 1 - member.rank if member.rank == first else None
        if late is None:
            over.wait(PATIENCE)
            return
        with pytest.raises(CollectiveTimeoutError, match=f"rank {late} on host 'a' did not answer in time") as caught:
            member.barrier()
        assert caught.value.ranks == (late,)
        with pytest.raises(CollectiveTimeoutError):
            member.barrier()
        over.wait(PATIENCE)

    over = threading.Barrier(2)
    with_backends(2, body, timeout=0.3)


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_wait_for_a_late_member_lets_the_engine_work_and_ends_with_an_abort(waiting):
    def body(member: TcpBackend) -> None:
        error, waits = HorovodInternalError("told to stop"), []
        if member.rank != waiting:
            over.wait(PATIENCE)
            return

        def attend() -> None:
            waits.append(1)
            if len(waits) == 3:
                threading.Thread(target=member.abort, args=(error,)).start()

        member.attend(attend)
        with pytest.raises(HorovodInternalError) as caught:
            member.barrier()
        assert caught.value is error
        over.wait(PATIENCE)

    over = threading.Barrier(2)
    with_backends(2, body)


@pytest.mark.parametrize("lost", [0, 2])
def test_a_member_that_has_ended_is_named_by_those_that_call_it(lost):
    """Rank 2 cannot be called by others: its end is no loss before somebody waits for it, so the time ends that."""

    def body(member: TcpBackend) -> None:
        if member.rank == lost:
            member.close()
            closed.set()
            return
        assert closed.wait(PATIENCE)
        with pytest.raises((PeerLostError, CollectiveTimeoutError)) as caught:
            member.allgather_bytes([np.zeros(1, np.uint8)], [np.zeros(3, np.uint8)], [1] * 3)
        named.append(tuple(caught.value.ranks))

    closed, named = threading.Event(), []
    with_backends(3, body, timeout=1.0)
    assert (lost,) in named


def test_an_abort_ends_the_calls_of_others():
    """They have called, and nobody has answered yet."""

    def body(member: TcpBackend) -> None:
        if member.rank == 0:
            assert calling.wait(PATIENCE)
            member.abort(HorovodInternalError("told to stop"))
            with pytest.raises(HorovodInternalError, match="told to stop"):
                member.barrier()
            return
        member.attend(calling.set)
        assert isinstance(reduce_until_error(member, 8, PATIENCE), PeerLostError)

    calling = threading.Event()
    with_backends(3, body)


def test_a_member_that_leaves_while_it_calls_says_nothing_that_could_be_data():
    """It has said hello, and the other one reads that later, in an operation in which it only receives."""

    def body(member: TcpBackend) -> None:
        members[member.rank], data = member, np.zeros(4, np.uint8)
        if member.rank == 1:
            with pytest.raises(HorovodInternalError, match="told to stop"):
                member.alltoall_bytes(np.full(4, 7, np.uint8), data[:0], [4, 0], [0, 0])
            left.set()
            over.wait(PATIENCE)
            return
        hear_hello_of_one(member)
        members[1].abort(HorovodInternalError("told to stop"))
        assert left.wait(PATIENCE)
        with pytest.raises(PeerLostError):
            member.alltoall_bytes(data[:0], data, [0, 0], [0, 4])
        over.set()

    members: dict[int, TcpBackend] = {}
    left, over = threading.Event(), threading.Event()
    with_backends(2, body)


def hear_hello_of_one(member: TcpBackend) -> None:
    """Accept a connection as at the end of an operation, and return when a hello has come, which is not read."""
    candidates = member._tcp._switchboard._door._candidates
    candidates.make_room()
    [listener] = candidates._listeners.by_descriptor
    await_data(listener)
    candidates.attend(listener)
    [candidate] = candidates._waiting
    await_data(candidate)


def await_data(descriptor: int) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    assert poller.poll(PATIENCE * 1000)


def test_an_abort_during_operations():
    def body(member: TcpBackend) -> None:
        if member.rank == 0:
            abort_from_thread(member, np.ones(1_000_000, np.float32))
        else:
            assert isinstance(reduce_until_error(member, 1_000_000, PATIENCE), PeerLostError)

    with_backends(3, body)


@pytest.mark.parametrize("word", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100], ids=["silent", "HTTP", "nonsense"])
def test_strangers_do_not_keep_members_from_connecting(word, monkeypatch):
    """They come while nobody listens to them, and are more than may wait at once."""

    def body(member: TcpBackend) -> None:
        if member.rank == 0:
            address = tuple(msgpack.unpackb(member._tcp._switchboard._offers[0])["tcp"])
            for stranger in strangers:
                stranger.connect(address)
                stranger.sendall(word)
        come.wait(PATIENCE)
        member.barrier()
        assert partners(member) == member.group.others

    monkeypatch.setattr("collectives.backends.tcp.switchboard.MOST_CANDIDATES", 4)
    come, strangers = threading.Barrier(3), [socket.socket() for _ in range(6)]
    with_backends(3, body)
    for stranger in strangers:
        stranger.close()


def test_groups_leave_nothing():
    descriptors, threads = os.listdir("/proc/self/fd"), set(threading.enumerate())
    for number in range(20):
        with_backends(3, TcpBackend.barrier if number % 2 else lambda member: None)
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_a_start_without_a_descriptor_for_the_last_part_leaves_nothing(monkeypatch):
    def fail() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(pump, "Poller", fail)
    before = len(os.listdir("/proc/self/fd"))
    bootstrap = bootstrap_of(base.Group((0, 1), 0, ("a", "a")))
    with ConnectAttempt(PATIENCE) as attempt, pytest.raises(OSError, match="Too many open files"):
        bootstrap.connect([bootstrap.offer] * 2, attempt)
    bootstrap.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_member_without_a_descriptor_for_those_that_call_it_says_so():
    """It calls rank 0, which has not come, and blames nobody."""

    def body(member: TcpBackend) -> None:
        if member.rank != 1:
            {0: over, 2: calling}[member.rank].wait(PATIENCE)
            with suppress(HorovodInternalError):
                member.barrier()
            return
        member._tcp._switchboard._door._candidates._strangers = Exhausted()
        member.attend(calling.set)
        with pytest.raises(NoDescriptorError, match="rank 1 cannot connect: this process has no file descriptor left"):
            member.barrier()
        over.set()

    calling, over = threading.Event(), threading.Event()
    with_backends(3, body)


class Exhausted(Strangers):
    """Those of a process that has no descriptor left."""

    def next_from(self, listener: socket.socket, now: float) -> socket.socket | None:
        self.pause(now)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_bootstrap_that_never_connects_leaves_nothing():
    descriptors = len(os.listdir("/proc/self/fd"))
    bootstrap = bootstrap_of(base.Group((0, 1), 0, ("a", "a")))
    bootstrap.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
