"""The members of several hosts agree: on each host, then the hosts by their leaders."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest

from collectives.api import Parameters
from collectives.backends.hierarchical.backend import HierarchicalBackend
from collectives.backends.hierarchical.vote import HostsVote
from collectives.backends.host import HostBackend
from collectives.backends.messaging import MessagingBackend
from collectives.backends.shm import ShmBootstrap
from collectives.backends.tcp import TcpBackend
from collectives.store.memory import MemoryStore, PrefixStore
from tests.collectives.backends.members import group_of, in_threads
from tests.collectives.backends.offers import meet
from tests.collectives.backends.tcp.groups import connect
from tests.collectives.backends.tcp.test_random_rounds import ROUNDS, Rounds, plan_of
from tests.collectives.backends.tcp.votes import NAMES, Operations, ignore, nothing, vote_of
from tests.collectives.backends.test_hierarchical import HOSTS, Hosts

PATIENCE = 20.0
SHAPES = pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)


@SHAPES
def test_they_agree_before_the_stages_begin(hosts: str) -> None:
    def body(rank: int) -> None:
        member = group.member(rank)
        operations, vote = Operations(member, 1000), vote_of(member)
        for value, name in enumerate(NAMES, 1):
            expected = operations.expect(name)
            calls: list[str] = []
            assert not vote.attempt(value + (rank == 1), pytest.fail, ignore, pytest.fail)
            vote.hurry()
            agreed: Callable[[], None] = lambda: calls.append("agreed")  # noqa: E731, B023
            assert vote.attempt(value, lambda: operations.call(name), ignore, agreed)  # noqa: B023
            assert (calls, operations.result.tolist()) == (["agreed"], expected.tolist())
        vote.decline()

    group = Hosts(hosts)
    in_threads(group.size, body)


@pytest.mark.parametrize("odd", range(5))
@pytest.mark.parametrize("other", [0, 8])
def test_one_that_differs_lets_all_leave_the_round(odd: int, other: int) -> None:
    """Each is the first or another member of its host, or alone there."""

    def body(rank: int) -> None:
        vote = vote_of(group.member(rank))
        for value in (7, 9):
            if rank == odd and not other:
                vote.decline()
            else:
                assert not vote.attempt(other if rank == odd else value, pytest.fail, ignore, pytest.fail)
            assert vote.attempt(value, nothing, ignore, nothing)

    group = Hosts("aabbc")
    in_threads(5, body)


def leave_after_the_first_step(vote: HostsVote) -> None:
    """As a leader that is stopped before it votes for its host."""
    assert vote._inside.attempt(7, nothing, ignore, nothing)


def come_to_know(hosts: str, late: int, told: dict[int, tuple[int, ...]], is_stopped: bool = False) -> None:
    """Return when the members are ``told`` of these absent ones, as long as ``late`` does not come.

    If it ``is_stopped``, it has taken the first step.
    """

    def body(rank: int) -> None:
        def waiting(absent: list[int]) -> None:
            latest[rank] = tuple(absent)
            if latest == told:
                seen.set()

        vote = vote_of(group.member(rank))
        assert isinstance(vote, HostsVote)
        if rank != late:
            assert vote.attempt(7, nothing, waiting, nothing)
            return
        if is_stopped:
            leave_after_the_first_step(vote)
        assert seen.wait(PATIENCE), latest
        if not is_stopped:
            assert vote.attempt(7, nothing, ignore, nothing)
        else:
            assert vote._across is not None
            assert vote._across.attempt(7, nothing, ignore, nothing)
            assert vote._inside.attempt(7, nothing, ignore, nothing)

    group, seen = Hosts(hosts), threading.Event()
    latest: dict[int, tuple[int, ...]] = {}
    in_threads(len(hosts), body)


@pytest.mark.parametrize(
    ("hosts", "late", "told"),
    [
        ("aabb", 0, {1: (0,), 2: (), 3: ()}),
        ("aabb", 3, {0: (2, 3), 1: (), 2: (3,)}),
        ("aabbcc", 3, {0: (2, 3), 1: (), 2: (3,), 4: (), 5: ()}),
        ("abbcc", 3, {0: (3, 4), 1: (), 2: (), 4: (3,)}),
    ],
)
def test_members_know_the_late_ones_of_their_host_and_the_first_leader_the_late_hosts(
    hosts: str, late: int, told: dict[int, tuple[int, ...]]
) -> None:
    come_to_know(hosts, late, told)


def test_members_of_a_stopped_leader_name_nobody() -> None:
    come_to_know("aabb", 2, {0: (2, 3), 1: (), 3: ()}, is_stopped=True)


def with_parts(hosts: str, body: Callable[[HierarchicalBackend], None], is_shared: bool, crowded: bool) -> None:
    """Run ``body`` on the members of ``hosts``: over TCP, and inside a host over memory if that ``is_shared``."""

    def run(rank: int) -> None:
        group = group_of(len(hosts), rank, hosts)
        members = group.by_host()
        here = next(each for each in members if rank in each)
        place = here.index(rank)

        def part(name: str, positions: list[int]) -> TcpBackend:
            return connect(group.part(positions), PrefixStore(store, f"{name}-{positions}"), crowded=crowded)

        def shared() -> HostBackend:
            return meet(ShmBootstrap(group.part(here), PATIENCE, crowded), PrefixStore(store, f"shm-{here}"), PATIENCE)

        local: HostBackend = shared() if is_shared else part("local", here)
        cross = part("cross", [each[place] for each in members]) if place < min(map(len, members)) else None
        with closing(HierarchicalBackend(group, local, cross, part("flat", [*range(len(hosts))]), Parameters())) as all:
            body(all)

    store = MemoryStore()
    in_threads(len(hosts), run)


@pytest.mark.parametrize("hosts", ["aabb", "aaabb", "ababb", "aabbcc"])
@pytest.mark.parametrize("parts", ["inproc", "shm and tcp", "tcp", "tcp on shared cores"])
def test_operations_run_on_all_members_or_on_none(hosts: str, parts: str) -> None:
    def body(member: HierarchicalBackend) -> None:
        rounds = Rounds(member, noticed)
        for number, plan in enumerate(plans):
            rounds.take_part(number, plan._replace(afterwards=False))
            if not plan.runs:
                all_left.wait(PATIENCE)  # nobody enters the next round before
        assert vote_of(member).attempt(7, nothing, ignore, nothing)
        all_left.wait(PATIENCE)

    random, all_left = np.random.default_rng(len(hosts)), threading.Barrier(len(hosts))
    plans = [plan_of(random, len(hosts)) for _ in range(ROUNDS)]
    noticed = [threading.Event() for _ in plans]
    if parts == "inproc":
        group = Hosts(hosts)
        in_threads(group.size, lambda rank: body(group.member(rank)))
    else:
        with_parts(hosts, body, is_shared=parts == "shm and tcp", crowded=parts != "tcp")


def test_there_is_no_board_where_none_joins_the_hosts() -> None:
    """As where Gloo joins them, whichever backend the members of a host have."""

    class Silent(MessagingBackend):
        def __init__(self) -> None:
            return

    member = Hosts(HOSTS["2+2"]).member(0)
    member._flat = Silent()
    assert member.vote() is None


def test_the_waits_of_stages_are_late_only_if_nobody_has_agreed_ahead() -> None:
    """Members that have agreed know that all are there; their further waits are waits inside of the operation."""

    def body(rank: int) -> None:
        member, seen = group.member(rank), []
        for part, waits in ((member._local, (1.0, 2.0)), (member._cross, (4.0, 8.0)), (member._flat, (16.0, 32.0))):
            vars(part)["waited"] = lambda waits=waits: waits
        assert member.waited() == (21.0, 42.0)
        assert vote_of(member).attempt(7, lambda: seen.append(member.waited()), ignore, nothing)
        assert seen == [(16.0 + 3.0 + 12.0, 47.0)], "also the waits of the stages before all had agreed"
        assert member.waited() == (21.0, 42.0)

    group = Hosts(HOSTS["2+2"])
    in_threads(group.size, body)
