"""Ranks of one host that share their reads of the store."""

import math
import multiprocessing
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from collectives.api import CollectiveTimeoutError, PeerLostError, ShutDownError
from collectives.net import strangers
from collectives.store import client as client_module
from collectives.store import host_cache
from collectives.store.client import RendezvousClient
from collectives.store.host_cache import HostCache
from collectives.store.server import RendezvousServer
from collectives.store.signing import ServerTime
from tests.collectives.store.wire import SECRET, eventually, in_thread

SECONDS = 20.0
MANY = client_module.MOST_READERS + 1
RANKS = 5


@pytest.fixture
def requests(monkeypatch):
    """The keys of all reads that reach the store."""
    found = []
    read = RendezvousClient._read
    monkeypatch.setattr(RendezvousClient, "_read", lambda self, key, end: found.append(key) or read(self, key, end))
    return found


def client_of(server, host="here", size=MANY):
    client = RendezvousClient(server.address, server.port, SECRET, SECONDS)
    client.share_reads(host, size)
    return client


@pytest.fixture
def clients(server):
    with ExitStack() as stack:
        yield [stack.enter_context(client_of(server)) for _ in range(RANKS)]


@contextmanager
def waiting(clients, key):
    """All ``clients`` wait for ``key``; gives a function that returns what they get."""
    with ThreadPoolExecutor(len(clients)) as pool:
        futures = [pool.submit(client.get, key, SECONDS) for client in clients]
        yield lambda: [future.result(SECONDS) for future in futures]


def callers():
    """The connections to processes that read for others, and those that listen."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum("@hvd-cluster-" in line for line in lines)


def test_the_ranks_of_a_host_wait_with_one_request(requests, server, clients):
    before = callers()
    with waiting(clients, "world") as values:
        eventually(lambda: callers() == before + RANKS)
        server.store.set("world", b"value")
        assert values() == [b"value"] * RANKS
    assert requests == ["world"]


def test_a_value_is_kept_for_those_that_come_later_and_not_for_long(requests, server, clients, monkeypatch):
    monkeypatch.setattr(host_cache, "KEEP_SECONDS", 1000.0)
    server.store.set("entry", b"first")
    assert [client.get("entry", SECONDS) for client in clients] == [b"first"] * RANKS
    assert requests == ["entry"]
    server.store.set("entry", b"second")
    assert clients[0].get("entry", 0.0) == b"second"
    monkeypatch.setattr(host_cache, "KEEP_SECONDS", 0.0)
    server.store.set("other", b"first")
    assert clients[1].get("other", SECONDS) == b"first"
    server.store.set("other", b"second")
    assert clients[1].get("other", SECONDS) == b"second"


def test_hosts_and_small_worlds_share_nothing(requests, server):
    server.store.set("key", b"value")
    with client_of(server, "a"), client_of(server, "b") as b, client_of(server, size=MANY - 1) as small:
        assert [client.get("key", SECONDS) for client in (b, small, small)] == [b"value"] * 3
    assert requests == ["key"] * 3


@pytest.mark.parametrize("place", [0, 1])
def test_a_value_that_does_not_come(clients, place):
    serve(clients[0])
    with pytest.raises(CollectiveTimeoutError, match=r"key 'never' was not set within 0.05 s at the rendezvous server"):
        clients[place].get("never", 0.05)


def serve(client):
    """From now on ``client`` reads for the others."""
    with pytest.raises(CollectiveTimeoutError):
        client.get("nothing", 1e-9)


def test_a_request_that_waits_long_is_made_again(server, clients, monkeypatch):
    monkeypatch.setattr(host_cache, "ASK_SECONDS", 0.02)
    serve(clients[0])
    answers = []
    answer = host_cache.HostServer._answer
    monkeypatch.setattr(host_cache.HostServer, "_answer", lambda *each: answers.append(answer(*each)) or answers[-1])
    with in_thread(lambda: clients[1].get("key", SECONDS)) as value:
        eventually(lambda: len(answers) > 3)
        server.store.set("key", b"value")
        assert value() == b"value"


def test_where_the_reader_leaves_another_one_takes_its_place(requests, server, clients):
    serve(clients[0])
    del requests[:]
    before = callers()
    with waiting(clients[1:], "key") as values:
        eventually(lambda: callers() == before + RANKS - 1 and requests == ["key"])
        clients[0].close()
        eventually(lambda: requests == ["key"] * 2)
        server.store.set("key", b"value")
        assert values() == [b"value"] * (RANKS - 1)
    assert requests == ["key"] * 2


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_reader_that_is_stopped_or_killed_keeps_nobody_waiting(server, clients, number, monkeypatch):
    monkeypatch.setattr(host_cache, "ASK_SECONDS", 0.3)
    monkeypatch.setattr(host_cache, "ACKNOWLEDGE_SECONDS", 0.3)
    ours, theirs = multiprocessing.Pipe()

    def read():
        with client_of(server) as client:
            serve(client)
            theirs.send(None)
            theirs.recv()

    child = multiprocessing.get_context("fork").Process(target=read)
    child.start()
    try:
        assert ours.poll(SECONDS)
        with waiting(clients, "key") as values:
            eventually(lambda: server.waiting == 2)  # with that of serve()
            os.kill(child.pid, number)
            server.store.set("key", b"value")
            assert values() == [b"value"] * RANKS
    finally:
        child.kill()
        child.join()


def test_strangers_get_nothing(server, clients):
    serve(clients[0])
    name = clients[0]._cache._name
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(SECONDS)
        stranger.connect(name)
        challenge = stranger.recv(32)
        stranger.sendall(bytes(32) + (40).to_bytes(8, "big") + bytes(40))
        assert len(challenge) == 32
        assert stranger.recv(1) == b""
    assert HostCache("s", "here", SECRET, None)._name != HostCache("s", "here", b"another", None)._name


def test_silent_strangers_keep_nobody_out(requests, server, clients, monkeypatch):
    monkeypatch.setattr(host_cache, "Strangers", lambda most: strangers.Strangers(least=2, most=2))
    serve(clients[0])
    server.store.set("key", b"value")
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(clients[0]._cache._name)
        assert [client.get("key", SECONDS) for client in clients] == [b"value"] * RANKS


@pytest.mark.parametrize("place", [0, 1])
def test_a_store_that_is_lost_raises_the_same_error(place):
    with RendezvousServer(SECRET, stop_timeout=0.3) as server, ExitStack() as stack:
        clients = [stack.enter_context(client_of(server)) for _ in range(2)]
        for client in clients:
            client._connect_timeout = 0.1
        serve(clients[0])
        server.stop()
        with pytest.raises(PeerLostError, match="cannot be reached"):
            clients[place].get("key", SECONDS)


@pytest.mark.parametrize("place", [0, 1])
def test_closing_ends_a_read(server, clients, place):
    serve(clients[0])
    with in_thread(lambda: clients[place].get("key", SECONDS)) as value:
        eventually(lambda: server.waiting == 2)  # with that of serve()
        clients[place].close()
        with pytest.raises(ShutDownError):
            value()


def test_a_forked_child_does_not_keep_the_name(server):
    with client_of(server) as first:
        serve(first)
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=theirs.recv)
        child.start()
    try:
        eventually(lambda: not [thread for thread in threading.enumerate() if thread.name == "hvd-store-host"])
        with client_of(server) as second:
            serve(second)
            assert second._cache._server is not None
    finally:
        ours.send(None)
        child.join()


@pytest.mark.parametrize("seconds", [1e-9, math.inf, 1e10])
@pytest.mark.parametrize("place", [0, 1])
def test_a_value_that_is_there_needs_no_time(server, clients, seconds, place):
    serve(clients[0])
    server.store.set("key", b"value")
    assert clients[place].get("key", seconds) == b"value"


def test_a_host_may_have_any_name(server):
    server.store.set("key", b"value")
    with client_of(server, "a\udcff") as client:
        assert client.get("key", SECONDS) == b"value"


@pytest.mark.parametrize("place", [0, 1])
def test_a_store_that_is_silent_is_lost_as_soon_as_for_one_that_reads_alone(monkeypatch, place):
    monkeypatch.setattr(client_module, "_ANSWER_GRACE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, ExitStack() as stack:
        address = SimpleNamespace(address="127.0.0.1", port=silent.getsockname()[1])
        clients = [stack.enter_context(client_of(address)) for _ in range(2)]
        for client in clients:
            client._known = ServerTime("0" * 32, 1.0), 0.0
        serve_silently(clients[0])
        with pytest.raises(PeerLostError, match="did not answer within"):
            clients[place].get("key", 0.2)


def serve_silently(client):
    with pytest.raises(PeerLostError):
        client.get("nothing", 1e-9)


LONG_FRAME = bytes(32) + (1 << 16).to_bytes(8, "big") + bytes(1 << 16)


@pytest.mark.parametrize("content", [b"", LONG_FRAME], ids=["silent", "slow"])
def test_a_stranger_that_has_the_name_keeps_nobody_waiting(server, clients, content, monkeypatch):
    monkeypatch.setattr(host_cache, "ACKNOWLEDGE_SECONDS", 0.2)
    server.store.set("key", b"value")
    ended = threading.Event()

    def drip(listener):
        caller, _ = listener.accept()
        with caller, suppress(OSError):
            for byte in content:
                caller.sendall(bytes([byte]))
                ended.wait(0.02)
            ended.wait(SECONDS)

    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(clients[0]._cache._name)
        stranger.listen()
        thread = threading.Thread(target=drip, args=(stranger,))
        thread.start()
        assert clients[0].get("key", SECONDS) == b"value"
        ended.set()
        thread.join()


@pytest.mark.parametrize("name", ["hvd-store-read", "hvd-store-host"])
def test_a_process_without_threads_reads_itself(server, clients, name, monkeypatch):
    serve(clients[0])
    server.store.set("key", b"value")
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert [client.get("key", SECONDS) for client in clients[:2]] == [b"value"] * 2
        clients[0].close()
        assert clients[2].get("key", SECONDS) == b"value"
    server.store.set("other", b"value")
    assert [client.get("other", SECONDS) for client in clients[1:]] == [b"value"] * (RANKS - 1)


def test_a_forked_child_reads_itself(server, clients):
    server.store.set("key", b"value")
    serve(clients[0])
    with in_thread(lambda: clients[0].get("coming", SECONDS)) as value:
        eventually(lambda: server.waiting > 0)
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(clients[0].get("key", SECONDS)))
        child.start()
        assert ours.poll(SECONDS)
        assert ours.recv() == b"value"
        child.join()
        server.store.set("coming", b"value")
        assert value() == b"value"


def test_a_closed_client_shares_nothing(server):
    client = RendezvousClient(server.address, server.port, SECRET, SECONDS)
    client.close()
    client.share_reads("here", MANY)
    assert client._cache is None
