"""Connections that never send a signed request."""

from __future__ import annotations

import http.client
import socket
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from collectives.net import strangers
from collectives.store.client import RendezvousClient
from collectives.store.server import RendezvousServer
from tests import limited
from tests.collectives.store.wire import SECRET, encode, signed

CROWD = 300

SERVER = f"""
from collectives.net import strangers
from collectives.store.server import RendezvousServer
strangers.SILENCE = 0.05
limit_descriptors({{limit}})
with RendezvousServer({SECRET!r}) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("without_a_limit", ["", "strangers.descriptors.share_of_strangers = lambda *_: 10_000"])
def test_a_crowd_of_idle_connections_does_not_starve_the_server(without_a_limit: str) -> None:
    """Neither where the limit of such connections holds, nor where the process runs out of descriptors."""
    source = SERVER.format(limit=128).replace("strangers.SILENCE", f"{without_a_limit}\nstrangers.SILENCE")
    with limited.python(source) as process, ExitStack() as stack:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        for _ in range(CROWD):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), limited.PATIENCE))
        with RendezvousClient("127.0.0.1", port, SECRET) as client:
            client.set("key", b"value")
            assert client.get("key", limited.PATIENCE) == b"value"
        _, log = limited.ending(process)
    assert len(log) == 1, log
    assert log[0].startswith("WARNING the rendezvous server")
    assert "raise the limit of ulimit -n" in log[0]


@pytest.mark.parametrize("said", [b"", b"GET /keys/a HTTP/1.1\r\n", encode("GET", "/keys/a", {})], ids=repr)
def test_a_connection_has_to_prove_itself_before_a_deadline(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(strangers, "DEADLINE", 0.5)
    with RendezvousServer(SECRET) as server, socket.create_connection((server.address, server.port), 30) as sock:
        sock.sendall(said)
        while sock.recv(4096):  # a refusal, if any, and then the end
            pass


def test_a_connection_that_has_proved_itself_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beyond the deadline: an idle connection that came later has met its own by then."""
    monkeypatch.setattr(strangers, "DEADLINE", 0.5)
    with RendezvousServer(SECRET) as server:
        server.store.set("a", b"value")
        kept = http.client.HTTPConnection(server.address, server.port, timeout=30)
        sock = None
        for _ in range(2):
            kept.request("GET", "/keys/a", headers=signed(server, "GET", "/keys/a"))
            with kept.getresponse() as response:
                assert response.read() == b"value"
            assert sock in (None, kept.sock), "the client had to connect again"
            sock = kept.sock
            with socket.create_connection((server.address, server.port), 30) as idle:
                assert idle.recv(1) == b""
        kept.close()


WAITING = 400

MANY = f"""
import resource
from collectives.store.server import RendezvousServer
resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
with RendezvousServer({SECRET!r}) as server:
    print(server.port, flush=True)
    sys.stdin.readline()
    server.store.set("go", b"value")
    sys.stdin.read()
"""


def test_more_workers_wait_at_once_than_the_soft_limit_of_the_server_allows() -> None:
    """They have sent signed requests, so none of them is refused; the server raises its limit."""
    path = "/keys/go?wait=60"
    with limited.python(MANY) as process, ExitStack() as stack:
        assert process.stdout is not None
        assert process.stdin is not None
        address = ("127.0.0.1", int(process.stdout.readline()))
        server = SimpleNamespace(address=address[0], port=address[1])
        heads = [encode("GET", path, signed(server, "GET", path)) for _ in range(WAITING)]
        workers = [stack.enter_context(socket.create_connection(address, limited.PATIENCE)) for _ in heads]
        for worker, head in zip(workers, heads, strict=True):
            worker.sendall(head)
        process.stdin.write("go\n")
        process.stdin.flush()
        assert {worker.recv(12) for worker in workers} == {b"HTTP/1.1 200"}
        assert limited.ending(process)[1] == []
