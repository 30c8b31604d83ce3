"""How ranks find rank 0 and prove themselves."""

import errno
import logging
import os
import socket
import threading
from contextlib import ExitStack

import msgpack
import pytest

from collectives.api import (
    CollectiveTimeoutError,
    EngineError,
    HorovodInternalError,
    PeerLostError,
    SettingsError,
    ShutDownError,
    Timeouts,
)
from collectives.attempt import ConnectAttempt
from collectives.control import admission, configuration, frames, handshake
from collectives.control.handshake import Connected, Hello
from collectives.control.hello import LocalEnd, pack_answer, pack_farewell, pack_hello, unpack_answer
from collectives.control.starts import Starts
from collectives.control.tree import relays
from collectives.planning.errors import unpack
from collectives.planning.messages import Abort, Stop, decode, encode
from collectives.planning.process_sets import ProcessSets
from collectives.rendezvous.store import MemoryStore
from tests.backends.members import in_threads
from tests.collectives.job import PATIENCE, outcome
from tests.collectives.test_sockets import receive

SECRET = b"not for strangers"
LOCALHOST = "127.0.0.1"


KEY = "round-0/start-0/rank-0"
"""Where rank 0 is found."""


def connect(
    hello, store, secret=SECRET, address=LOCALHOST, timeout=PATIENCE, offer=lambda hosts, cores: b"", starts=None
):
    """:func:`connect_channel` with what is usual here."""
    with ConnectAttempt(timeout) as attempt:
        end = LocalEnd(hello, secret, address, Timeouts().heartbeat, attempt)
        return handshake.connect_channel(end, store, ProcessSets(hello.size), offer, starts)


def connect_all(hellos, store=None, secrets=None, timeout=PATIENCE, tell=lambda connected: connected.hosts):
    """What each of ``hellos`` finds, or the error it meets, all at once; channels get closed."""

    def body(index):
        secret = secrets[index] if secrets else SECRET
        result = outcome(lambda: connect(hellos[index], store, secret, timeout=timeout))
        if isinstance(result, Connected):
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
        connected = connect(hellos[rank], store)
        channel = connected.channel
        try:
            if rank:
                channel.send(0, encode(Stop(rank)))
                assert receive(channel, 1) == [(0, encode(Stop(0)))]
            else:
                assert sorted(receive(channel, size - 1)) == [(peer, encode(Stop(peer))) for peer in range(1, size)]
                channel.send_to(range(1, size), encode(Stop(0)))
            return connected.hosts
        finally:
            channel.close()

    store, hellos = MemoryStore(), ranks(size, hosts)
    assert in_threads(size, body, PATIENCE) == [tuple(hello.host for hello in hellos)] * size


def test_one_host_connects_by_unix_socket_and_several_by_tcp(monkeypatch):
    families = []
    dial = handshake._open
    monkeypatch.setattr(
        handshake,
        "_open",
        lambda end, family, address: (families.append(family), dial(end, family, address))[1],
    )
    connect_all(ranks(2, ("a",)))
    connect_all(ranks(2, ("a", "b")))
    assert families == [socket.AF_UNIX, socket.AF_INET]


def test_a_host_name_that_lies_falls_back_to_tcp():
    """Two network namespaces of one host have one name but no common abstract sockets."""

    class Elsewhere(MemoryStore):
        def get(self, key, timeout):
            entry = msgpack.unpackb(super().get(key, timeout))
            return msgpack.packb(entry | {"unix": "\0hvd-cluster-nobody"})

    assert connect_all(ranks(2), Elsewhere()) == [("node", "node")] * 2


def test_a_missing_rank_is_named():
    errors = connect_all([Hello(0, 4, "node"), Hello(2, 4, "node")], timeout=0.2)
    assert type(errors[0]) is CollectiveTimeoutError
    assert isinstance(errors[1], CollectiveTimeoutError | PeerLostError)
    assert str(errors[0]).startswith("ranks [1, 3] of 4 did not connect to rank 0 in time; ")
    assert "HOROVOD_GLOO_TIMEOUT_SECONDS" in str(errors[0])
    assert errors[0].ranks == (1, 3)


def test_the_reason_of_a_rank_that_gives_up_is_read_before_and_after_the_other_one_believes_that_it_connected():
    farewell = pack_farewell(CollectiveTimeoutError("late", [2]))
    with pytest.raises(CollectiveTimeoutError, match="late") as caught:
        unpack_answer(farewell)
    assert caught.value.ranks == (2,)
    message = decode(farewell)
    assert isinstance(message, Abort)
    assert str(unpack(message.error)) == "late"
    with pytest.raises(EngineError, match="Stop arrived while the ranks connected"):
        unpack_answer(encode(Stop(0)))


def test_a_rank_that_came_hears_which_rank_did_not():
    """Its own patience is longer than that of rank 0."""

    def body(rank):
        return outcome(lambda: connect(Hello(rank, 3, "node"), store, timeout=PATIENCE if rank else 0.2))

    store = MemoryStore()
    first, second = in_threads(2, body, PATIENCE)
    assert type(first) is type(second) is CollectiveTimeoutError
    assert str(first) == str(second)
    assert second.ranks == (2,)


def test_a_rank_that_gives_up_is_not_blamed_for_the_one_that_did_not_come():
    """It began before rank 0, and so its time is over first."""

    def body(rank):
        return outcome(lambda: connect(Hello(rank, 3, "node"), store, timeout=0.3 if rank else PATIENCE))

    store = MemoryStore()
    first, second = in_threads(2, body, PATIENCE)
    assert type(first) is type(second) is CollectiveTimeoutError
    assert first.ranks == second.ranks == (2,)


def test_a_rank_that_gives_up_hears_which_rank_has_no_addresses_yet():
    """All ranks have come, but one of them cannot say how to reach it."""

    def body(rank):
        def offer(hosts, cores):
            if rank == 2:
                over.wait(PATIENCE)
            return b""

        try:
            return outcome(
                lambda: connect(Hello(rank, 3, "node"), store, timeout=(PATIENCE, 0.5, PATIENCE)[rank], offer=offer)
            )
        finally:
            over.set()

    store, over = MemoryStore(), threading.Event()
    errors = in_threads(3, body, PATIENCE)
    assert {type(error) for error in errors} == {CollectiveTimeoutError}
    assert {error.ranks for error in errors} == {(2,)}


def test_a_rank_0_that_stops_after_it_was_reached_is_named(monkeypatch):
    monkeypatch.setattr(handshake, "REASON_SECONDS", 0.1)
    store, nonce = MemoryStore(), bytes(frames.NONCE_BYTES)
    with socket.create_server((LOCALHOST, 0)) as stopped:
        store.set(KEY, msgpack.packb({"id": "1", "host": "other", "unix": "", "tcp": stopped.getsockname()}))
        accepting = threading.Thread(target=lambda: accepted.append(stopped.accept()[0]) or accepted[0].sendall(nonce))
        accepted = []
        accepting.start()
        (error,) = connect_all([Hello(1, 2, "node")], store, timeout=0.3)
        accepting.join(PATIENCE)
        accepted[0].close()
    assert type(error) is CollectiveTimeoutError
    assert "rank 0 did not say in time which ranks are missing" in str(error)
    assert error.ranks == (0,)


def test_a_rank_that_is_interrupted_says_so():
    def body(rank):
        with ConnectAttempt(PATIENCE) as attempt:
            end = LocalEnd(Hello(rank, 3, "node"), SECRET, LOCALHOST, Timeouts().heartbeat, attempt)
            if rank:
                threading.Timer(0.2, attempt.abort, [ShutDownError("interrupted by a person")]).start()
            return outcome(lambda: handshake.connect_channel(end, store, ProcessSets(3), lambda *_: b""))

    store = MemoryStore()
    first, second = in_threads(2, body, PATIENCE)
    assert type(first) is PeerLostError
    assert first.ranks == (1,)
    assert "interrupted by a person" in str(first)
    assert type(second) is ShutDownError


def test_a_rank_0_that_is_stopped_is_late():
    """Its kernel still accepts connections."""
    store = MemoryStore()
    with socket.create_server((LOCALHOST, 0)) as stopped:
        entry = {"id": "1", "host": "other", "unix": "", "tcp": stopped.getsockname()}
        store.set(KEY, msgpack.packb(entry))
        (error,) = connect_all([Hello(1, 2, "node")], store, timeout=0.2)
    assert type(error) is CollectiveTimeoutError
    assert error.ranks == (0,)


def test_all_ranks_learn_the_offers_of_all():
    def body(rank):
        connected = connect(hellos[rank], store, offer=lambda hosts, cores: f"{rank} of {len(hosts)}".encode())
        done.wait(PATIENCE)
        connected.channel.close()
        return connected.offers

    store, hellos, done = MemoryStore(), ranks(4, ("a", "b", "b")), threading.Barrier(4)
    assert in_threads(4, body, PATIENCE) == [tuple(f"{rank} of 4".encode() for rank in range(4))] * 4


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
@pytest.mark.parametrize(("error", "kind"), [(SettingsError, SettingsError), (OSError, EngineError)])
def test_a_rank_without_an_offer_ends_the_start_of_all_with_one_reason(failing, error, kind):
    def body(rank):
        def offer(hosts, cores):
            if rank == failing:
                raise error("no port")
            return b""

        return outcome(lambda: connect(hellos[rank], store, offer=offer))

    store, hellos = MemoryStore(), ranks(4, ("a", "b", "b"))
    errors = in_threads(4, body, PATIENCE)
    assert type(errors.pop(failing)) is error
    assert {type(each) for each in errors} == {kind}
    assert all("no port" in str(each) for each in errors)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_hello_of_another_world_is_refused_by_name(ahead):
    """Both ranks look at one place of the store, as if a round had no place of its own."""

    class OnePlace(MemoryStore):
        def get(self, key, timeout):
            return super().get(key.replace("round-4", "round-3"), timeout)

        def set(self, key, value):
            super().set(key.replace("round-4", "round-3"), value)

    def body(rank):
        hello = Hello(rank, 2, "node", job="train", round=3 + (rank == ahead))
        return outcome(lambda: connect(hello, store, timeout=PATIENCE if rank else 1.0))

    store = OnePlace()
    errors = in_threads(2, body, PATIENCE)
    text = f"rank 1 is in round {3 + ahead} of job 'train', rank 0 in round {4 - ahead} of job 'train'; only "
    assert text in str(errors[1])
    assert type(errors[1]) is PeerLostError
    if ahead:  # or else rank 0 goes on waiting for the rank 1 of its own round
        assert text in str(errors[0])
    else:
        assert "ranks [1] of 2 did not connect" in str(errors[0])


def test_a_rank_ahead_of_rank_0_is_refused_by_name_and_waits_for_its_round(monkeypatch):
    """Rank 0 learns at once that its round is over; the launcher then gives it the next one."""
    monkeypatch.setattr(handshake, "FIRST_LOOK_SECONDS", 0.05)

    def body(rank):
        errors = [outcome(lambda: connect(Hello(0, 2, "node", round=3), store))] if rank == 0 else []
        connected = connect(Hello(rank, 2, "node", round=4), store)
        done.wait(PATIENCE)
        connected.channel.close()
        return errors

    store, done = MemoryStore(), threading.Barrier(2)
    (error,), _ = in_threads(2, body, PATIENCE)
    assert isinstance(error, PeerLostError)
    assert "rank 1 is in round 4 of job 'job', rank 0 in round 3 of job 'job'" in str(error)


def test_a_rank_ahead_of_rank_0_says_which_round_rank_0_is_in(monkeypatch):
    monkeypatch.setattr(handshake, "FIRST_LOOK_SECONDS", 0.05)
    store = MemoryStore()
    hellos = [Hello(rank, 2, "node", round=3 + rank) for rank in range(2)]
    _, error = in_threads(2, lambda rank: outcome(lambda: connect(hellos[rank], store, timeout=0.5)), PATIENCE)
    assert type(error) is CollectiveTimeoutError
    assert "rank 0 of round 4 of job 'job' did not come in time: it is still in round 3" in str(error)
    assert error.ranks == (0,)


def test_a_rank_0_that_is_ahead_says_which_rank_called_in_which_round(monkeypatch):
    monkeypatch.setattr(handshake, "FIRST_LOOK_SECONDS", 0.05)
    store = MemoryStore()
    hellos = [Hello(rank, 2, "node", round=6 - rank) for rank in range(2)]
    first, second = in_threads(2, lambda rank: outcome(lambda: connect(hellos[rank], store, timeout=1.0)), PATIENCE)
    assert type(first) is CollectiveTimeoutError
    assert "(rank 1 called in round 5 of job 'job'; rank 0 is in round 6 of job 'job')" in str(first)
    assert first.ranks == (1,)
    assert type(second) is PeerLostError
    assert "rank 1 is in round 5 of job 'job', rank 0 in round 6 of job 'job'" in str(second)


def test_without_rank_0_the_others_time_out():
    (error,) = connect_all([Hello(1, 2, "node")], timeout=0.05)
    assert isinstance(error, CollectiveTimeoutError)


def test_a_rank_0_that_went_away_is_lost():
    store = MemoryStore()
    with socket.create_server((LOCALHOST, 0)) as gone:
        entry = {"id": "1", "host": "other", "unix": "\0hvd-cluster-nobody", "tcp": gone.getsockname()}
    store.set(KEY, msgpack.packb(entry))
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
        with ConnectAttempt(timeout) as attempt:
            end = LocalEnd(extra, SECRET, LOCALHOST, 5.0, attempt)
            sets = ProcessSets(extra.size)
            return outcome(lambda: handshake._member(end, store, sets, lambda *_: b"", Starts()))

    store = MemoryStore()
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
    found = connect_all(hellos, tell=lambda connected: (connected.hosts, connected.cores))
    for hello, (_, cores) in zip(hellos, found, strict=True):
        assert cores == len({core for other in hellos if other.host == hello.host for core in other.cores})


def test_by_default_a_rank_says_which_cores_it_may_use():
    assert Hello(0, 1, "node").cores == tuple(sorted(os.sched_getaffinity(0)))


# Relays.


def test_a_follower_that_does_not_come_is_named(monkeypatch):
    """Rank 3 meets rank 0, then dies before it meets its leader."""
    join = handshake._join

    def vanish(end, *rest):
        if end.hello.rank == 3:
            raise KeyboardInterrupt
        return join(end, *rest)

    def body(rank):
        try:
            connected = connect(Hello(rank, 4, "b" if rank else "a"), store, timeout=0.5)
        except (CollectiveTimeoutError, PeerLostError, KeyboardInterrupt) as error:
            return error
        connected.channel.close()
        return None

    monkeypatch.setattr(handshake, "_join", vanish)
    store = MemoryStore()
    center, leader, follower, _ = in_threads(4, body, PATIENCE)
    assert center is None
    assert isinstance(leader, CollectiveTimeoutError | PeerLostError)
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
    for module in (handshake, admission):
        monkeypatch.setattr(module, "end_in_silence", lambda sock, seconds: asked.append((sock.family, seconds)))
    connect_all(ranks(5, ("a", "b")))
    by_tcp = [seconds for family, seconds in asked if family == socket.AF_INET]
    assert by_tcp == [Timeouts().heartbeat] * 4  # both ends of ranks 1 and 3


# Strangers.

RANK_1 = pack_hello(Hello(1, 2, "node"), b"n" * 32, "")


def send(sock, data):
    sock.sendall(frames.LENGTH.pack(len(data)) + data)


def wrong_secret(sock):
    send(sock, frames.seal(b"another", sock.recv(64), RANK_1))


def replayed(sock):
    send(sock, frames.seal(SECRET, b"n" * 32, RANK_1))


def for_another_process(sock):
    send(sock, frames.seal(SECRET, sock.recv(64), RANK_1))


def authentic_but_senseless(value):
    def speak(sock):
        send(sock, frames.seal(SECRET, sock.recv(64), msgpack.packb(value)))

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
    with caplog.at_level(logging.WARNING, "collectives.control.admission"):
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


def test_a_hello_that_has_come_counts_though_its_connection_is_too_old():
    """Rank 0 had no time for it for long, and has no room for others."""
    with ConnectAttempt(PATIENCE) as attempt:
        end = LocalEnd(Hello(0, 2, "node"), SECRET, LOCALHOST, Timeouts().heartbeat, attempt)
        with admission.Admission(end, (1,)) as admitting, socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE)
            sock.connect(admitting.entry["unix"])
            admitting._capacity = 1
            admitting._make_room()
            (listener,) = (each for each in admitting._listeners.values() if each.family == socket.AF_UNIX)
            admitting._accept(listener)
            hello = pack_hello(Hello(1, 2, "node"), b"n" * 32, admitting.entry["id"])
            send(sock, frames.seal(SECRET, sock.recv(frames.NONCE_BYTES, socket.MSG_WAITALL), hello))
            admitting._oldest().since -= admission.SILENCE_SECONDS
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
        sock.sendall(frames.LENGTH.pack(admission.HELLO_BYTES + 1))
        assert len(sock.recv(frames.NONCE_BYTES, socket.MSG_WAITALL)) == frames.NONCE_BYTES
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
        entry = {"id": "1", "host": "other", "unix": "", "tcp": listener.getsockname()}
        store.set(KEY, msgpack.packb(entry))

        def pretend():
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"n" * 32)
                sock.recv(1 << 16)
                send(sock, frames.seal(b"guessed", b"n" * 32, pack_answer((("a", "b"), {}))))

        liar = threading.Thread(target=pretend)
        liar.start()
        (error,) = connect_all([Hello(1, 2, "node")], store)
        liar.join(PATIENCE)
    assert isinstance(error, PeerLostError)
    assert "does not know the secret of this job" in str(error)


def test_an_address_that_cannot_be_listened_on_is_named():
    with pytest.raises(SettingsError, match=r"rank 0 cannot listen on \('192\.0\.2\.1', 0\).*HOROVOD_GLOO_IFACE"):
        connect(Hello(0, 2, "node"), MemoryStore(), address="192.0.2.1")


@pytest.mark.parametrize("host", ["a", "b"])
def test_a_lack_of_descriptors_is_no_lost_rank(host, monkeypatch):
    def refuse(end, family, address):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(handshake, "_open", refuse)
    store = MemoryStore()
    store.set(KEY, msgpack.packb({"id": "", "host": "a", "unix": "\0nobody", "tcp": [LOCALHOST, 1]}))
    error = outcome(lambda: connect(Hello(1, 2, host), store, timeout=0.5))
    assert type(error) is HorovodInternalError
    assert "this process has no file descriptor left; raise the limit of ulimit -n" in str(error)
