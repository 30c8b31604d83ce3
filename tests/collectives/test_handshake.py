"""How ranks find rank 0 and prove themselves."""

import logging
import os
import socket
import threading
from contextlib import ExitStack

import msgpack
import pytest

from collectives.api import CollectiveTimeoutError, PeerLostError, SettingsError, Timeouts
from collectives.control import configuration, handshake
from collectives.control.handshake import Hello, Meeting
from collectives.control.tree import relays
from collectives.planning.messages import Stop, encode
from collectives.planning.process_sets import ProcessSets
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


def connect_all(hellos, store=None, secrets=None, timeout=PATIENCE, tell=lambda meeting: meeting.hosts):
    """What each of ``hellos`` finds, or the error it meets, all at once; channels get closed."""

    def body(index):
        secret = secrets[index] if secrets else SECRET
        result = outcome(lambda: connect(hellos[index], store, secret, timeout=timeout))
        if isinstance(result, Meeting):
            channels[index] = result.channel
            return tell(result)
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
                assert receive(channel, 1) == [(0, encode(Stop(0)))]
            else:
                assert sorted(receive(channel, size - 1)) == [(peer, encode(Stop(peer))) for peer in range(1, size)]
                channel.send_to(range(1, size), encode(Stop(0)))
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


# What the ranks have in common.


def configured(*values):
    return [Hello(rank, len(values), "node", configuration=value) for rank, value in enumerate(values)]


def test_ranks_that_are_set_differently_all_hear_who_has_set_what():
    shm, gloo = {"OPERATIONS": "shm", "CACHE": "0"}, {"OPERATIONS": "gloo", "CACHE": "0"}
    errors = connect_all(configured(shm, gloo, shm, {"OPERATIONS": "shm", "CACHE": "above 0"}))
    assert [type(error) for error in errors] == [SettingsError] * 4
    (text,) = {str(error) for error in errors}
    assert text == (
        "OPERATIONS is 'shm' on ranks 0, 2, 3 and 'gloo' on rank 1; CACHE is '0' on ranks 0, 1, 2 and 'above 0' on "
        "rank 3; it must be the same on all ranks"
    )


def test_ranks_that_are_set_alike_start():
    assert connect_all(configured({"OPERATIONS": "shm"}, {"OPERATIONS": "shm"})) == [("node", "node")] * 2


def test_a_disagreement_of_many_ranks_is_still_short():
    text = configuration.disagreement([{"A": "1"}] + [{"A": "2"}] * 1000)
    assert (
        text
        == "A is '1' on rank 0 and '2' on ranks 1, 2, 3, 4, 5, 6, 7, 8 and 992 more; it must be the same on all ranks"
    )


def test_a_long_value_is_cut_but_not_mistaken_for_another():
    assert configuration.brief("short") == "short"
    one, other = configuration.brief("x" * 10_000 + "1"), configuration.brief("x" * 10_000 + "2")
    assert one != other
    assert max(len(one), len(other)) < 300


@pytest.mark.parametrize("hosts", [("a",), ("a", "b"), ("a", "b", "b")], ids=str)
def test_the_ranks_of_a_host_agree_on_its_cores(hosts):
    hellos = [Hello(rank, 5, hosts[rank % len(hosts)], cores=(rank, rank + 1)) for rank in range(5)]
    found = connect_all(hellos, tell=lambda meeting: (meeting.hosts, meeting.cores))
    for hello, (_, cores) in zip(hellos, found, strict=True):
        assert cores == len({core for other in hellos if other.host == hello.host for core in other.cores})


def test_by_default_a_rank_says_which_cores_it_may_use():
    assert Hello(0, 1, "node").cores == tuple(sorted(os.sched_getaffinity(0)))


# Relays.


def test_a_follower_that_does_not_come_is_named(monkeypatch):
    """Rank 3 meets rank 0, then dies before it meets its leader."""
    follow = handshake._follow

    def vanish(place, leader, lifeline):
        if place.hello.rank == 3:
            raise KeyboardInterrupt
        return follow(place, leader, lifeline)

    def body(rank):
        try:
            meeting = connect(Hello(rank, 4, "b" if rank else "a"), store, timeout=0.5)
        except (CollectiveTimeoutError, PeerLostError, KeyboardInterrupt) as error:
            return error
        meeting.channel.close()
        return None

    monkeypatch.setattr(handshake, "_follow", vanish)
    store = MemoryStore()
    center, leader, follower, _ = in_threads(4, body, PATIENCE)
    assert center is None
    assert str(leader).startswith("ranks [3] of 4 did not connect to rank 1 in time; ")
    assert isinstance(follower, CollectiveTimeoutError | PeerLostError)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", {}),
        ("aaaa", {}),
        ("abc", {}),
        ("aabb", {2: (2, 3)}),
        ("abab", {1: (1, 3)}),
        ("abbcddd", {1: (1, 2), 4: (4, 5, 6)}),
    ],
)
def test_hosts_of_several_ranks_get_a_relay_but_for_that_of_rank_0(hosts, expected):
    assert relays(hosts) == expected


def test_all_connections_between_hosts_end_in_silence(monkeypatch):
    """And none within a host does, where there is nothing that falls silent."""
    asked = []
    monkeypatch.setattr(handshake, "end_in_silence", lambda sock, seconds: asked.append((sock.family, seconds)))
    connect_all(ranks(5, ("a", "b")))
    by_tcp = [seconds for family, seconds in asked if family == socket.AF_INET]
    assert by_tcp == [Timeouts().heartbeat] * 4  # both ends of ranks 1 and 3


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
