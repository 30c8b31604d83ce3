"""The channels of two hosts, of ranks 0 and 1 and of ranks 2, 3 and 4, where rank 2 has the relay."""

import socket
import threading
import time
from contextlib import contextmanager

import pytest

from collectives.api import EngineError, HorovodInternalError, Operation, PeerLostError, Request
from collectives.controller.aggregation import Aggregator
from collectives.controller.errors import ErrorData, pack
from collectives.controller.messages import (
    Abort,
    Leave,
    Left,
    Ping,
    Pong,
    Ready,
    Response,
    Run,
    Stop,
    Together,
    decode,
    encode,
)
from collectives.controller.process_sets import ProcessSets
from collectives.engine.coordinator_link import LocalLink
from collectives.engine.link import RemoteLink
from collectives.engine.start import StartupBarrier
from collectives.events import EventStream
from collectives.net import relay, sockets
from collectives.net.frames import LENGTH
from collectives.net.relay import Center, Leader, Leaf, Relay
from collectives.net.sockets import Connection, SocketChannel
from tests.collectives.backends.members import in_threads
from tests.collectives.engine.job import PATIENCE, until

HERE = (2, 3, 4)
LEADER = 2
ABORT = encode(Abort(ErrorData("HorovodInternalError", "why")))
RUN = encode(Run(((1,),), (Response(1, Request("a", Operation.ALLREDUCE)),)))


class Tree:
    """``channels[rank]``; ``lost[rank]`` are the ranks that this rank has lost."""

    def __init__(self):
        self.pairs = {rank: socket.socketpair() for rank in range(1, 5)}
        near = {rank: Connection(pair[0]) for rank, pair in self.pairs.items()}
        far = {rank: Connection(pair[1]) for rank, pair in self.pairs.items()}
        inner = {rank: tuple(map(Connection, socket.socketpair())) for rank in HERE}
        theirs = {rank: ends[0] for rank, ends in inner.items()}
        self.relay = Relay(LEADER, far[LEADER], theirs, Aggregator(HERE, ProcessSets(5)))
        self.inner = {rank: ends[1] for rank, ends in inner.items()}
        self.channels = [
            Center(5, {1: near[1], LEADER: near[LEADER]}, {LEADER: HERE}, {rank: near[rank] for rank in (3, 4)}),
            SocketChannel(1, 5, {0: far[1]}),
            Leader(LEADER, 5, self.inner[LEADER], self.relay),
            *(Leaf(rank, 5, LEADER, self.inner[rank], far[rank]) for rank in (3, 4)),
        ]
        self.lost = {rank: [] for rank in range(5)}

    def watch(self):
        for rank, channel in enumerate(self.channels):
            channel.watch(self.lost[rank].append)

    def hear(self, rank, count=1):
        """The next ``count`` messages that arrive at ``rank``."""
        found = []
        while len(found) < count:
            self.channels[rank].poll(PATIENCE)
            found += [(sender, decode(data)) for sender, data in self.channels[rank].receive()]
        return found


@contextmanager
def tree():
    made = Tree()
    try:
        yield made
    finally:
        for channel in made.channels:
            channel.close()


def test_messages_find_their_way_both_ways():
    with tree() as job:
        for rank in range(1, 5):
            job.channels[rank].send(0, encode(Stop(rank)))
        assert sorted(job.hear(0, 4), key=lambda found: found[0]) == [(rank, Stop(rank)) for rank in range(1, 5)]
        for rank in range(1, 5):
            job.channels[0].send(rank, encode(Stop(rank)))
            assert job.hear(rank) == [(0, Stop(rank))]


@pytest.fixture
def stopped_relay(monkeypatch):
    """A relay that passes nothing on until the event is set."""
    resumed, step = threading.Event(), Relay._step
    monkeypatch.setattr(Relay, "_step", lambda self: resumed.wait(PATIENCE) and step(self))
    return resumed


def test_direct_messages_pass_a_stopped_relay_both_ways(stopped_relay):
    with tree() as job:
        job.watch()
        for rank in (3, 4):
            job.channels[rank].send_directly((0,), encode(Pong()))
            assert job.hear(0) == [(rank, Pong())]
        job.channels[0].send_directly((1, 3, 4), encode(Ping()))
        for rank in (1, 3, 4):
            assert job.hear(rank) == [(0, Ping())]
        stopped_relay.set()


def test_the_reason_of_an_end_passes_a_stopped_relay_and_comes_before_the_end(stopped_relay, monkeypatch):
    monkeypatch.setattr(sockets, "FLUSH_SECONDS", 0.1)
    with tree() as job:
        job.watch()
        job.channels[0].send_directly((3,), ABORT)
        job.channels[0].close()
        until(lambda: job.lost[3] == [0])
        assert job.channels[3].receive() == [(0, ABORT)]
        stopped_relay.set()


def test_one_frame_serves_all_ranks_of_a_host(monkeypatch):
    with tree() as job:
        frames = []
        center = job.channels[0]._connections[LEADER]
        monkeypatch.setattr(center, "send", lambda data, send=center.send: (frames.append(data), send(data)))
        job.channels[0].send_to((1, 3, 4), encode(Stop(0)))
        assert [job.hear(rank) for rank in (1, 3, 4)] == [[(0, Stop(0))]] * 3
        assert frames == [relay.pack_envelope((3, 4), encode(Stop(0)))]
        assert job.channels[LEADER].receive() == []


def test_ids_arrive_together(monkeypatch):
    monkeypatch.setattr(relay, "HOLD_SECONDS", 10 * PATIENCE)
    with tree() as job:
        job.channels[0].send_to(HERE, RUN)
        for rank in HERE:
            job.hear(rank)
            job.channels[rank].send(0, encode(Ready(ids=(1,))))
        assert job.hear(0) == [(LEADER, Together(HERE, (1,)))]


def test_what_is_held_for_long_goes_up_by_rank(monkeypatch):
    monkeypatch.setattr(relay, "HOLD_SECONDS", 0.01)
    with tree() as job:
        job.channels[0].send_to(HERE, RUN)
        for rank in HERE:
            job.hear(rank)
        for rank in (3, 4):
            job.channels[rank].send(0, encode(Ready(ids=(1,))))
            assert job.hear(0) == [(rank, Ready(ids=(1,)))]


def test_large_messages_of_all_at_once():
    """More than any socket takes, to ranks that read late, by a relay that never waits for one of them."""
    text = "x" * (8 << 20)

    def body(rank):
        channel = job.channels[rank]
        if rank == 0:
            channel.send_to(range(1, 5), encode(Abort(ErrorData("down", text))))
        else:
            channel.send(0, encode(Leave()))
            channel.send(0, encode(Abort(ErrorData("up", text))))
        found = []
        # An Abort goes to the others of the host, too.
        expected = {0: 8, 1: 1}.get(rank, 4)
        while len(found) < expected or channel.has_unsent:
            channel.poll(PATIENCE)
            found += [decode(data) for _, data in channel.receive()]
        return found

    with tree() as job:
        center, one, *others = in_threads(5, body, PATIENCE)
    assert [message for message in center if message != Leave()] == [Abort(ErrorData("up", text))] * 4
    assert one == [Abort(ErrorData("down", text))]
    assert all(found.count(Abort(ErrorData("down", text))) == 1 for found in others)


def link(channel):
    """The link of an engine that only ends the job."""
    if channel.rank == 0:
        return LocalLink(channel, None, None, None, None, None, EventStream(), (), "")
    return RemoteLink(channel, EventStream())


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("part", [link, lambda channel: StartupBarrier(channel, ())], ids=["job", "start"])
def test_a_rank_that_aborts_does_not_wait_for_a_stopped_relay(stopped_relay, monkeypatch, part, rank):
    with tree() as job:
        job.watch()
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "await_hang_up", lambda *_: pytest.fail("the rank waits for the relay"))
            part(job.channels[rank]).abort(HorovodInternalError("why"))
            job.channels[rank].close()
        other = 3 - rank
        until(lambda: job.lost[other] == [rank])
        assert (rank, decode(ABORT)) in [(sender, decode(data)) for sender, data in job.channels[other].receive()]
        stopped_relay.set()


# The end.


@pytest.mark.parametrize("closing", range(5))
def test_who_closes_is_known_and_was_heard_before(closing):
    """By all that are connected to it; those behind a relay have others to tell them."""
    losers = {0: (1, 2, 3, 4), 1: (0,), 2: (0, 3, 4), 3: (0,), 4: (0,)}[closing]
    last = encode(Left())
    with tree() as job:
        heard = []
        for rank in losers:
            # What was said has arrived when the end is known: the callback finds it.
            channel = job.channels[rank]
            channel.watch(
                lambda lost, rank=rank, channel=channel: heard.append((rank, lost, [d for _, d in channel.receive()]))
            )
        if closing == 0:
            job.channels[0].send_to(range(1, 5), last)
        else:
            job.channels[closing].send(0, last)
        job.channels[closing].close()
        until(lambda: len(heard) == len(losers))
        told = losers if closing == 0 else (0,)
        assert sorted(heard) == [(rank, closing, [last] if rank in told else []) for rank in losers]


@pytest.mark.parametrize("victim", [3, 4])
def test_a_dead_rank_is_known_to_rank_0(victim):
    with tree() as job:
        job.watch()
        job.pairs[victim][1].shutdown(socket.SHUT_RDWR)
        job.inner[victim].hang_up()
        until(lambda: job.lost[0] == [victim])
        assert not any(job.lost[rank] for rank in range(5) if rank not in (0, victim))


def test_a_dead_leader_is_known_to_rank_0_and_to_its_host():
    with tree() as job:
        job.watch()
        job.channels[LEADER].close()
        until(lambda: all(job.lost[rank] == [LEADER] for rank in (0, 3, 4)))
        assert job.lost[1] == []


def test_a_dead_rank_0_is_known_to_all():
    """The relay stays, so that nobody takes its leader for dead."""
    with tree() as job:
        job.watch()
        for near, _ in job.pairs.values():
            near.shutdown(socket.SHUT_RDWR)
        until(lambda: all(job.lost[rank] == [0] for rank in range(1, 5)))


def test_an_abort_reaches_the_host_even_if_rank_0_does_not_answer():
    abort = Abort(ErrorData("kind", "why"))
    with tree() as job:
        job.channels[LEADER].send(0, encode(abort))
        job.channels[LEADER].close()
        assert job.hear(3) == job.hear(4) == [(0, abort)]
        assert job.hear(0) == [(LEADER, abort)]


def lost_rank(rank):
    """As it arrives."""
    return decode(encode(Abort(pack(PeerLostError(f"rank {rank} is gone", [rank], ["host"])))))


def test_a_leader_hears_of_a_lost_rank_0_from_the_others_of_its_host():
    """Its own connection to rank 0 carries messages, and the kernel may notice the end of that one much later."""
    with tree() as job:
        job.watch()
        job.pairs[3][0].shutdown(socket.SHUT_RDWR)
        until(lambda: job.lost[3] == [0])
        abort = lost_rank(0)
        job.channels[3].send(0, encode(abort))
        until(lambda: job.lost[LEADER] == [0])
        assert job.hear(LEADER) == job.hear(4) == [(0, abort)]


def test_another_error_of_a_rank_is_no_loss_of_rank_0():
    abort = lost_rank(4)
    with tree() as job:
        job.watch()
        job.channels[3].send(0, encode(abort))
        assert job.hear(LEADER) == job.hear(4) == [(0, abort)]
        job.channels[0].send(LEADER, encode(Stop(0)))
        assert job.hear(LEADER) == [(0, Stop(0))]
        assert job.lost[LEADER] == []


DAMAGE = {
    "a senseless message of a rank": lambda job: job.channels[3].send(0, b"\xc1"),
    "a senseless length of a rank": lambda job: job.inner[3]._socket.sendall(LENGTH.pack(1 << 31)),
    "a senseless length of rank 0": lambda job: job.pairs[LEADER][0].sendall(LENGTH.pack(1 << 31)),
    "a senseless envelope of rank 0": lambda job: job.channels[0]._connections[LEADER].send(b"x"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_ends_the_job_with_a_reason(damage, caplog):
    with tree() as job:
        DAMAGE[damage](job)
        for rank in (0, LEADER, 4):
            reason = job.hear(rank)[-1][1]
            assert (type(reason), reason.error.kind) == (Abort, "EngineError")
            assert reason.error.text.startswith(f"the relay in the process of rank {LEADER} failed: a")
    assert "the relay in the process of rank 2" in caplog.text


@pytest.mark.parametrize(
    "frame", [b"", b"\0\0\0", relay.pack_envelope((), b"x"), relay.pack_envelope((1, 2), b"")[:-1]]
)
def test_a_broken_envelope_is_refused(frame):
    with pytest.raises(EngineError, match="an envelope"):
        relay.unpack_envelope(frame)


def test_closing_ends_the_relay_though_nobody_reads(monkeypatch):
    monkeypatch.setattr(relay, "FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(sockets, "FLUSH_SECONDS", 1.0)
    with tree() as job:
        job.channels[0].send_to(HERE, encode(Abort(ErrorData("kind", "x" * (4 << 20)))))
        for channel in job.channels:
            channel.close()
        until(lambda: not job.relay._thread.is_alive())


def test_a_forked_child_closes_everything():
    """As far as descriptors go, the same as in the child: the fixture of all tests counts them."""
    job = Tree()
    job.channels[LEADER]._connections[0].hang_up()
    job.relay._thread.join(PATIENCE)
    for channel in job.channels:
        channel.disown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hvd-relay")]


def test_a_rank_that_does_not_read_delays_no_other_hang_up(monkeypatch):
    """Rank 0 learns at once that the leader has ended, although the relay still has data for a stopped rank."""
    monkeypatch.setattr(relay, "FLUSH_SECONDS", PATIENCE)
    with tree() as job:
        job.channels[0].send_to((3,), encode(Abort(ErrorData("EngineError", "x" * (1 << 22)))))
        until(lambda: job.channels[0].flush(0.1) or not job.channels[0].has_unsent)
        job.inner[LEADER].hang_up()
        begin = time.monotonic()
        job.channels[0]._connections[LEADER].await_hang_up(begin + PATIENCE)
        assert time.monotonic() < begin + PATIENCE / 2
        until(lambda: job.channels[3].receive() or not job.relay._thread.is_alive())
