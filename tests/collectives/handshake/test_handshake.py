"""How ranks find rank 0 and learn about each other."""

import errno
import os
import socket
import threading

import msgpack
import pytest

from collectives.api import (
    EngineError,
    NoDescriptorError,
    PeerLostError,
    SettingsError,
    Timeouts,
)
from collectives.controller.messages import Stop, encode
from collectives.controller.process_sets import ProcessSets
from collectives.handshake import Hello, dial, entries, listeners
from collectives.handshake import connect as member
from collectives.handshake.entries import Starts
from collectives.handshake.hello import LocalEnd
from collectives.net.attempts import ConnectAttempt
from collectives.store.memory import MemoryStore
from tests.collectives.backends.members import in_threads
from tests.collectives.engine.job import PATIENCE, outcome
from tests.collectives.handshake.handshakes import KEY, LOCALHOST, SECRET, connect, connect_all, ranks
from tests.collectives.net.test_sockets import receive


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
    opened = dial._open
    monkeypatch.setattr(
        dial,
        "_open",
        lambda end, family, address: (families.append(family), opened(end, family, address))[1],
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
    assert f"two processes have HOROVOD_RANK={rank}" in str(errors[0])
    assert all(isinstance(error, SettingsError | PeerLostError) for error in errors[1:])
    assert any(isinstance(error, SettingsError) for error in errors[1:])


def connect_all_but_first(hellos, extra):
    """Like :func:`connect_all`, with one more that joins as a rank other than 0 does, whatever it says."""
    timeout = PATIENCE / 4

    def body(index):
        if index < len(hellos):
            return outcome(lambda: connect(hellos[index], store, timeout=timeout))
        with ConnectAttempt(timeout) as attempt:
            end = LocalEnd(extra, SECRET, LOCALHOST, 5.0, attempt)
            sets = ProcessSets(extra.size)
            return outcome(
                lambda: member.join_center(end, entries.Entries(extra, store, Starts()), sets, lambda *_: b"")
            )

    store = MemoryStore()
    return in_threads(len(hellos) + 1, body, PATIENCE)


def test_all_connections_between_hosts_end_in_silence(monkeypatch):
    """And none within a host does, where there is nothing that falls silent."""
    asked = []
    for module in (dial, listeners):
        monkeypatch.setattr(module, "end_in_silence", lambda sock, seconds: asked.append((sock.family, seconds)))
    connect_all(ranks(5, ("a", "b")))
    by_tcp = [seconds for family, seconds in asked if family == socket.AF_INET]
    assert by_tcp == [Timeouts().heartbeat] * 4  # both ends of ranks 1 and 3


def test_an_address_that_cannot_be_listened_on_is_named():
    with pytest.raises(SettingsError, match=r"rank 0 cannot listen on \('192\.0\.2\.1', 0\).*HOROVOD_GLOO_IFACE"):
        connect(Hello(0, 2, "node"), MemoryStore(), address="192.0.2.1")


@pytest.mark.parametrize("host", ["a", "b"])
def test_a_lack_of_descriptors_is_no_lost_rank(host, monkeypatch):
    def refuse(end, family, address):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(dial, "_open", refuse)
    store = MemoryStore()
    store.set(KEY, msgpack.packb({"id": "", "host": "a", "unix": "\0nobody", "tcp": [LOCALHOST, 1]}))
    error = outcome(lambda: connect(Hello(1, 2, host), store, timeout=0.5))
    assert type(error) is NoDescriptorError
    assert "this process has no file descriptor left; raise the limit of ulimit -n" in str(error)
