"""Members that share cores vote through one of them, the hub: what differs from a mesh."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from collectives.api import EngineError, PeerLostError
from collectives.backends.tcp import TcpBackend, star
from collectives.backends.tcp.link import TcpLink
from collectives.backends.tcp.mesh import Mesh
from collectives.backends.tcp.star import Hub, Spoke
from collectives.store.memory import MemoryStore
from tests.collectives.backends import offers
from tests.collectives.backends.members import group_of
from tests.collectives.backends.tcp.groups import connect, with_backends
from tests.collectives.backends.tcp.votes import NAMES, Operations, ignore, nothing, vote_of


@pytest.mark.parametrize(
    ("crowded", "kinds"),
    [([True] * 3, [Hub, Spoke, Spoke]), ([False, True, False], [Hub, Spoke, Spoke]), ([False] * 3, [Mesh] * 3)],
)
def test_all_members_take_the_same_shape(crowded: list[bool], kinds: list[type]) -> None:
    """Some ranks may see more cores than others."""
    store = MemoryStore()
    found: dict[int, type] = {}

    def body(member: TcpBackend) -> None:
        found[member.rank] = type(member._tcp.ballot)

    offers.with_backends(3, lambda rank: connect(group_of(3, rank), store, crowded=crowded[rank]), body)
    assert [found[rank] for rank in range(3)] == kinds


def test_two_members_need_no_hub() -> None:
    def body(member: TcpBackend) -> None:
        assert isinstance(member._tcp.ballot, Mesh)

    with_backends(2, body)


def test_what_the_hub_passes_on_is_bounded() -> None:
    assert star.riding(3, 1 << 16) == 1 << 16
    assert star.riding(64, 1 << 16) * 63**2 <= star.MOST_PASSED_ON


@pytest.mark.parametrize("length", [300, 600])
def test_longer_messages_travel_between_their_members(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(star, "MOST_PASSED_ON", 9 * 8 * 400)

    def body(member: TcpBackend) -> None:
        operations, vote = Operations(member, length), vote_of(member)
        for value, name in enumerate(NAMES, 1):
            expected = operations.expect(name)
            assert vote.attempt(value, lambda: operations.call(name), ignore, nothing)  # noqa: B023
            assert np.array_equal(operations.result, expected)

    with_backends(4, body)


def test_the_hub_tells_others_now_and_then_whom_they_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectives.backends.tcp.star.TELL_SECONDS", 0.0)

    def body(member: TcpBackend) -> None:
        vote, seen = vote_of(member), []

        def waiting(absent: list[int]) -> None:
            seen.append(absent)
            calls[member.rank] = len(seen)
            if absent == [2] and min(calls[:2]) > 20:
                late.set()

        if member.rank == 2:
            assert late.wait(20)
        if member.rank == 0:
            link = member._tcp._links[1]
            send = link.send
            vars(link)["send"] = lambda views: sent.append(1) or send(views)
        assert vote.attempt(7, nothing, waiting, nothing)
        if member.rank == 1:
            assert seen[-1] == [2]

    calls, sent, late = [0, 0, 0], [], threading.Event()
    with_backends(3, body)
    assert len(sent) == 2, "one note and the answer"


def test_members_agree_without_an_operation_in_a_star() -> None:
    def body(member: TcpBackend) -> None:
        calls: list[str] = []
        vote = vote_of(member)
        assert not vote.attempt(7 + (member.rank == 1), nothing, ignore, pytest.fail)
        assert vote.attempt(7, nothing, ignore, lambda: calls.append("agreed"))
        assert calls == ["agreed"]

    with_backends(3, body)


def test_each_member_checks_what_came_from_each() -> None:
    """The lengths of two members are wrong, and their sum is right."""

    def body(member: TcpBackend) -> None:
        length = {1: 8, 2: 0}.get(member.rank, 4)
        outgoing = {other: [memoryview(bytes(length))] for other in range(4) if other != member.rank and length}
        incoming = {other: [memoryview(bytearray(4))] for other in range(4) if other != member.rank}
        with pytest.raises((EngineError, PeerLostError)) as caught:
            vote_of(member).attempt(7, lambda: member._tcp.trade(outgoing, incoming), ignore, nothing)
        errors[member.rank] = str(caught.value)
        ended.wait(20)

    errors: dict[int, str] = {}
    ended = threading.Barrier(4)
    with_backends(4, body)
    assert errors[3].startswith("rank 1 on host 'a' sent 8 bytes with its vote, and 4 were expected")


@pytest.mark.parametrize("lost", [0, 2])
def test_all_members_that_wait_hear_of_a_lost_one(lost: int) -> None:
    def body(member: TcpBackend) -> None:
        if member.rank == lost:
            assert waiting.wait(20)
            for link in member._tcp._links.values():
                link.shut_down()
            return
        with pytest.raises(PeerLostError) as caught:
            vote_of(member).attempt(7, nothing, lambda absent: waiting.set(), pytest.fail)
        blamed.append(caught.value.ranks)

    waiting, blamed = threading.Event(), []
    with_backends(3, body)
    assert [lost] in [list(ranks) for ranks in blamed]
    assert len(blamed) == 2


def test_a_hub_that_declines_answers_votes_that_have_not_come() -> None:
    def body(member: TcpBackend) -> None:
        vote = vote_of(member)
        if member.rank == 0:
            vote.decline()
            declined.set()
        assert declined.wait(20)
        if member.rank:
            assert not vote.attempt(7, nothing, ignore, pytest.fail)
        assert vote.attempt(8, nothing, ignore, nothing)

    declined = threading.Event()
    with_backends(3, body)


def test_data_that_a_hub_holds_is_of_the_present_round() -> None:
    """The root changes its data between two rounds, and the hub passes each version on."""

    def body(member: TcpBackend) -> None:
        vote, data = vote_of(member), np.zeros(1000)
        for value in range(1, 30):
            if member.rank == 1:
                data[:] = value
            raw = data.view(np.uint8)
            assert vote.attempt(value, lambda: member.broadcast_bytes(raw, raw, 1), ignore, nothing)  # noqa: B023
            assert (data == value).all()

    with_backends(3, body)


def hold_back(link: TcpLink, begun: threading.Event) -> Callable[[], None]:
    """Let ``link`` send only the beginning of a vote, and set ``begun``; returns the call that ends this."""
    send = link._send_some

    def send_the_beginning() -> int:
        if begun.is_set():
            raise BlockingIOError
        sent = link._socket.send(bytes(link._unsent[0]) + bytes(link._unsent[1][:10]))
        begun.set()
        return sent

    vars(link)["_send_some"] = send_the_beginning
    return lambda: vars(link).update(_send_some=send)


def test_a_parcel_of_a_round_that_the_hub_has_left_is_none_of_the_next() -> None:
    """Of the first vote of member 1, the hub has only the beginning when member 2 declines; the rest comes later."""

    def body(member: TcpBackend) -> None:
        vote, data = vote_of(member), np.zeros(1000)
        raw = data.view(np.uint8)
        call = lambda: member.broadcast_bytes(raw, raw, 1)  # noqa: E731
        if member.rank == 2:
            assert noticed.wait(20)
            vote.decline()
        else:
            restore = hold_back(member._tcp._links[0], begun) if member.rank == 1 else nothing
            data[:] = -1.0 if member.rank == 1 else 0.0
            assert not vote.attempt(7, call, first_wait if member.rank == 0 else ignore, pytest.fail)
            restore()
        if member.rank == 1:
            vote.hurry()
            assert alone.wait(20)
            data[:] = 1.0
        assert vote.attempt(7, call, second_wait if member.rank == 0 else ignore, nothing)
        alone.set()
        assert (data == 1.0).all()

    def first_wait(absent: list[int]) -> None:
        """The hub has read the beginning if there was nothing to read between two calls after that was sent."""
        if was_begun[0]:
            noticed.set()
        was_begun[0] = begun.is_set()

    def second_wait(absent: list[int]) -> None:
        if absent == [1]:
            alone.set()

    begun, noticed, alone, was_begun = threading.Event(), threading.Event(), threading.Event(), [False]
    with_backends(3, body)
