"""The client, and servers that lie to it."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from types import SimpleNamespace

import pytest

from collectives.api import (
    CollectiveTimeoutError,
    InvalidRequestError,
    PeerLostError,
    SettingsError,
    ShutDownError,
)
from collectives.store import service, signing
from collectives.store.client import RendezvousClient, _Request
from collectives.store.server import RendezvousServer
from collectives.store.signing import ServerTime
from tests.collectives.store.wire import BODY_LIMIT, SECRET, eventually, in_thread


@contextmanager
def impostor(answer: bytes) -> Iterator[int]:
    """A server that reads one request after the other and answers each with the same bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(10):
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(30)


class TestClient:
    @pytest.mark.parametrize(
        "arguments",
        [{"address": ""}, {"address": "a\nb"}, {"port": 0}, {"port": 65536}, {"secret": b""}, {"connect_timeout": 0}],
        ids=repr,
    )
    def test_bad_arguments(self, arguments: dict[str, object]) -> None:
        with pytest.raises(SettingsError):
            RendezvousClient(**({"address": "127.0.0.1", "port": 1, "secret": SECRET} | arguments))

    def test_timeout_names_the_server(self, server: RendezvousServer, client: RendezvousClient) -> None:
        with pytest.raises(CollectiveTimeoutError, match=rf"'absent'.*{server.address} port {server.port}.*raise"):
            client.get("absent", 0.01)

    def test_nobody_listens(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        client = RendezvousClient("127.0.0.1", port, SECRET, connect_timeout=0.05)
        for use in (lambda: client.set("a", b""), lambda: client.get("a", 0), lambda: client.add("a", 1)):
            with pytest.raises(
                PeerLostError, match=rf"127\.0\.0\.1 port {port} cannot be reached.*check that the driver"
            ):
                use()

    def test_a_shorter_time_for_a_value(self) -> None:
        """Whether nobody listens, or the server accepts the connection and does not answer."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            client = RendezvousClient("127.0.0.1", port, SECRET, connect_timeout=600.0)
            with pytest.raises(PeerLostError, match=r"did not answer within 0\.05 s"):
                client.set("a", b"", 0.05)
        with pytest.raises(PeerLostError, match=r"cannot be reached for 0\.05 s"):
            client.set("a", b"", 0.05)

    def test_an_unknown_host(self) -> None:
        with pytest.raises(PeerLostError, match="cannot be reached"):
            RendezvousClient("host..invalid", 1, SECRET, connect_timeout=0.05).set("a", b"")

    def test_waits_for_a_server_that_starts_later(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        client = RendezvousClient("127.0.0.1", port, SECRET)
        with in_thread(lambda: client.add("a", 1)) as result, RendezvousServer(SECRET, port=port):
            assert result() == 1

    def test_another_secret(self, server: RendezvousServer) -> None:
        stranger = RendezvousClient(server.address, server.port, b"a guess")
        with pytest.raises(SettingsError, match=rf"{server.port}.*different secrets.*of its own job"):
            stranger.set("a", b"")

    def test_the_clock_of_the_host_may_step(self, client: RendezvousClient, monkeypatch: pytest.MonkeyPatch) -> None:
        """That of the server, of the client, or of both: after the resume of a virtual machine, or by NTP."""
        steps = deque([1e9, 1e9 + 1e6, 1e9 - 1e6, 0.0] * 10_000)
        monkeypatch.setattr(time, "time", steps.popleft)
        for number in range(20):
            client.set("a", b"%d" % number)
            assert client.get("a", 1) == b"%d" % number
        assert client.add("b", 1) == 1

    @pytest.mark.parametrize("seconds", [1e6, -1e6])
    def test_the_time_of_one_side_may_stand_still(
        self, client: RendezvousClient, monkeypatch: pytest.MonkeyPatch, seconds: float
    ) -> None:
        """While its host is suspended. The client asks for the time again, and signs again."""
        client.set("a", b"1")
        monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=lambda: 2e6 + time.monotonic() + seconds))
        client.set("a", b"2")
        assert client.get("a", 1) == b"2"
        assert client.add("b", 1) == 1

    def test_a_server_that_was_started_again(self) -> None:
        with RendezvousServer(SECRET) as server:
            client = RendezvousClient(server.address, server.port, SECRET)
            client.set("a", b"1")
        with RendezvousServer(SECRET, port=server.port) as following:
            assert client.add("b", 1) == 1
            client.set("a", b"2")
            assert following.store.get("a", 0) == b"2"
        with RendezvousServer(SECRET, port=server.port):
            client.set("a", b"3")

    def test_a_time_that_is_refused_again_and_again(
        self, client: RendezvousClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        times = itertools.count(1e6, 1e6)
        monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=lambda: next(times)))
        for use in (lambda: client.set("a", b""), lambda: client.add("b", 1)):
            with pytest.raises(PeerLostError, match="refused: the request was signed"):
                use()

    def test_a_value_over_the_limit(self, server: RendezvousServer, client: RendezvousClient) -> None:
        client.set("a", bytes(BODY_LIMIT))
        with pytest.raises(InvalidRequestError, match=f"limit of {BODY_LIMIT} bytes"):
            client.set("a", bytes(8 * BODY_LIMIT))
        assert server.store.get("a", 0) == bytes(BODY_LIMIT)

    def test_an_answer_nobody_signed(self) -> None:
        with impostor(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil") as port:
            client = RendezvousClient("127.0.0.1", port, SECRET)
            with pytest.raises(SettingsError, match="not signed"):
                client.get("a", 1)

    def test_an_answer_to_another_request(self) -> None:
        headers = "".join(f"{k}: {v}\r\n" for k, v in signing.sign_answer(SECRET, 200, b"old", "0" * 32).items())
        with impostor(f"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n{headers}\r\nold".encode()) as port:
            client = RendezvousClient("127.0.0.1", port, SECRET)
            with pytest.raises(SettingsError, match="signature is wrong"):
                client.get("a", 1)

    @pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 2", b"220 mail.example.com ESMTP\r\n"])
    def test_a_broken_answer(self, answer: bytes) -> None:
        with impostor(answer) as port:
            client = RendezvousClient("127.0.0.1", port, SECRET)
            for use in (lambda: client.set("a", b""), lambda: client.get("a", 1), lambda: client.add("a", 1)):
                with pytest.raises(PeerLostError, match="broke the connection"):
                    use()

    def test_a_server_that_never_answers(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = RendezvousClient("127.0.0.1", listener.getsockname()[1], SECRET, connect_timeout=0.05)
            with pytest.raises(PeerLostError, match="did not answer within"):
                client.add("a", 1)

    def test_close_ends_a_call_under_way(self, server: RendezvousServer, client: RendezvousClient) -> None:
        with in_thread(lambda: client.get("never", 60)) as result:
            eventually(lambda: server.waiting == 1)
            client.close()
            client.close()
            with pytest.raises(ShutDownError, match="was closed"):
                result()
        with pytest.raises(ShutDownError):
            client.set("a", b"")

    def test_close_ends_a_call_that_tries_to_connect(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        client = RendezvousClient("127.0.0.1", port, SECRET, connect_timeout=60)
        with in_thread(lambda: client.set("a", b"")) as result:
            client.close()
            with pytest.raises(ShutDownError):
                result()


def test_a_second_client_of_a_server_knows_its_time_and_one_of_the_next_server_asks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths: list[str] = []
    converse = RendezvousClient._converse

    def note(self: RendezvousClient, connection: HTTPConnection, request: _Request, moment: ServerTime) -> object:
        paths.append(request.path)
        return converse(self, connection, request, moment)

    monkeypatch.setattr(RendezvousClient, "_converse", note)
    with RendezvousServer(SECRET) as server:
        for value in (b"1", b"2"):
            with RendezvousClient("127.0.0.1", server.port, SECRET) as client:
                client.set("a", value)
    with (
        RendezvousServer(SECRET, port=server.port) as following,
        RendezvousClient("127.0.0.1", server.port, SECRET) as client,
    ):
        client.set("a", b"3")
        assert following.store.get("a", 0) == b"3"
    assert paths == ["/time", "/keys/a", "/keys/a", "/keys/a", "/time", "/keys/a"]
