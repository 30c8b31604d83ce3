"""The service over loopback, down to bytes that no client of ours sends."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from urllib.parse import quote

import aiohttp
import pytest
from msgpack import packb

from collectives.api import (
    CollectiveTimeoutError,
)
from collectives.store import service
from collectives.store.client import RendezvousClient
from collectives.store.server import RendezvousServer
from collectives.store.signing import NO_TIME, sign
from tests.collectives.store.wire import BODY_LIMIT, SECRET, encode, eventually, in_thread, send, signed, transmit


def shift_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """From now on the time of all servers is ahead by ``seconds``, or behind."""
    monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + seconds))


class TestService:
    def test_both_sides_see_one_store(self, server: RendezvousServer, client: RendezvousClient) -> None:
        server.store.set("from/driver", b"1")
        assert client.get("from/driver", 1) == b"1"
        client.add("from/worker", 2)
        assert server.store.get("from/worker", 1) == b"2"

    @pytest.mark.parametrize("side", ["driver", "worker"])
    def test_a_long_poll_wakes(self, server: RendezvousServer, client: RendezvousClient, side: str) -> None:
        with in_thread(lambda: client.get("late", 60)) as result:
            eventually(lambda: server.waiting == 1)
            (server.store if side == "driver" else client).set("late", b"here")
            assert result() == b"here"
        assert server.waiting == 0

    def test_a_long_poll_ends_when_the_worker_hangs_up(self, server: RendezvousServer) -> None:
        path = "/keys/never?wait=60"
        with socket.create_connection((server.address, server.port)) as connection:
            connection.sendall(encode("GET", path, signed(server, "GET", path)))
            eventually(lambda: server.waiting == 1)
        eventually(lambda: server.waiting == 0)

    def test_polls_again_when_the_server_waits_less(self) -> None:
        with (
            RendezvousServer(SECRET, wait_limit=0.01) as server,
            RendezvousClient(server.address, server.port, SECRET) as client,
            in_thread(lambda: client.get("late", 60)) as result,
        ):
            eventually(lambda: server.waiting == 1)
            eventually(lambda: server.waiting == 0)
            server.store.set("late", b"here")
            assert result() == b"here"

    def test_an_unsigned_request(self, server: RendezvousServer) -> None:
        status, text = send(server, "PUT", "/keys/a", {}, b"evil")
        assert (status, "not signed" in text) == (401, True)
        self.nothing_changed(server)

    def test_another_secret(self, server: RendezvousServer) -> None:
        headers = signed(server, "PUT", "/keys/a", b"evil", secret=b"a guess")
        status, text = send(server, "PUT", "/keys/a", headers, b"evil")
        assert (status, "signature is wrong" in text) == (401, True)
        self.nothing_changed(server)

    @pytest.mark.parametrize(
        ("method", "path", "body"),
        [("PUT", "/keys/a", b"evil"), ("PUT", "/keys/b", b"good"), ("DELETE", "/keys/a", b"good")],
    )
    def test_altered_on_the_way(self, server: RendezvousServer, method: str, path: str, body: bytes) -> None:
        assert send(server, method, path, signed(server, "PUT", "/keys/a", b"good"), body)[0] == 401
        self.nothing_changed(server)

    @pytest.mark.parametrize("seconds", [310.0, -310.0])
    def test_a_stale_request(self, server: RendezvousServer, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        headers = signed(server, "PUT", "/keys/a", b"late")
        shift_time(monkeypatch, seconds)
        status, text = send(server, "PUT", "/keys/a", headers, b"late")
        assert (status, "sign again" in text) == (428, True)
        self.nothing_changed(server)

    @pytest.mark.parametrize("seconds", [290.0, -290.0])
    def test_a_request_may_take_long(
        self, server: RendezvousServer, monkeypatch: pytest.MonkeyPatch, seconds: float
    ) -> None:
        headers = signed(server, "PUT", "/keys/a", b"1")
        shift_time(monkeypatch, seconds)
        assert send(server, "PUT", "/keys/a", headers, b"1")[0] == 200

    def test_requests_that_somebody_recorded_mean_nothing_to_the_next_server(self, server: RendezvousServer) -> None:
        """It has the same secret and port, and no memory of the requests. The request for its time shows nothing."""
        recorded = [
            (method, path, signed(server, method, path, body), body)
            for method, path, body in (
                ("PUT", "/keys/a", b"old"),
                ("POST", "/counters/b", b"1"),
                ("GET", "/keys/a", b""),
                ("DELETE", "/keys/kept", b""),
                ("PUT", "/keys", packb({"a": b"old"})),
            )
        ]
        assert send(server, *recorded[0])[0] == 200
        server.stop()
        with RendezvousServer(SECRET, port=server.port) as following:
            following.store.set("kept", b"value")
            assert [send(following, *request)[0] for request in recorded] == [428] * len(recorded)
            self.nothing_changed(following)
            assert following.store.get("kept", 0) == b"value"

    def test_the_time_signs_no_other_request(self, server: RendezvousServer) -> None:
        headers = sign(SECRET, "PUT", "/keys/a", b"evil", NO_TIME, "0" * 32)
        assert send(server, "PUT", "/keys/a", headers, b"evil")[0] == 428
        assert send(server, "GET", "/time", {})[0] == 401
        self.nothing_changed(server)

    def test_a_copied_head_does_not_hold_a_connection(self, server: RendezvousServer) -> None:
        """The server refuses it before the body comes, so the limits of strangers hold."""
        headers = signed(server, "PUT", "/keys/c", b"12345")
        assert send(server, "PUT", "/keys/c", headers, b"12345")[0] == 200
        status, text = transmit(server, encode("PUT", "/keys/c", headers | {"content-length": "5"}))
        assert (status, "received before" in text) == (401, True)

    def test_a_request_counts_once(self, server: RendezvousServer) -> None:
        headers = signed(server, "POST", "/counters/a", b"1") | {"content-length": "1"}
        request = encode("POST", "/counters/a", headers, b"1")
        assert transmit(server, request) == (200, "1")
        status, text = transmit(server, request)
        assert (status, "received before" in text) == (401, True)
        assert server.store.get("a", 0) == b"1"

    def test_a_refused_copy_does_not_use_up_the_original(self, server: RendezvousServer) -> None:
        headers = signed(server, "PUT", "/keys/a", b"good")
        assert send(server, "PUT", "/keys/a", headers, b"evil")[0] == 401
        assert send(server, "PUT", "/keys/a", headers, b"good")[0] == 200

    def test_a_huge_body_is_refused_before_it_is_sent(self, server: RendezvousServer) -> None:
        for headers in (signed(server, "PUT", "/keys/a"), {}):
            status, text = transmit(server, encode("PUT", "/keys/a", headers | {"content-length": str(10**9)}))
            assert (status, str(BODY_LIMIT) in text) == (413, True)
        self.nothing_changed(server)

    def test_an_endless_body_is_cut_at_the_limit(self, server: RendezvousServer) -> None:
        head = encode("PUT", "/keys/a", signed(server, "PUT", "/keys/a") | {"transfer-encoding": "chunked"})
        chunk = b"%x\r\n%b\r\n" % (BODY_LIMIT // 2, bytes(BODY_LIMIT // 2))
        assert transmit(server, head, chunk, chunk, chunk)[0] == 413
        self.nothing_changed(server)

    def test_a_chunked_body_within_the_limit(self, server: RendezvousServer) -> None:
        body = bytes(BODY_LIMIT)
        head = encode("PUT", "/keys/a", signed(server, "PUT", "/keys/a", body) | {"transfer-encoding": "chunked"})
        assert transmit(server, head, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))[0] == 200
        assert server.store.get("a", 0) == body

    def test_a_compressed_body_is_only_bytes(self, server: RendezvousServer) -> None:
        headers = signed(server, "PUT", "/keys/a", b"not gzip") | {"content-encoding": "gzip"}
        assert send(server, "PUT", "/keys/a", headers, b"not gzip")[0] == 200
        assert server.store.get("a", 0) == b"not gzip"

    def test_a_worker_that_waits_at_the_end_of_the_job_is_no_warning(
        self, server: RendezvousServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "collectives")
        path = "/keys/never?wait=60"
        with in_thread(lambda: send(server, "GET", path, signed(server, "GET", path))) as answer:
            eventually(lambda: server.waiting == 1)
            server.stop()
            assert answer()[0] == 503
        assert self.levels(caplog) == ["DEBUG"]

    def test_a_body_that_is_late_is_no_warning(
        self, server: RendezvousServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        caplog.set_level(logging.DEBUG, "collectives")
        monkeypatch.setattr(service, "_BODY_TIMEOUT", 0.05)
        headers = signed(server, "PUT", "/keys/a", b"ten bytes!") | {"content-length": "10"}
        assert transmit(server, encode("PUT", "/keys/a", headers, b"ten"))[0] == 408
        assert self.levels(caplog) == ["DEBUG"]

    def test_any_other_refusal_is_a_warning(self, server: RendezvousServer, caplog: pytest.LogCaptureFixture) -> None:
        assert send(server, "PUT", "/keys/a", {}, b"evil")[0] == 401
        assert self.levels(caplog) == ["WARNING"]

    @staticmethod
    def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
        return [record.levelname for record in caplog.records if record.message.startswith("refused ")]

    def test_a_malformed_chunk(self, server: RendezvousServer) -> None:
        head = encode("PUT", "/keys/a", signed(server, "PUT", "/keys/a") | {"transfer-encoding": "chunked"})
        assert transmit(server, head + b"zz\r\n")[0] == 400
        self.nothing_changed(server)

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", "/", 404),
            ("GET", "/keys/", 404),
            ("GET", "/keys/a?wait=-1", 404),
            ("GET", "/keys/a?wait=nan", 404),
            ("GET", "/keys/a?wait=1e9", 404),
            ("GET", "/keys/a?wait=1&wait=2", 404),
            ("PUT", "/keys/a?wait=1", 400),
            ("PUT", "/keys/%ff", 400),
            ("PUT", "/keys/%00", 400),
            ("PUT", "/keys/" + "x" * 1025, 400),
            ("PUT", "/counters/a", 405),
            ("POST", "/keys/a", 405),
            ("PATCH", "/keys/a", 405),
            ("POST", "/counters/a", 400),
        ],
    )
    def test_malformed(self, server: RendezvousServer, method: str, path: str, status: int) -> None:
        answered, text = send(server, method, path, signed(server, method, path))
        assert answered == status
        assert text
        self.nothing_changed(server)

    @pytest.mark.parametrize(
        "values", [b"", b"\xc1", packb({"a": 1}), packb({1: b"a"}), packb({b"a": b"b"}), packb(["a"]), packb({"": b""})]
    )
    def test_malformed_values_of_several_keys(self, server: RendezvousServer, values: bytes) -> None:
        status, text = send(server, "PUT", "/keys", signed(server, "PUT", "/keys", values), values)
        assert status == 400
        assert text
        self.nothing_changed(server)

    def test_what_is_no_http(self, server: RendezvousServer) -> None:
        assert transmit(server, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")[0] == 400
        self.nothing_changed(server)

    def test_no_secret_in_the_log(self, server: RendezvousServer, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG), RendezvousClient(server.address, server.port, SECRET) as client:
            client.set("key", b"a private value")
            send(server, "PUT", "/keys/a", signed(server, "PUT", "/keys/a", secret=b"a guess"))
        assert "refused PUT" in caplog.text
        for private in (SECRET.decode(), "a private value", "a guess"):
            assert private not in caplog.text

    @staticmethod
    def nothing_changed(server: RendezvousServer) -> None:
        for key in ("a", "b"):
            with pytest.raises(CollectiveTimeoutError):
                server.store.get(key, 0)


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft < 4096 else soft, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_500_wait_at_once(server: RendezvousServer) -> None:
    path = "/keys/" + quote("the/start", safe="") + "?wait=60"

    async def wait(session: aiohttp.ClientSession, headers: dict[str, str]) -> bytes:
        url = aiohttp.client.URL(f"http://{server.address}:{server.port}{path}", encoded=True)
        async with session.get(url, headers=headers) as response:
            return await response.read()

    async def wait_all(heads: list[dict[str, str]]) -> list[bytes]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await asyncio.gather(*(wait(session, headers) for headers in heads))

    heads = [signed(server, "GET", path) for _ in range(500)]
    with in_thread(lambda: asyncio.run(wait_all(heads))) as result:
        eventually(lambda: server.waiting == 500)
        server.store.set("the/start", b"go")
        assert result() == [b"go"] * 500


def test_what_is_not_http_is_one_line_in_the_log(
    server: RendezvousServer, client: RendezvousClient, caplog: pytest.LogCaptureFixture
) -> None:
    # For aiohttp, what has no method is no warning.
    caplog.set_level(logging.DEBUG, "collectives.store.service")
    with socket.create_connection((server.address, server.port), timeout=10) as stranger:
        stranger.sendall(b"\x16\x03\x01 who is there\r\n\r\n")
        while stranger.recv(4096):
            pass
    client.set("key", b"value")
    assert client.get("key", 1.0) == b"value"
    [record] = caplog.records
    assert record.exc_info is None
    assert re.search(r"refused a request that is not HTTP: '\w.*'$", record.message), "it has a reason"


def test_refused_requests_are_one_line_a_minute(server: RendezvousServer, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is wrong with them; the answers still say it."""
    for number in range(20):
        assert send(server, "PUT", f"/keys/{number}", {}, b"evil")[0] == 401
        assert transmit(server, b"\x16\x03 not HTTP\r\n\r\n")[0] == 400
    [record] = caplog.records
    assert "refused PUT '/keys/0' from 127.0.0.1: the message is not signed" in record.message
