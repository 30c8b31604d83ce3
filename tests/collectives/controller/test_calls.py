"""Calls to a listening rank that are repeated: honest ranks that are slow, and addresses that belong to others now."""

import select
import socket
import threading
import time
from contextlib import closing

import msgpack
import pytest

from collectives.api import PeerLostError, Timeouts
from collectives.handshake import admission, dial, listeners, search
from collectives.handshake.hello import Hello, LocalEnd
from collectives.net import strangers
from collectives.net.attempts import ConnectAttempt
from collectives.store.memory import MemoryStore
from tests.collectives.backends.members import in_threads
from tests.collectives.engine.job import PATIENCE, until
from tests.collectives.handshake.handshakes import KEY, LOCALHOST, SECRET, connect_all, ranks

NEXT_KEY = "round-0/start-1/rank-0"


def ended(sock):
    """Whether the other side has closed the connection; the unread bytes stay."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    return bool(poller.poll(0))


@pytest.mark.parametrize("moment", ["before the hello", "after the hello"])
@pytest.mark.parametrize("hosts", [("node",), ("a", "b"), ("a", "b", "b")], ids=str)
def test_a_slow_rank_that_was_dropped_for_want_of_room_calls_again(hosts, moment, monkeypatch):
    """Each listener has room for one unauthenticated connection; the slow ranks' first hellos come too late."""
    send_hello, dropped = dial.Callee._send_hello, []

    def slow(self, entry):
        if (self._end.hello.rank, self.host) not in dropped:
            dropped.append((self._end.hello.rank, self.host))
            until(lambda: ended(self.sock))
        send_hello(self, entry)

    def hear_nothing(self, candidate):
        sock = candidate.wire.sock
        if len(dropped) < len(hosts) and sock not in dropped:
            dropped.append(sock)
            self._release(sock.fileno()).close()
        else:
            hear(self, candidate)

    hear = listeners.Candidates._hear
    if moment == "before the hello":
        monkeypatch.setattr(dial.Callee, "_send_hello", slow)
    else:
        monkeypatch.setattr(listeners.Candidates, "_hear", hear_nothing)
    monkeypatch.setattr(listeners, "MOST_CANDIDATES", 1)
    monkeypatch.setattr(listeners, "LEAST_CANDIDATES", 1)
    monkeypatch.setattr(strangers, "SILENCE", 0.02)
    size = len(hosts) + 1
    found = connect_all(ranks(size, hosts))
    assert found == [tuple(hosts[rank % len(hosts)] for rank in range(size))] * size
    assert len(dropped) >= 1


def test_a_rank_0_that_ends_before_its_first_answer_is_lost_at_once():
    """The connection broke, and then nobody listens: no rank waits for its start timeout."""

    def body(rank):
        if rank == 1:
            begin = time.monotonic()
            (error,) = connect_all([Hello(1, 3, "node")], store, timeout=4 * PATIENCE)
            return error, time.monotonic() - begin
        with ConnectAttempt(PATIENCE) as attempt:
            end = LocalEnd(Hello(0, 3, "node"), SECRET, LOCALHOST, Timeouts().heartbeat, attempt)
            with admission.Admission(end, (1, 2)) as admitting:
                store.set(KEY, msgpack.packb(admitting.entry))
                until(lambda: admit_some(admitting))
            for peer in admitting._peers.values():
                peer.wire.sock.close()
        return None

    store = MemoryStore()
    _, (error, seconds) = in_threads(2, body, 4 * PATIENCE)
    assert type(error) is PeerLostError
    assert error.ranks == (0,)
    assert seconds < PATIENCE


def admit_some(admitting):
    """Do a little of :meth:`Admission.admit_all`; returns whether a rank has been admitted."""
    admitting._candidates.make_room()
    for descriptor, _ in admitting._poller.poll(10):
        admitting._candidates.attend(descriptor)
    return bool(admitting._peers)


def test_a_call_that_is_refused_is_no_cause_of_itself():
    """A search along the causes of its error would never end."""
    with socket.socket() as gone, ConnectAttempt(PATIENCE) as attempt:
        gone.bind((LOCALHOST, 0))  # it keeps the port from others, and does not listen
        entry = {"id": "1", "host": "other", "unix": "", "tcp": gone.getsockname()}
        end = LocalEnd(Hello(2, 3, "node"), SECRET, LOCALHOST, Timeouts().heartbeat, attempt)
        with pytest.raises(dial.NoListenerError) as caught:
            dial.call(end, entry, 1, lambda seconds: None)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_a_wrong_secret_is_refused_at_once():
    store, over = MemoryStore(), threading.Event()

    def body(rank):
        if rank == 1:
            begin = time.monotonic()
            (error,) = connect_all([Hello(1, 2, "node")], store, [b"another"], timeout=4 * PATIENCE)
            over.set()
            return error, time.monotonic() - begin
        with ConnectAttempt(PATIENCE) as attempt:
            end = LocalEnd(Hello(0, 2, "node"), SECRET, LOCALHOST, Timeouts().heartbeat, attempt)
            with admission.Admission(end, (1,)) as admitting:
                store.set(KEY, msgpack.packb(admitting.entry))
                until(lambda: admit_some(admitting) or over.is_set())
        return None

    _, (error, seconds) = in_threads(2, body, 4 * PATIENCE)
    assert type(error) is PeerLostError
    assert "does not know the secret of this job, or refused this rank" in str(error)
    assert seconds < PATIENCE


# Another process at the address of rank 0.


def closes_at_once(sock):
    sock.close()


def says_nothing(sock):
    return None


def talks_of_other_things(sock):
    sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")


def listens_for_another_job(sock):
    sock.sendall(b"f" * 16 + b"n" * 32)


@pytest.mark.parametrize("stranger", [closes_at_once, talks_of_other_things, listens_for_another_job, says_nothing])
def test_a_rank_0_whose_port_belongs_to_another_process_now_is_found_in_its_next_start(stranger, monkeypatch):
    """Rank 0 ended its first start; a stranger got the port; rank 0 starts again, with another port."""
    monkeypatch.setattr(search, "FIRST_LOOK_SECONDS", 0.05)
    store, met, sockets = MemoryStore(), threading.Event(), []

    def serve(listener):
        while not met.is_set():
            sock, _ = listener.accept()
            sockets.append(sock)
            stranger(sock)
            met.set()

    with socket.create_server((LOCALHOST, 0)) as listener:
        entry = {"id": "0123456789abcdef", "host": "other", "unix": "", "tcp": listener.getsockname()}
        store.set(KEY, msgpack.packb(entry))
        serving = threading.Thread(target=serve, args=(listener,))
        serving.start()

        def body(rank):
            if rank == 0:
                met.wait(PATIENCE)
                store.set(NEXT_KEY, msgpack.packb(admitting.entry))
                admitting.admit_all()
                admitting.answer((("a", "node"), {"node": 1, "a": 1}))
                admitting.collect()
                admitting.answer([(None, b""), (None, b"")])
                return None
            return connect_all([Hello(1, 2, "node")], store)

        with ConnectAttempt(PATIENCE) as attempt:
            end = LocalEnd(Hello(0, 2, "a"), SECRET, LOCALHOST, Timeouts().heartbeat, attempt)
            with admission.Admission(end, (1,)) as admitting:
                _, found = in_threads(2, body, PATIENCE)
                serving.join(PATIENCE)
            for peer in admitting._peers.values():
                peer.wire.sock.close()
    for sock in sockets:
        sock.close()
    assert found == [("a", "node")]


def test_a_port_that_belongs_to_another_process_is_named_when_the_time_is_over():
    store = MemoryStore()
    with socket.create_server((LOCALHOST, 0)) as listener:
        store.set(KEY, msgpack.packb({"id": "1", "host": "other", "unix": "", "tcp": listener.getsockname()}))

        def answer():
            sock, _ = listener.accept()
            with closing(sock):
                sock.sendall(b"220 mail\r\n")

        stranger = threading.Thread(target=answer)
        stranger.start()
        (error,) = connect_all([Hello(1, 2, "node")], store, timeout=1.0)
        stranger.join(PATIENCE)
    assert type(error) is PeerLostError
    assert "another process listens at" in str(error)
    assert error.ranks == (0,)
