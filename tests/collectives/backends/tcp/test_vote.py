"""The members of a TCP group agree by the first messages of an operation."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from collectives.backends import base
from collectives.backends.base import Vote
from collectives.backends.tcp import TcpBackend
from tests.collectives.backends.matrix import checks
from tests.collectives.backends.tcp.groups import SHAPES, with_backends
from tests.collectives.backends.tcp.votes import LENGTHS, NAMES, Operations, ignore, nothing, vote_of


@LENGTHS
@pytest.mark.parametrize(("size", "crowded"), [(2, True), (3, False), (3, True), (6, True)])
def test_all_members_attempt_the_same(size: int, length: int, crowded: bool) -> None:
    def body(member: TcpBackend) -> None:
        operations, vote = Operations(member, length), vote_of(member)
        for value, name in enumerate(NAMES * 2, 1):
            expected, untouched = operations.expect(name), []
            agreed = lambda: untouched.append((operations.result == -1).all())  # noqa: E731, B023
            assert vote.attempt(value, lambda: operations.call(name), ignore, agreed)  # noqa: B023
            assert untouched == [True]
            assert np.array_equal(operations.result, expected)

    with_backends(size, body, crowded=crowded)


@SHAPES
@LENGTHS
@pytest.mark.parametrize("other", ["declines", "attempts another"])
def test_members_that_differ_leave_no_trace(length: int, other: str, crowded: bool) -> None:
    """Member 2 comes last, when the others have gone on: its frame is dropped by whoever reads it later."""

    def body(member: TcpBackend) -> None:
        operations, vote = Operations(member, length), vote_of(member)
        for value, name in enumerate(NAMES, 1):
            expected = operations.expect(name)
            if member.rank == 2:
                assert left.wait(20) >= 0
                attempt(vote, operations, name, value)
            elif member.rank == 1 and other == "declines":
                vote.decline()
                left.wait(20)
            else:
                number = value + 100 if member.rank == 1 else value
                attempt(vote, operations, name, number)
                left.wait(20)
            assert (operations.result == -1).all()
            operations.call(name)
            assert np.array_equal(operations.result, expected)

    def attempt(vote: Vote, operations: Operations, name: str, value: int) -> None:
        assert not vote.attempt(value, lambda: operations.call(name), ignore, pytest.fail)

    left = threading.Barrier(3)
    with_backends(3, body, crowded=crowded)


@pytest.mark.parametrize("size", [3])
def test_rounds_that_nobody_wants_do_not_pile_up(size: int) -> None:
    def body(member: TcpBackend) -> None:
        vote = vote_of(member)
        for _ in range(50_000):
            vote.decline()
        assert vote.attempt(7, nothing, ignore, nothing)

    with_backends(size, body)


COUNTS = [5, 0, 300_000, 8]


@SHAPES
def test_an_allgather_of_one_tensor_writes_nothing_before_all_agree(crowded: bool) -> None:
    def body(member: TcpBackend) -> None:
        vote = vote_of(member)
        rows = [np.full(count, rank + 1, np.uint8) for rank, count in enumerate(COUNTS)]
        result, clean = np.zeros(sum(COUNTS), np.uint8), []
        agreed: Callable[[], None] = lambda: clean.append(not result.any())  # noqa: E731
        call: Callable[[], None] = lambda: member.allgather_bytes([rows[member.rank]], [result], COUNTS)  # noqa: E731
        assert not vote.attempt(7 + (member.rank == 3), call, ignore, agreed)
        assert not result.any()
        assert vote.attempt(7, call, ignore, agreed)
        assert clean == [True]
        assert np.array_equal(result, np.concatenate(rows))
        assert vote.attempt(7, nothing, ignore, nothing), "all have left the second round"

    with_backends(4, body, crowded=crowded)


def test_large_groups_have_no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member is not connected to all others."""

    def body(member: TcpBackend) -> None:
        assert member.vote() is None

    monkeypatch.setattr(base, "MOST_LINKED", 2)
    with_backends(3, body)


@SHAPES
@pytest.mark.parametrize("size", [3])
def test_operations_are_right_beside_rounds(size: int, crowded: bool) -> None:
    """Frames that were not read before are no data of an operation."""

    def body(member: TcpBackend) -> None:
        vote = vote_of(member)
        for _ in range(3):
            vote.decline()
        for name, check in checks().items():
            if not name.startswith("large"):
                check(member)
        vote.decline()
        assert vote.attempt(7, nothing, ignore, nothing)

    with_backends(size, body, crowded=crowded)


@pytest.mark.parametrize("size", [2, 3])
def test_members_agree_over_encrypted_connections(size: int) -> None:
    def body(member: TcpBackend) -> None:
        operations, vote = Operations(member, 1000), vote_of(member)
        for value, name in enumerate(NAMES, 1):
            expected = operations.expect(name)
            assert vote.attempt(value, lambda: operations.call(name), ignore, nothing)  # noqa: B023
            assert np.array_equal(operations.result, expected)

    with_backends(size, body, encrypted=True)
