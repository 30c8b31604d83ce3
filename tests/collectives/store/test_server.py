"""Starting and stopping the server."""

from __future__ import annotations

import errno
import gc
import socket
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

from collectives.api import (
    PeerLostError,
    SettingsError,
)
from collectives.net.interfaces import everywhere
from collectives.store.client import RendezvousClient
from collectives.store.server import RendezvousServer
from tests.collectives.store.wire import SECRET, encode, eventually, in_thread, signed


class TestLifecycle:
    @pytest.mark.parametrize(
        "arguments",
        [
            {"secret": b""},
            {"secret": "text"},
            {"port": -1},
            {"port": 65536},
            {"port": "80"},
            {"host": ""},
            {"host": "a\0b"},
            {"body_limit": 0},
            {"wait_limit": 0.0},
            {"stop_timeout": float("nan")},
        ],
        ids=repr,
    )
    def test_bad_arguments(self, arguments: dict[str, object]) -> None:
        with pytest.raises(SettingsError, match="rendezvous"):
            RendezvousServer(**({"secret": SECRET} | arguments))

    @pytest.mark.parametrize("host", ["192.0.2.1", "a" * 80])
    def test_an_address_of_somebody_else(self, host: str) -> None:
        with pytest.raises(SettingsError, match=f"cannot listen on {host}"):
            RendezvousServer(SECRET, host).start()

    def test_a_port_in_use(self, server: RendezvousServer) -> None:
        with pytest.raises(SettingsError, match=f"port {server.port}"):
            RendezvousServer(SECRET, port=server.port).start()

    def test_starts_once(self, server: RendezvousServer) -> None:
        with pytest.raises(SettingsError, match="make a new one"):
            server.start()

    def test_stop_any_number_of_times(self) -> None:
        server = RendezvousServer(SECRET)
        server.stop()
        assert server.start() == server.port
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: server.stop(), range(8)))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((server.address, server.port))

    def test_a_client_that_is_killed_while_it_sends_is_no_error(
        self, server: RendezvousServer, client: RendezvousClient, caplog: pytest.LogCaptureFixture
    ) -> None:
        headers = signed(server, "PUT", "/keys/half", b"ten bytes!") | {"content-length": "10"}
        with socket.create_connection((server.address, server.port), 30) as connection:
            connection.sendall(encode("PUT", "/keys/half", headers, b"ten"))
            for _ in range(3):  # the server has read the half by now; a reset throws away what was not read
                client.set("key", b"value")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if sys.version_info < (3, 12):  # later versions cancel the handler, and nothing is said
            eventually(lambda: "before the end of the body" in caplog.text)
        for _ in range(3):
            client.set("key", b"value")
        assert {record.levelname for record in caplog.records} <= {"WARNING"}

    def test_the_store_outlives_the_service(self) -> None:
        server = RendezvousServer(SECRET)
        server.store.set("key", b"before")
        with server, RendezvousClient(server.address, server.port, SECRET) as client:
            assert client.get("key", 1) == b"before"
            client.set("key", b"during")
        server.store.set("other", b"after")
        assert server.store.get("key", 0) == b"during"

    def test_stop_answers_who_waits(self, server: RendezvousServer, client: RendezvousClient) -> None:
        with in_thread(lambda: client.get("never", 60)) as result:
            eventually(lambda: server.waiting == 1)
            server.stop()
            with pytest.raises(PeerLostError, match="the rendezvous server stops"):
                result()

    def test_nothing_leaks_of_those_who_arrive_during_stop(self) -> None:
        def arrive(server: RendezvousServer, arrived: list[socket.socket]) -> None:
            with suppress(ConnectionError):
                while len(arrived) < 100:
                    arrived.append(socket.create_connection((server.address, server.port)))

        for _ in range(10):
            server, arrived = RendezvousServer(SECRET, stop_timeout=0.01), []
            with server, ThreadPoolExecutor(1) as pool:
                pool.submit(arrive, server, arrived)
                eventually(lambda arrived=arrived: arrived)
                server.stop()
            for peer in arrived:
                peer.close()
        gc.collect()  # an unclosed connection warns when it is collected

    def test_nothing_leaks_whatever_the_peers_do(self) -> None:
        self.serve_rude_peers()
        process, threads = psutil.Process(), threading.active_count()
        before = process.num_fds()
        self.serve_rude_peers()
        # Libraries that other tests have started may open and close some meanwhile.
        eventually(lambda: (process.num_fds() <= before) and (threading.active_count() <= threads))

    @staticmethod
    def serve_rude_peers() -> None:
        """Stop while peers are silent, halfway through a head, a body or a long-poll, or do not read their answer."""
        with RendezvousServer(SECRET, stop_timeout=0.1) as server:
            server.store.set("large", bytes(8 << 20))
            peers = [socket.create_connection((server.address, server.port)) for _ in range(5)]
            peers[1].sendall(b"GET /ke")
            peers[2].sendall(
                encode("PUT", "/keys/a", signed(server, "PUT", "/keys/a") | {"content-length": "10"}, b"half")
            )
            peers[3].sendall(encode("GET", "/keys/never?wait=60", signed(server, "GET", "/keys/never?wait=60")))
            peers[4].sendall(encode("GET", "/keys/large", signed(server, "GET", "/keys/large")))
            assert peers[4].recv(1)
            eventually(lambda: server.waiting == 1)
        for peer in peers:
            peer.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_clients_of_either_family_reach_a_server_on_all_addresses(address):
    try:
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"this host has no {address}")
    with RendezvousServer(SECRET, everywhere()) as server, RendezvousClient(address, server.port, SECRET) as client:
        client.set("key", b"value")
        assert client.get("key", 0.0) == b"value"


def test_a_host_without_ipv6(monkeypatch):
    """The kernel may know the family, but have no address of it."""
    create = socket.create_server

    def without(address, family=socket.AF_INET, **arguments):
        if family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "no address")
        return create(address, family=family, **arguments)

    monkeypatch.setattr(socket, "create_server", without)
    for _ in range(2):
        with RendezvousServer(SECRET, everywhere()) as server:
            RendezvousClient("127.0.0.1", server.port, SECRET).set("key", b"value")
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    assert everywhere() == "0.0.0.0"


def test_a_port_of_either_family_that_is_taken():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"cannot listen on \S+ port {port}"):
            RendezvousServer(SECRET, everywhere(), port).start()
