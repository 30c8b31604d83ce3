"""The members of a TCP group agree by the first messages of an operation."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives.api import DType, EngineError, HorovodInternalError, PeerLostError, ReduceOp
from collectives.backends.host import HostBackend
from collectives.backends.tcp import TcpBackend, backend
from collectives.backends.tcp.ballot import RIDING
from collectives.planning.board import Board, OffersBoard
from collectives.rendezvous.store import MemoryStore
from tests.backends import offers
from tests.backends.matrix import run_matrix
from tests.backends.members import group_of, in_threads
from tests.backends.tcp.groups import connect, with_backends
from tests.backends.test_hierarchical import HOSTS, Hosts

LENGTHS = pytest.mark.parametrize("length", [0, 5, RIDING // 8, RIDING // 8 + 1, 300_001], ids="{} int64".format)


def board_of(member: HostBackend) -> Board:
    assert isinstance(member, OffersBoard)
    board = member.board()
    assert board is not None
    return board


def nothing() -> None:
    return


def ignore(absent: list[int]) -> None:
    return


class Operations:
    """Each operation on ``length`` elements, with the destination as it was before, and its right result."""

    def __init__(self, member: HostBackend, length: int) -> None:
        self.member, self.rank, self.size, self.length = member, member.rank, member.size, length
        self.mine = np.arange(length) + self.rank
        self.all = [np.arange(length) + rank for rank in range(self.size)]
        self.result = np.full(0, -1)

    def expect(self, name: str) -> np.ndarray[Any, Any]:
        """Prepares the destination; returns its right content."""
        of_all = np.concatenate(self.all)
        expected = {
            "allreduce": sum(self.all),
            "allgather": of_all,
            "broadcast": self.all[1],
            "alltoall": of_all,
            "reducescatter": np.full(1, 0) if not self.length else sum(self.all),
            "barrier": self.mine[:0],
        }[name]
        self.result = np.full(len(expected), -1)
        return np.asarray(expected)

    def call(self, name: str) -> None:
        member, length, size = self.member, self.length, self.size
        counts, raw = [8 * length] * size, self.result.view(np.uint8)
        if name == "allreduce":
            member.allreduce_arrays([self.mine], [self.result], DType.INT64, ReduceOp.SUM)
        elif name == "allgather":
            member.allgather_bytes([self.mine.view(np.uint8)], np.array_split(raw, 3), counts)
        elif name == "broadcast":
            member.broadcast_bytes(self.mine.view(np.uint8), raw, 1)
        elif name == "alltoall":
            member.alltoall_bytes(np.tile(self.mine, size).view(np.uint8), raw, counts, counts)
        elif name == "barrier":
            member.wait_for_all()
        else:
            source = np.tile(self.mine, size) if length else np.zeros(size, np.int64)
            member.reducescatter_arrays([source], [self.result], [max(length, 1)] * size, DType.INT64, ReduceOp.SUM)


NAMES = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier")


@LENGTHS
@pytest.mark.parametrize("size", [2, 3])
def test_all_members_attempt_the_same(size: int, length: int) -> None:
    def body(member: TcpBackend) -> None:
        operations, board = Operations(member, length), board_of(member)
        for value, name in enumerate(NAMES * 2, 1):
            expected, untouched = operations.expect(name), []
            agreed = lambda: untouched.append((operations.result == -1).all())  # noqa: E731, B023
            assert board.attempt(value, lambda: operations.call(name), ignore, agreed)  # noqa: B023
            assert untouched == [True]
            assert operations.result.tolist() == expected.tolist()

    with_backends(size, body)


@LENGTHS
@pytest.mark.parametrize("other", ["declines", "attempts another"])
def test_members_that_differ_leave_no_trace(length: int, other: str) -> None:
    """Member 2 comes last, when the others have gone on: its frame is dropped by whoever reads it later."""

    def body(member: TcpBackend) -> None:
        operations, board = Operations(member, length), board_of(member)
        for value, name in enumerate(NAMES, 1):
            expected = operations.expect(name)
            if member.rank == 2:
                assert left.wait(20) >= 0
                attempt(board, operations, name, value)
            elif member.rank == 1 and other == "declines":
                board.decline()
                left.wait(20)
            else:
                number = value + 100 if member.rank == 1 else value
                attempt(board, operations, name, number)
                left.wait(20)
            assert (operations.result == -1).all()
            operations.call(name)
            assert operations.result.tolist() == expected.tolist()

    def attempt(board: Board, operations: Operations, name: str, value: int) -> None:
        assert not board.attempt(value, lambda: operations.call(name), ignore, pytest.fail)

    left = threading.Barrier(3)
    with_backends(3, body)


def test_rounds_that_nobody_wants_do_not_pile_up() -> None:
    def body(member: TcpBackend) -> None:
        board = board_of(member)
        for _ in range(50_000):
            board.decline()
        assert board.attempt(7, nothing, ignore, nothing)

    with_backends(2, body)


def test_a_member_that_waits_names_those_that_have_not_voted() -> None:
    def body(member: TcpBackend) -> None:
        board, seen = board_of(member), []

        def waiting(absent: list[int]) -> None:
            seen.append(absent)
            if len(seen) == 3:
                noticed.wait(20)

        if member.rank == 2:
            noticed.wait(20)
        elif member.rank == 1:
            come.set()
        else:
            assert come.wait(20)
        assert board.attempt(7, nothing, waiting if member.rank == 0 else ignore, nothing)
        if member.rank == 0:
            assert seen[-1] == [2]
            late, inside = member.waited()
            assert late > 0.0 == inside
            assert member.waited() == (0.0, 0.0)

    come, noticed = threading.Event(), threading.Barrier(2)
    with_backends(3, body)


def test_a_member_may_vote_later_than_the_timeout_of_operations() -> None:
    def body(member: TcpBackend) -> None:
        begin = time.monotonic()

        def waiting(absent: list[int]) -> None:
            if time.monotonic() > begin + 3 * timeout:
                late.set()

        if member.rank:
            assert late.wait(20)
        assert board_of(member).attempt(7, nothing, waiting, nothing)

    timeout, late = 0.05, threading.Event()
    with_backends(2, body, timeout=timeout)


def test_a_lost_member_ends_an_attempt_but_no_decline() -> None:
    def body(member: TcpBackend) -> None:
        board = board_of(member)
        if member.rank:
            member.close()
            closed.set()
            board.decline()
            return
        assert closed.wait(20)
        with pytest.raises(PeerLostError, match="rank 1 on host 'a'"):
            board.attempt(7, nothing, ignore, pytest.fail)
        board.decline()
        with pytest.raises(PeerLostError):
            board.attempt(8, nothing, ignore, pytest.fail)

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
                board_of(member).attempt(7, nothing, waiting, pytest.fail)
            assert caught.value is error
            assert calls == [[1]]
        over.wait(20)

    over = threading.Barrier(2)
    with_backends(2, body)


def test_data_of_an_attempt_that_fails_is_no_longer_needed_here() -> None:
    """The kernel has not taken all of it, and its owner changes it: what is left was copied, and is dropped there."""

    def connect_narrowly(rank: int) -> TcpBackend:
        member = connect(group_of(3, rank), store)
        for link in member._tcp._links.values():
            link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return member

    def body(member: TcpBackend) -> None:
        board, data = board_of(member), np.full(RIDING // 8, member.rank)
        call = lambda: member.allreduce_arrays([data], [data], DType.INT64, ReduceOp.SUM)  # noqa: E731
        if member.rank == 0:
            board.decline()
            left.wait(20)
        else:
            assert not board.attempt(7, call, ignore, pytest.fail)
            owned = [view.obj is data for link in member._tcp._links.values() for view in link._unsent]
            assert not any(owned)
            left.wait(20)
        assert (data == member.rank).all()
        call()
        assert (data == 3).all()

    store, left = MemoryStore(), threading.Barrier(3)
    offers.with_backends(3, connect_narrowly, body)


def test_a_vote_that_did_not_fit_comes_when_somebody_waits_for_it() -> None:
    """The root of a long broadcast declines before the others have read it."""

    def body(member: TcpBackend) -> None:
        board, data = board_of(member), np.full(length, member.rank, np.uint8)
        if member.rank == 0:
            fill(member)
            board.decline()
            assert all(link.is_sending for link in member._tcp._links.values())
            declined.set()
            assert late.wait(20)
            board.hurry()
            return
        assert declined.wait(20)
        member._tcp.exchange([], [(0, data[: sent[0]])])
        assert not board.attempt(7, nothing, lambda absent: late.set(), pytest.fail)

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


def test_members_that_vote_for_the_same_number_with_different_data_are_told() -> None:
    def body(member: TcpBackend) -> None:
        data = np.zeros(1 + member.rank)
        with pytest.raises((EngineError, PeerLostError)) as caught:
            board_of(member).attempt(
                7, lambda: member.allreduce_arrays([data], [data], DType.FLOAT64, ReduceOp.SUM), ignore, nothing
            )
        errors.append(caught.type)
        member.abort(HorovodInternalError("over"))

    errors: list[type] = []
    with_backends(2, body)
    assert EngineError in errors


def test_large_groups_have_no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(member: TcpBackend) -> None:
        assert member.board() is None

    monkeypatch.setattr(backend, "MOST_VOTERS", 2)
    with_backends(3, body)


@pytest.mark.parametrize("size", [2, 4])
def test_operations_are_right_beside_rounds(size: int) -> None:
    """Frames that were not read before are no data of an operation."""

    def body(member: TcpBackend) -> None:
        board = board_of(member)
        for _ in range(3):
            board.decline()
        run_matrix(member, member.rank, size)
        board.decline()
        assert board.attempt(7, nothing, ignore, nothing)

    with_backends(size, body)


def test_members_agree_over_encrypted_connections() -> None:
    def body(member: TcpBackend) -> None:
        operations, board = Operations(member, 1000), board_of(member)
        for value, name in enumerate(NAMES, 1):
            expected = operations.expect(name)
            assert board.attempt(value, lambda: operations.call(name), ignore, nothing)  # noqa: B023
            assert operations.result.tolist() == expected.tolist()

    with_backends(2, body, encrypted=True)


def test_the_waits_of_stages_are_late_only_if_nobody_has_agreed_ahead() -> None:
    """Members that have agreed know that all are there; their further waits are waits inside of the operation."""

    def body(rank: int) -> None:
        member, seen = group.member(rank), []
        for part, waits in ((member._local, (1.0, 2.0)), (member._cross, (4.0, 8.0)), (member._flat, (16.0, 32.0))):
            vars(part)["waited"] = lambda waits=waits: waits
        assert member.waited() == (21.0, 42.0)
        assert board_of(member).attempt(7, lambda: seen.append(member.waited()), ignore, nothing)
        assert seen == [(16.0, 47.0)]
        assert member.waited() == (21.0, 42.0)

    group = Hosts(HOSTS["2+2"])
    in_threads(group.size, body)


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_the_members_of_several_hosts_agree_before_the_stages_begin(hosts: str) -> None:
    def body(rank: int) -> None:
        member = group.member(rank)
        operations, board = Operations(member, 1000), board_of(member)
        for value, name in enumerate(NAMES, 1):
            expected = operations.expect(name)
            calls: list[str] = []
            assert not board.attempt(value + (rank == 1), pytest.fail, ignore, pytest.fail)
            board.hurry()
            agreed: Callable[[], None] = lambda: calls.append("agreed")  # noqa: E731, B023
            assert board.attempt(value, lambda: operations.call(name), ignore, agreed)  # noqa: B023
            assert (calls, operations.result.tolist()) == (["agreed"], expected.tolist())
        board.decline()

    group = Hosts(hosts)
    in_threads(group.size, body)
