"""How ranks find rank 0 and prove themselves."""

import logging
import socket
import threading
from contextlib import ExitStack

import msgpack
import pytest

from collectives.api import CollectiveTimeoutError, PeerLostError, SettingsError, Timeouts
from collectives.control import handshake
from collectives.control.handshake import Hello, Meeting
from collectives.messages import Stop, encode
from collectives.process_sets import ProcessSets
from collectives.rendezvous.store import MemoryStore
from tests.backends.members import in_threads
from tests.collectives.job import PATIENCE, outcome
from tests.collectives.test_sockets import receive

SECRET = b"not for strangers"
LOCALHOST = "127.0.0.1"


def connect(hello, store, secret=SECRET, address=LOCALHOST, timeout=PATIENCE):
    """:func:`connect_channel` with what is usual here."""
    sets = ProcessSets(hello.size)
    return handshake.connect_channel(hello, store, secret, address, Timeouts(connect=timeout), sets)


def connect_all(hellos, store=None, secrets=None, timeout=PATIENCE):
    """The hosts that each of ``hellos`` finds, or the error it meets, all at once; channels get closed."""

    def body(index):
        secret = secrets[index] if secrets else SECRET
        result = outcome(lambda: connect(hellos[index], store, secret, timeout=timeout))
        if isinstance(result, Meeting):
            channels[index] = result.channel
            return result.hosts
        return result

    store, channels = store or MemoryStore(), {}
    try:
        return in_threads(len(hellos), body, PATIENCE)
    finally:
        for channel in channels.values():
            channel.close()


def ranks(size, hosts=("node",)):
    return [Hello(rank, size, hosts[rank % len(hosts)]) for rank in range(size)]


@pytest.mark.parametrize("hosts", [("node",), ("a", "b"), ("a", "b", "b")], ids=str)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_learn_the_hosts_and_can_talk(size, hosts):
    def body(rank):
        meeting = connect(hellos[rank], store)
        channel = meeting.channel
        try:
            if rank:
                channel.send(0, encode(Stop(rank)))
                assert receive(channel, 1) == [(0, encode(Stop(-rank)))]
            else:
                assert sorted(receive(channel, size - 1)) == [(peer, encode(Stop(peer))) for peer in range(1, size)]
                for peer in range(1, size):
                    channel.send(peer, encode(Stop(-peer)))
            return meeting.hosts
        finally:
            channel.close()

    store, hellos = MemoryStore(), ranks(size, hosts)
    assert in_threads(size, body, PATIENCE) == [tuple(hello.host for hello in hellos)] * size


def test_one_host_connects_by_unix_socket_and_several_by_tcp(monkeypatch):
    families = []
    dial = handshake._dial
    monkeypatch.setattr(
        handshake,
        "_dial",
        lambda place, family, address: (families.append(family), dial(place, family, address))[1],
    )
    connect_all(ranks(2, ("a",)))
    connect_all(ranks(2, ("a", "b")))
    assert families == [socket.AF_UNIX, socket.AF_INET]


def test_a_host_name_that_lies_falls_back_to_tcp():
    """Two network namespaces of one host have one name but no common abstract sockets."""

    class Elsewhere(MemoryStore):
        def get(self, key, timeout):
            where = msgpack.unpackb(super().get(key, timeout))
            return msgpack.packb(where | {"unix": "\0hvd-cluster-nobody"})

    assert connect_all(ranks(2), Elsewhere()) == [("node", "node")] * 2


def test_a_missing_rank_is_named():
    errors = connect_all([Hello(0, 4, "node"), Hello(2, 4, "node")], timeout=0.2)
    assert [type(error) for error in errors] == [CollectiveTimeoutError] * 2 or type(errors[1]) is PeerLostError
    assert str(errors[0]).startswith("ranks [1, 3] of 4 did not connect to rank 0 in time; ")
    assert "HOROVOD_GLOO_TIMEOUT_SECONDS" in str(errors[0])


def test_without_rank_0_the_others_time_out():
    (error,) = connect_all([Hello(1, 2, "node")], timeout=0.05)
    assert isinstance(error, CollectiveTimeoutError)


def test_a_rank_0_that_went_away_is_lost():
    store = MemoryStore()
    with socket.create_server((LOCALHOST, 0)) as gone:
        where = {"host": "other", "unix": "\0hvd-cluster-nobody", "tcp": gone.getsockname()}
    store.set("control-0", msgpack.packb(where))
    (error,) = connect_all([Hello(1, 2, "node")], store, timeout=0.1)
    assert isinstance(error, PeerLostError)
    assert "rank 0 does not answer at" in str(error)


def test_different_sizes_are_a_mistake_of_the_launcher():
    errors = connect_all([Hello(0, 2, "node"), Hello(1, 3, "node")])
    assert isinstance(errors[0], SettingsError)
    assert "rank 1 was started for 3 ranks and rank 0 for 2; start all with one HOROVOD_SIZE" in str(errors[0])
    assert str(errors[1]) == str(errors[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_of_one_rank_are_a_mistake_of_the_launcher(rank):
    hellos = [Hello(0, 3, "node"), Hello(1, 3, "node")]
    extra = Hello(rank, 3, "node")
    errors = connect_all_but_first(hellos, extra)
    assert isinstance(errors[0], SettingsError)
    assert f"two processes say they are rank {rank}" in str(errors[0])
    assert all(isinstance(error, SettingsError | PeerLostError) for error in errors[1:])
    assert any(isinstance(error, SettingsError) for error in errors[1:])


def connect_all_but_first(hellos, extra):
    """Like :func:`connect_all`, with one more that joins as a rank other than 0 does, whatever it says."""

    # A rank that comes when the first has given up already tries until its own timeout.
    timeout = PATIENCE / 4

    def body(index):
        if index < len(hellos):
            return outcome(lambda: connect(hellos[index], store, timeout=timeout))
        return outcome(lambda: handshake._member(place, ProcessSets(extra.size)))

    store, deadline = MemoryStore(), handshake.time.monotonic() + timeout
    place = handshake._Place(extra, store, SECRET, LOCALHOST, Timeouts(), deadline)
    return in_threads(len(hellos) + 1, body, PATIENCE)


# Strangers.

RANK_1 = (b"n" * 32, 1, 2, "node", (0,), {})
"""What rank 1 of 2 says, as :func:`handshake._prove` sends it."""


def wrong_secret(sock):
    handshake._send(sock, handshake._sealed(b"another", sock.recv(64), msgpack.packb(RANK_1)))


def replayed(sock):
    handshake._send(sock, handshake._sealed(SECRET, b"n" * 32, msgpack.packb(RANK_1)))


def authentic_but_senseless(value):
    def speak(sock):
        handshake._send(sock, handshake._sealed(SECRET, sock.recv(64), msgpack.packb(value)))

    return speak


STRANGERS = {
    "says nothing and leaves": lambda sock: None,
    "garbage": lambda sock: sock.sendall(b"GET / HTTP/1.1\r\n\r\n"),
    "an empty frame": lambda sock: handshake._send(sock, b""),
    "an oversized frame": lambda sock: sock.sendall(handshake.LENGTH.pack(1 << 30)),
    "half a frame": lambda sock: sock.sendall(handshake.LENGTH.pack(100) + b"x"),
    "another secret": wrong_secret,
    "an old answer": replayed,
    "a number": authentic_but_senseless(7),
    "too few fields": authentic_but_senseless([1, 2]),
}


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("by_tcp", [False, True])
@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_are_refused_and_the_job_starts(stranger, by_tcp, stays, caplog):
    """Strangers come first; those that stay keep their connections open, silently, until the job has started."""
    store, results = MemoryStore(), []
    with caplog.at_level(logging.WARNING, "collectives.control.handshake"):
        center = threading.Thread(target=lambda: results.extend(connect_all([Hello(0, 2, "node")], store)))
        center.start()
        where = msgpack.unpackb(store.get("control-0", PATIENCE))
        family, address = (socket.AF_INET, tuple(where["tcp"])) if by_tcp else (socket.AF_UNIX, where["unix"])
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


def test_an_oversized_frame_is_refused_before_it_is_read():
    store, results = MemoryStore(), []
    center = threading.Thread(target=lambda: results.extend(connect_all([Hello(0, 2, "node")], store)))
    center.start()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(msgpack.unpackb(store.get("control-0", PATIENCE))["unix"])
        sock.sendall(handshake.LENGTH.pack(handshake.HELLO_BYTES + 1))
        assert len(handshake._exactly(sock, handshake.NONCE_BYTES)) == handshake.NONCE_BYTES
        assert sock.recv(1) == b""
    connect_all([Hello(1, 2, "node")], store)
    center.join(PATIENCE)
    assert results == [("node", "node")]


def test_a_rank_with_another_secret_is_not_told_anything():
    errors = connect_all(ranks(2), secrets=[SECRET, b"another"], timeout=0.3)
    assert isinstance(errors[0], CollectiveTimeoutError)
    assert isinstance(errors[1], PeerLostError)


def test_a_false_rank_0_is_found_out():
    """Who listens at the address but does not know the secret cannot answer the nonce."""
    store = MemoryStore()
    with socket.create_server((LOCALHOST, 0)) as listener:
        where = {"host": "other", "unix": "", "tcp": listener.getsockname()}
        store.set("control-0", msgpack.packb(where))

        def pretend():
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"n" * 32)
                handshake._receive(sock)
                handshake._send(sock, handshake._sealed(b"guessed", b"n" * 32, msgpack.packb(("", ("a", "b"), {}))))

        liar = threading.Thread(target=pretend)
        liar.start()
        (error,) = connect_all([Hello(1, 2, "node")], store)
        liar.join(PATIENCE)
    assert isinstance(error, PeerLostError)
    assert "does not know the secret of this job" in str(error)


def test_an_address_that_cannot_be_listened_on_is_named():
    with pytest.raises(SettingsError, match=r"rank 0 cannot listen on \('192\.0\.2\.1', 0\).*HOROVOD_GLOO_IFACE"):
        connect(Hello(0, 2, "node"), MemoryStore(), address="192.0.2.1")
