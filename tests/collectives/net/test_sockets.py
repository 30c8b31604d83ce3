"""The channel over sockets: frames, wakes, hang-ups, and the end."""

import os
import socket
import threading
from contextlib import contextmanager

import pytest

from collectives.api import EngineError
from collectives.net.frames import LENGTH
from collectives.net.sockets import Connection, SocketChannel, end_in_silence
from tests.collectives.backends.members import in_threads
from tests.collectives.engine.job import PATIENCE, until

MEBIBYTE = 1 << 20
LENGTHS = [0, 1, 5, (1 << 16) - 4, 1 << 16, (1 << 16) + 1, 3 * MEBIBYTE, 0, 2]


def unix_pair():
    return socket.socketpair()


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    return here, there


@contextmanager
def star(size, pair=unix_pair):
    """The channels of all ranks; closed at the end."""
    ends = {rank: pair() for rank in range(1, size)}
    center = SocketChannel(0, size, {rank: Connection(here) for rank, (here, _) in ends.items()})
    channels = [center, *(SocketChannel(rank, size, {0: Connection(there)}) for rank, (_, there) in ends.items())]
    try:
        yield channels
    finally:
        for channel in channels:
            channel.close()


def messages(seed):
    return [bytes([seed + index]) * length for index, length in enumerate(LENGTHS)]


def receive(channel, count):
    """The next ``count`` messages; goes on until everything is sent, too."""
    found = []
    while len(found) < count or channel.has_unsent:
        channel.poll(PATIENCE)
        arrived = channel.receive()
        found.extend(arrived)
    return found


@pytest.mark.parametrize("pair", [unix_pair, tcp_pair])
def test_messages_of_any_size_both_ways_at_once(pair):
    def body(rank):
        for message in messages(rank):
            for peer in (1, 2) if rank == 0 else (0,):
                channels[rank].send(peer, message)
        return receive(channels[rank], len(LENGTHS) * (2 if rank == 0 else 1))

    with star(3, pair) as channels:
        center, *others = in_threads(3, body, PATIENCE)
    for rank in (1, 2):
        assert [data for sender, data in center if sender == rank] == messages(rank)
        assert others[rank - 1] == [(0, data) for data in messages(0)]


def test_sending_never_waits_and_polling_sends_the_rest():
    data = bytes(8 * MEBIBYTE)
    with star(2) as (here, there):
        here.send(1, data)
        here.send(1, b"more")
        assert here.has_unsent
        sender = threading.Thread(target=lambda: receive(here, 0))
        sender.start()
        assert receive(there, 2) == [(0, data), (0, b"more")]
        sender.join(PATIENCE)
        assert not here.has_unsent


def test_a_frame_may_arrive_byte_by_byte():
    here, there = unix_pair()
    connection = Connection(there)
    frames = b"".join(LENGTH.pack(len(word)) + word for word in (b"one", b"", b"three"))
    found = []
    for number in frames:
        here.send(bytes([number]))
        found += connection.receive()
    here.close(), connection.close()
    assert found == [b"one", b"", b"three"]


def test_nothing_to_receive_is_no_wait():
    with star(2) as (here, there):
        assert here.receive() == there.receive() == []
        here.poll(0.0)
        here.poll(-1.0)


def test_a_wake_ends_a_poll_now_or_the_next_one():
    with star(2) as (here, _):
        here.wake()
        here.wake()
        here.poll(None)
        sleeper = threading.Thread(target=here.poll, args=(None,))
        sleeper.start()
        here.wake()
        sleeper.join(PATIENCE)
        assert not sleeper.is_alive()


def test_several_threads_may_poll():
    with star(2) as (here, there):
        ended = []
        sleepers = [threading.Thread(target=lambda: ended.append(here.poll(None))) for _ in range(3)]
        for sleeper in sleepers:
            sleeper.start()
        until(lambda: [here.wake(), len(ended) == 3][1])
        for sleeper in sleepers:
            sleeper.join(PATIENCE)
        there.send(0, b"x")
        assert receive(here, 1) == [(1, b"x")]


def test_a_closed_peer_is_reported_once_and_by_rank():
    lost = {rank: [] for rank in range(3)}
    with star(3) as channels:
        for rank, channel in enumerate(channels):
            channel.watch(lost[rank].append)
        channels[2].close()
        until(lambda: lost[0] == [2])
        assert not lost[1]
        channels[0].close()
        until(lambda: lost[1] == [0])
        channels[1].close()
    assert lost == {0: [2], 1: [0], 2: []}


def test_a_peer_that_is_lost_twice_is_reported_once():
    """A relay may tell the same end again."""
    near, far = socket.socketpair()
    channel, lost = SocketChannel(0, 2, {1: Connection(near)}), []
    channel.watch(lost.append)
    channel._lose(1)
    far.close()
    channel._lose(1)
    assert lost == [1]
    channel.close()


def test_a_peer_that_was_lost_before_the_watch_is_reported_too():
    lost = []
    with star(2) as (here, there):
        there.close()
        here.watch(lost.append)
        until(lambda: lost == [1])


@pytest.mark.parametrize("pair", [unix_pair, tcp_pair])
def test_what_was_sent_before_the_end_arrives(pair):
    with star(2, pair) as (here, there):
        here.send(1, bytes(4 * MEBIBYTE))
        here.send(1, b"farewell")
        closing = threading.Thread(target=here.close)
        closing.start()
        assert [len(data) for _, data in receive(there, 2)] == [4 * MEBIBYTE, 8]
        closing.join(PATIENCE)
        assert not closing.is_alive()


def test_closing_does_not_wait_forever_for_a_peer_that_does_not_read(monkeypatch):
    monkeypatch.setattr("collectives.net.sockets.FLUSH_SECONDS", 0.05)
    with star(3) as channels:
        for rank in (1, 2):
            channels[0].send(rank, bytes(4 * MEBIBYTE))
        channels[0].close()
        assert channels[1].receive() == []


def test_a_channel_is_closed_any_number_of_times_and_then_silent():
    with star(2) as (here, there):
        here.watch(lambda rank: None)
        for _ in range(2):
            here.close()
        here.wake()
        here.send(1, b"too late")
        there.send(0, b"to nobody")
        assert there.receive() == []


def test_disowning_a_closed_channel_hits_no_foreign_descriptors():
    with star(2) as channels:
        for channel in channels:
            channel.close()
        foreign = [descriptor for _ in range(4) for descriptor in os.pipe()]  # they get the numbers that became free
        for channel in channels:
            channel.disown()
        for descriptor in foreign:
            os.close(descriptor)


def test_the_watch_may_close_its_own_channel():
    closed = threading.Event()
    with star(2) as (here, there):
        here.watch(lambda rank: (here.close(), closed.set()))
        there.close()
        assert closed.wait(PATIENCE)


# Many peers, damage, silence.


def test_a_center_hears_all_who_talk_and_only_those():
    with star(5) as channels:
        for rank in (2, 4):
            channels[rank].send(0, b"from %d" % rank)
        found = []
        until(lambda: found.extend(channels[0].receive()) or len(found) == 2)
        assert sorted(found) == [(2, b"from 2"), (4, b"from 4")]
        assert channels[0].receive() == []


@pytest.mark.parametrize("size", [2, 4])
def test_receiving_sends_what_was_kept(size):
    data = bytes(8 * MEBIBYTE)
    with star(size) as channels:
        channels[0].send_to(range(1, size), data)
        assert channels[0].has_unsent
        for channel in channels[1:]:
            found = []
            until(lambda: channels[0].receive() or found.extend(channel.receive()) or found)  # noqa: B023
            assert found == [(0, data)]
        assert not channels[0].has_unsent


@pytest.mark.parametrize("size", [2, 3])
def test_a_frame_of_a_senseless_length_is_refused_before_it_is_read(size):
    here, there = unix_pair()
    ends = [unix_pair() for _ in range(2, size)]
    connections = {1: Connection(there)} | {rank: Connection(end) for rank, (end, _) in enumerate(ends, 2)}
    channel = SocketChannel(0, size, connections)
    try:
        here.sendall(LENGTH.pack(1 << 30) + b"rest")
        with pytest.raises(EngineError, match=r"rank 1 to rank 0 is out of step: a frame of 1073741824 bytes"):
            channel.receive()
        assert channel.receive() == []
        channel.send(1, b"because")
        assert here.recv(100) == LENGTH.pack(7) + b"because"
    finally:
        channel.close()
        for sock in (here, *(far for _, far in ends)):
            sock.close()


def test_damage_ends_the_connection():
    lost = []
    here, there = tcp_pair()
    channel = SocketChannel(0, 2, {1: Connection(there)})
    with here:
        channel.watch(lost.append)
        here.sendall(LENGTH.pack(1 << 30))
        with pytest.raises(EngineError):
            until(channel.receive)
        until(lambda: lost == [1])
        channel.close()


@pytest.mark.parametrize("seconds", [0.5, 1.0, 5.0, 60.0])
def test_the_kernel_ends_a_silent_connection_in_time(seconds):
    here, there = tcp_pair()
    with here, there:
        end_in_silence(here, seconds)
        assert here.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count, unanswered = (
            here.getsockopt(socket.IPPROTO_TCP, option)
            for option in (
                socket.TCP_KEEPIDLE,
                socket.TCP_KEEPINTVL,
                socket.TCP_KEEPCNT,
                socket.TCP_USER_TIMEOUT,
            )
        )
        assert unanswered == 1000 * seconds
        assert seconds <= idle + interval * count < seconds + max(interval, 2)


def test_the_process_at_the_other_end_is_known_within_a_host():
    near, far = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    remote = socket.create_connection(listener.getsockname())
    with near, far, listener, remote:
        channel = SocketChannel(0, 3, {1: Connection(near), 2: Connection(remote)})
        assert [channel.process(rank) for rank in (1, 2, 3)] == [os.getpid(), None, None]
        channel.close()


def test_a_unix_socket_cannot_fall_silent():
    here, there = unix_pair()
    with here, there:
        end_in_silence(here, 5.0)
