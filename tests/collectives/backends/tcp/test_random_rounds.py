"""Random rounds of votes, in a mesh and in a star: an operation runs on all members or on none, with the right data."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import pytest

from collectives.api import DType, ReduceOp
from collectives.backends.base import Vote
from collectives.backends.host import Array, HostBackend
from collectives.backends.tcp import TcpBackend, star
from collectives.backends.tcp.link import TcpLink
from collectives.backends.tcp.star import MOST_PASSED_ON
from collectives.kernels.reduction import reduction
from collectives.store.memory import MemoryStore
from tests.collectives.backends import offers
from tests.collectives.backends.members import group_of
from tests.collectives.backends.tcp.groups import connect
from tests.collectives.backends.tcp.votes import nothing, vote_of

ROUNDS = 40
WATCHED = 4
"""The destinations of so many rounds are watched after their end: nothing may be written there."""
SLICE_SECONDS = 0.01
LENGTHS = [0, 1, 7, 300, 8000, 8192, 8192, 8193, 40_000]


class Plan(NamedTuple):
    """A round: an operation, the length for each member, and the votes of all, where 0 declines.

    ``late`` members enter it when another one waits in it, or has left it. The operation may be ``in_place``. ``seed``
    is that of its data. If the round fails, all members run the operation ``afterwards``, or none does.
    """

    name: str
    counts: list[int]
    root: int
    votes: list[int]
    late: set[int]
    in_place: bool
    seed: int
    afterwards: bool

    @property
    def runs(self) -> bool:
        """Whether all members attempt the same."""
        return all(self.votes) and len(set(self.votes)) == 1


def plan_of(random: np.random.Generator, size: int) -> Plan:
    name = str(random.choice([*OPERATIONS]))
    even = name in ("allreduce", "broadcast")
    counts = [int(random.choice(LENGTHS))] * size if even else [int(random.choice(LENGTHS)) for _ in range(size)]
    votes = [7] * size
    for odd in random.permutation(size)[: random.choice([0, 1, 1, 2, size])]:
        votes[odd] = int(random.choice([0, 0, 8, 9]))
    late = {int(member) for member in random.permutation(size)[: random.choice([0, 0, 1, size - 1])]}
    root, seed, in_place, afterwards = (int(random.integers(end)) for end in (size, 1 << 30, 2, 2))
    return Plan(name, counts, root, votes, late, bool(in_place), seed, bool(afterwards))


class Operation:
    """The operation of ``plan`` on ``member``; ``destination`` is ``before``, and ``expected`` when it has run."""

    def __init__(self, member: HostBackend, plan: Plan) -> None:
        self.member, self.plan = member, plan
        random = np.random.default_rng(plan.seed)
        rows = [random.integers(0, 100, sum(plan.counts) or 1) for _ in range(member.size)]
        self.source, self.expected = OPERATIONS[plan.name](plan, rows, member.rank)
        self.destination = np.full(len(self.expected), -1)
        if plan.in_place and len(self.source) == len(self.expected):
            self.destination = self.source
        self.before = self.destination.copy()

    def call(self) -> None:
        source, destination, plan, member = self.source, self.destination, self.plan, self.member
        raw, room, counts = source.view(np.uint8), destination.view(np.uint8), [8 * count for count in plan.counts]
        match plan.name:
            case "allreduce":
                member.allreduce_arrays([source], [destination], reduction(DType.INT64, ReduceOp.SUM))
            case "allgather":
                member.allgather_bytes([raw], np.array_split(room, plan.seed % 3 + 1), counts)
            case "broadcast":
                member.broadcast_bytes(raw, room, plan.root)
            case "alltoall":
                member.alltoall_bytes(raw, room, counts, [counts[member.rank]] * member.size)
            case "reducescatter":
                member.reducescatter_arrays([source], [destination], plan.counts, reduction(DType.INT64, ReduceOp.SUM))
            case _:
                member.wait_for_all()


Rows = list[Array]


def _part(plan: Plan, row: Array, member: int) -> Array:
    start = sum(plan.counts[:member])
    return row[start : start + plan.counts[member]].copy()


def _allreduce(plan: Plan, rows: Rows, here: int) -> tuple[Array, Array]:
    count = plan.counts[0]
    return rows[here][:count].copy(), np.sum([row[:count] for row in rows], axis=0)


def _allgather(plan: Plan, rows: Rows, here: int) -> tuple[Array, Array]:
    return _part(plan, rows[here], here), np.concatenate([_part(plan, row, at) for at, row in enumerate(rows)])


def _broadcast(plan: Plan, rows: Rows, here: int) -> tuple[Array, Array]:
    count = plan.counts[0]
    return rows[here][:count].copy(), rows[plan.root][:count]


def _alltoall(plan: Plan, rows: Rows, here: int) -> tuple[Array, Array]:
    return rows[here][: sum(plan.counts)].copy(), np.concatenate([_part(plan, row, here) for row in rows])


def _reducescatter(plan: Plan, rows: Rows, here: int) -> tuple[Array, Array]:
    return rows[here][: sum(plan.counts)].copy(), np.sum([_part(plan, row, here) for row in rows], axis=0)


def _barrier(plan: Plan, rows: Rows, here: int) -> tuple[Array, Array]:
    return rows[here][:0], rows[here][:0]


OPERATIONS: Mapping[str, Callable[[Plan, Rows, int], tuple[Array, Array]]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "barrier": _barrier,
}


class Rounds:
    """Runs rounds on one member; ``noticed[round]`` is set when a member waits in the round or has left it."""

    def __init__(self, member: HostBackend, noticed: list[threading.Event]) -> None:
        self._member = member
        self._board: Vote = vote_of(member)
        self._noticed = noticed
        self._kept: deque[tuple[int, Array, Array]] = deque(maxlen=WATCHED)

    def take_part(self, number: int, plan: Plan) -> None:
        operation = Operation(self._member, plan)
        if self._member.rank in plan.late:
            self._await(self._noticed[number])
        if plan.votes[self._member.rank]:
            self._attempt(number, operation)
        else:
            self._board.decline()
        self._noticed[number].set()
        if not plan.runs:
            self._leave(number, operation)
        if not plan.runs and plan.afterwards:
            operation = Operation(self._member, plan)
            operation.call()
        if plan.runs or plan.afterwards:
            self._keep(number, operation, operation.expected)

    def _attempt(self, number: int, operation: Operation) -> None:
        untouched: list[bool] = []
        agreed = lambda: untouched.append(np.array_equal(operation.destination, operation.before))  # noqa: E731
        waiting = lambda absent: self._noticed[number].set()  # noqa: E731
        vote, runs = operation.plan.votes[self._member.rank], operation.plan.runs
        assert self._board.attempt(vote, operation.call, waiting, agreed) == runs
        assert untouched == [True] * runs

    def _leave(self, number: int, operation: Operation) -> None:
        assert operation.destination.tolist() == operation.before.tolist()
        self._keep(number, operation, operation.before)

    def _keep(self, number: int, operation: Operation, content: Array) -> None:
        """From here on nobody needs the source, and nobody writes to the destination."""
        if operation.source is not operation.destination:
            operation.source[:] = -2
        self._kept.append((number, operation.destination, content.copy()))
        for before, destination, kept in self._kept:
            assert destination.tolist() == kept.tolist(), f"of round {before}, in round {number}"

    def _await(self, event: threading.Event) -> None:
        """Compute, while a communication thread hears others. Bound: that of the threads of a test."""
        while not event.wait(SLICE_SECONDS):
            self._board.hurry()


def narrow(link: TcpLink) -> None:
    """Let the kernel keep only a few KB."""
    link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


@pytest.mark.parametrize(
    ("seed", "size", "options", "is_narrow", "most"),
    [
        (1, 3, {"crowded": False}, True, MOST_PASSED_ON),
        (2, 3, {}, True, MOST_PASSED_ON),
        (3, 4, {"encrypted": True}, False, 9 * 4000),
        (4, 6, {}, False, 25 * 4000),
    ],
    ids=["mesh", "star", "encrypted star", "star with longer messages"],
)
def test_operations_run_on_all_members_or_on_none(
    monkeypatch: pytest.MonkeyPatch, seed: int, size: int, options: dict[str, bool], is_narrow: bool, most: int
) -> None:
    def connect_one(rank: int) -> TcpBackend:
        member = connect(group_of(size, rank), store, **options)
        for link in member._tcp._links.values() if is_narrow else ():
            narrow(link)
        return member

    def body(member: TcpBackend) -> None:
        rounds = Rounds(member, noticed)
        for number, plan in enumerate(plans):
            rounds.take_part(number, plan)
        assert vote_of(member).attempt(7, nothing, lambda absent: None, nothing)

    monkeypatch.setattr(star, "MOST_PASSED_ON", most)
    random, store = np.random.default_rng(seed), MemoryStore()
    plans = [plan_of(random, size) for _ in range(ROUNDS)]
    noticed = [threading.Event() for _ in plans]
    offers.with_backends(size, connect_one, body)
