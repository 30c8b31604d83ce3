"""Two hosts, of ranks 0 and 1 and of ranks 2, 3 and 4: ranks 3 and 4 have no connection but that to their leader."""

import socket
from contextlib import contextmanager

import pytest

from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError
from collectives.controller.aggregation import Aggregator
from collectives.controller.errors import ErrorData
from collectives.controller.messages import Abort, Accusation, Inquiry, Ping, Pong, Stop, encode
from collectives.controller.process_sets import ProcessSets
from collectives.engine.start import StartupBarrier
from collectives.net import relay, sockets
from collectives.net.relay import Center, Follower, Leader, Relay
from collectives.net.sockets import Connection, SocketChannel
from tests.collectives.engine.job import PATIENCE, until
from tests.collectives.net.test_relay import Tree, stopped_relay

__all__ = ["stopped_relay"]

HERE, LEADER, FOLLOWERS = (2, 3, 4), 2, (3, 4)
ABORT = Abort(ErrorData("HorovodInternalError", "why"))


class FollowersTree(Tree):
    """``channels[rank]``; ``lost[rank]`` are the ranks that this rank has lost. ``pairs`` are connections to rank 0."""

    def __init__(self):
        self.pairs = {rank: socket.socketpair() for rank in (1, LEADER)}
        near = {rank: Connection(pair[0]) for rank, pair in self.pairs.items()}
        far = {rank: Connection(pair[1]) for rank, pair in self.pairs.items()}
        inner = {rank: tuple(map(Connection, socket.socketpair())) for rank in HERE}
        self.inner = {rank: ends[1] for rank, ends in inner.items()}
        theirs = {rank: ends[0] for rank, ends in inner.items()}
        self.relay = Relay(LEADER, far[LEADER], theirs, Aggregator(HERE, ProcessSets(5)), speaks=True)
        self.channels = [
            Center(5, near, {LEADER: HERE}, {}),
            SocketChannel(1, 5, {0: far[1]}),
            Leader(LEADER, 5, self.inner[LEADER], self.relay),
            *(Follower(rank, 5, LEADER, self.inner[rank]) for rank in FOLLOWERS),
        ]
        self.lost = {rank: [] for rank in range(5)}

    def loses(self, rank, other):
        """Whether ``rank`` has lost ``other``, and nobody else. It reads its messages."""
        self.channels[rank].receive()
        return self.lost[rank] == [other]


@contextmanager
def tree():
    made = FollowersTree()
    made.watch()
    try:
        yield made
    finally:
        for channel in made.channels:
            channel.close()


def test_messages_find_their_way_both_ways_also_the_direct_ones():
    with tree() as job:
        for rank in range(1, 5):
            job.channels[rank].send(0, encode(Stop(rank)))
            job.channels[rank].send_directly((0,), encode(Pong()))
        expected = [(rank, message) for rank in range(1, 5) for message in (Stop(rank), Pong())]
        assert sorted(job.hear(0, 8), key=lambda found: found[0]) == expected
        job.channels[0].send_directly(range(1, 5), encode(Ping()))
        job.channels[0].send_to(range(1, 5), encode(Stop(0)))
        for rank in range(1, 5):
            assert job.hear(rank, 2) == [(0, Ping()), (0, Stop(0))]


def test_rank_0_knows_who_reaches_it_through_whom_and_has_a_connection_for_each_host():
    with tree() as job:
        assert job.channels[0].leaders == {3: LEADER, 4: LEADER}
        assert [*job.channels[0].relayed] == []
        assert set(job.channels[0]._connections) == {1, LEADER}
        assert all(not channel.leaders for channel in job.channels[1:])


@pytest.mark.parametrize("victim", FOLLOWERS)
def test_a_dead_follower_is_known_to_rank_0_only_and_behind_its_last_message(victim):
    with tree() as job:
        job.channels[victim].send(0, encode(ABORT))
        job.inner[victim].hang_up()
        heard = []
        job.channels[0].watch(lambda rank: heard.append(("lost", rank)))
        while ("lost", victim) not in heard:
            job.channels[0].poll(PATIENCE)
            heard += [("said", rank) for rank, _ in job.channels[0].receive()]
        assert sorted(heard) == [("lost", victim), ("said", victim)]
        assert not any(job.lost[rank] for rank in range(1, 5) if rank != victim)


def test_a_dead_leader_is_known_to_rank_0_and_to_its_followers():
    with tree() as job:
        job.channels[LEADER].close()
        until(lambda: all(job.loses(rank, LEADER) for rank in (0, *FOLLOWERS)))
        assert job.lost[1] == []


def test_a_dead_rank_0_is_known_to_all_and_nobody_takes_the_leader_for_dead():
    """The leader closes at once, and the followers read late."""
    with tree() as job:
        for near, _ in job.pairs.values():
            near.shutdown(socket.SHUT_RDWR)
        until(lambda: job.lost[LEADER] == [0])
        job.inner[LEADER].hang_up()
        job.relay._thread.join(0.2)
        assert not any(job.lost[rank] for rank in FOLLOWERS)
        for rank in FOLLOWERS:
            until(lambda rank=rank: job.loses(rank, 0))
            job.inner[rank].hang_up()
        until(lambda: not job.relay._thread.is_alive())
        assert all(job.lost[rank][:1] == [0] for rank in range(1, 5))


def test_the_relay_ends_though_a_follower_does_not_read_that_rank_0_is_dead(monkeypatch):
    monkeypatch.setattr(relay, "FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(sockets, "FLUSH_SECONDS", 1.0)
    with tree() as job:
        job.pairs[LEADER][0].shutdown(socket.SHUT_RDWR)
        until(lambda: job.lost[LEADER] == [0])
        job.inner[LEADER].hang_up()
        until(lambda: not job.relay._thread.is_alive())


def test_the_reason_of_rank_0_comes_before_its_end():
    with tree() as job:
        job.channels[0].send_to(range(1, 5), encode(ABORT))
        job.channels[0].close()
        for rank in FOLLOWERS:
            heard = []
            job.channels[rank].watch(lambda lost, heard=heard: heard.append(lost))
            assert job.hear(rank) == [(0, ABORT)]
            until(lambda rank=rank, heard=heard: job.channels[rank].receive() or heard == [0])


# Silence.


@pytest.mark.parametrize("question", [Inquiry(), Accusation(ABORT.error)], ids=["inquiry", "accusation"])
def test_a_follower_knows_from_its_relay_that_rank_0_is_silent(question):
    with tree() as job:
        follower = job.channels[3]
        assert follower.silent_rank == 0
        follower.send_directly((0,), encode(question))
        assert follower.silent_rank == LEADER
        until(lambda: follower.receive() == [] and follower.silent_rank == 0)
        assert job.hear(0) == [(3, question)]


def test_a_follower_that_asks_nobody_names_rank_0():
    """No rank is relayed for a follower, so that some messages have no receiver, and no answer."""
    with tree() as job:
        job.channels[3].send_directly((), encode(Inquiry()))
        assert job.channels[3].silent_rank == 0


def test_a_follower_names_its_leader_where_the_relay_is_stopped(stopped_relay):
    with tree() as job:
        job.channels[3].send_directly((0,), encode(Inquiry()))
        assert job.channels[3].receive() == []
        assert job.channels[3].silent_rank == LEADER
        stopped_relay.set()


def test_a_start_that_a_stopped_leader_holds_up_names_it_on_rank_0_and_on_a_follower(stopped_relay, monkeypatch):
    """Rank 0 gets no answer from the followers either, which prove nothing. The other ranks answer."""
    monkeypatch.setattr("collectives.engine.start.VERDICT_SECONDS", 0.5)
    late = CollectiveTimeoutError("rank 1 is late", [1])
    with tree() as job:
        parts = [StartupBarrier(channel, "aabbb") for channel in job.channels]
        assert parts[3].explain(late, []).ranks == (LEADER,)
        parts[0]._accuse(late)
        parts[1].check()

        def verdict():
            try:
                parts[0].check()
            except HorovodInternalError as error:
                return error
            return None

        until(lambda: verdict() is not None)
        assert verdict().ranks == (LEADER,)
        stopped_relay.set()


def test_an_abort_of_a_follower_reaches_its_host_and_rank_0():
    with tree() as job:
        StartupBarrier(job.channels[3], "aabbb").abort(PeerLostError("rank 9 is gone", [9]))
        for rank in (0, LEADER, 4):
            [(_, message)] = job.hear(rank)
            assert message.error.text == "rank 9 is gone"
