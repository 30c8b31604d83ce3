"""How ranks prove themselves, and what strangers can do."""

import logging
import socket
import threading
from contextlib import ExitStack

import msgpack
import pytest

from collectives.api import (
    CollectiveTimeoutError,
    PeerLostError,
    Timeouts,
)
from collectives.handshake import Hello, admission, listeners
from collectives.handshake.hello import LocalEnd, pack_answer, pack_hello
from collectives.net import frames, strangers
from collectives.net.attempts import ConnectAttempt
from collectives.store.memory import MemoryStore
from tests.collectives.engine.job import PATIENCE
from tests.collectives.handshake.handshakes import KEY, LOCALHOST, SECRET, connect_all, ranks

RANK_1 = pack_hello(Hello(1, 2, "node"), b"n" * 32, "")


def send(sock, data):
    sock.sendall(frames.LENGTH.pack(len(data)) + data)


def challenge(sock):
    """The nonce behind the id of the listener."""
    id_length = 2 * listeners.ID_BYTES
    return sock.recv(id_length + frames.NONCE_BYTES, socket.MSG_WAITALL)[id_length:]


def wrong_secret(sock):
    send(sock, frames.seal(b"another", challenge(sock), RANK_1))


def replayed(sock):
    send(sock, frames.seal(SECRET, b"n" * 32, RANK_1))


def for_another_process(sock):
    send(sock, frames.seal(SECRET, challenge(sock), RANK_1))


def authentic_but_senseless(value):
    def speak(sock):
        send(sock, frames.seal(SECRET, challenge(sock), msgpack.packb(value)))

    return speak


STRANGERS = {
    "says nothing and leaves": lambda sock: None,
    "garbage": lambda sock: sock.sendall(b"GET / HTTP/1.1\r\n\r\n"),
    "an empty frame": lambda sock: send(sock, b""),
    "an oversized frame": lambda sock: sock.sendall(frames.LENGTH.pack(1 << 30)),
    "half a frame": lambda sock: sock.sendall(frames.LENGTH.pack(100) + b"x"),
    "another secret": wrong_secret,
    "an old answer": replayed,
    "a hello to another process": for_another_process,
    "a number": authentic_but_senseless(7),
    "too few fields": authentic_but_senseless([1, 2]),
}


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("by_tcp", [False, True])
@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_are_refused_and_the_job_starts(stranger, by_tcp, stays, caplog):
    """Strangers come first; those that stay keep their connections open, silently, until the job has started."""
    store, results = MemoryStore(), []
    with caplog.at_level(logging.WARNING, listeners.logger.name):
        center = threading.Thread(target=lambda: results.extend(connect_all([Hello(0, 2, "node")], store)))
        center.start()
        entry = msgpack.unpackb(store.get(KEY, PATIENCE))
        family, address = (socket.AF_INET, tuple(entry["tcp"])) if by_tcp else (socket.AF_UNIX, entry["unix"])
        with ExitStack() as connections:
            for _ in range(5):
                sock = connections.enter_context(socket.socket(family))
                sock.settimeout(PATIENCE)
                sock.connect(address)
                STRANGERS[stranger](sock)
                if not stays:
                    sock.close()
            assert connect_all([Hello(1, 2, "node")], store) == [("node", "node")]
        center.join(PATIENCE)
    assert results == [("node", "node")]
    assert not caplog.records or "a connection to rank 0 was refused: " in caplog.text
    assert SECRET.decode() not in caplog.text


def test_a_hello_that_has_come_counts_though_its_connection_is_too_old(monkeypatch):
    """Rank 0 had no time for it for long, and has no room for others."""
    with ConnectAttempt(PATIENCE) as attempt:
        end = LocalEnd(Hello(0, 2, "node"), SECRET, LOCALHOST, Timeouts().heartbeat, attempt)
        with admission.Admission(end, (1,)) as admitting, socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE)
            sock.connect(admitting.entry["unix"])
            waiting = admitting._candidates
            waiting._strangers.capacity = 1
            waiting.make_room()
            for listener in admitting._listeners.by_descriptor:
                waiting.attend(listener)
            hello = pack_hello(Hello(1, 2, "node"), b"n" * 32, admitting.entry["id"])
            send(sock, frames.seal(SECRET, challenge(sock), hello))
            monkeypatch.setattr(strangers, "SILENCE", 0.0)
            peers = admitting.admit_all()
            assert list(peers) == [1]
            peers[1].wire.sock.close()


def test_an_oversized_frame_is_refused_before_it_is_read():
    store, results = MemoryStore(), []
    center = threading.Thread(target=lambda: results.extend(connect_all([Hello(0, 2, "node")], store)))
    center.start()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(msgpack.unpackb(store.get(KEY, PATIENCE))["unix"])
        sock.sendall(frames.LENGTH.pack(frames.LONGEST_HELLO + 1))
        challenge(sock)
        assert sock.recv(8) == frames.REFUSAL
        assert sock.recv(1) == b""
    connect_all([Hello(1, 2, "node")], store)
    center.join(PATIENCE)
    assert results == [("node", "node")]


def test_a_rank_with_another_secret_is_not_told_anything():
    errors = connect_all(ranks(2), secrets=[SECRET, b"another"], timeout=1.0)
    assert isinstance(errors[0], CollectiveTimeoutError)
    assert isinstance(errors[1], PeerLostError)


def test_a_false_rank_0_is_found_out():
    """A process that listens at the address without the secret cannot answer the nonce."""
    store = MemoryStore()
    with socket.create_server((LOCALHOST, 0)) as listener:
        entry = {"id": "1", "host": "other", "unix": "", "tcp": listener.getsockname()}
        store.set(KEY, msgpack.packb(entry))

        def pretend():
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"1" + b"n" * 32)
                sock.recv(1 << 16)
                send(sock, frames.seal(b"guessed", b"n" * 32, pack_answer((("a", "b"), {}))))

        liar = threading.Thread(target=pretend)
        liar.start()
        (error,) = connect_all([Hello(1, 2, "node")], store)
        liar.join(PATIENCE)
    assert isinstance(error, PeerLostError)
    assert "does not know the secret of this job" in str(error)
