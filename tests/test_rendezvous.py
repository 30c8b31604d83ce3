"""The rendezvous: signatures, stores, and the service over loopback, down to bytes that no client of ours sends."""

from __future__ import annotations

import asyncio
import gc
import http.client
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import aiohttp
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collectives.api import (
    CollectiveTimeoutError,
    InvalidRequestError,
    PeerLostError,
    SettingsError,
    ShutDownError,
    Store,
)
from collectives.rendezvous import signing
from collectives.rendezvous.client import RendezvousClient
from collectives.rendezvous.server import RendezvousServer
from collectives.rendezvous.signing import RefusedError, ReplayGuard, check_body, sign, verify
from collectives.rendezvous.store import MemoryStore, PrefixStore, parse_counter

SECRET = b"the secret of this job"
BODY_LIMIT = 64 * 1024
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
NONCES = (f"{number:032x}" for number in count())


def eventually(condition: Callable[[], object]) -> None:
    for _ in range(2000):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("the condition did not come true")


@contextmanager
def in_thread(function: Callable[[], object]) -> Iterator[Callable[[], object]]:
    """Run ``function`` beside the body, which gets a function that returns its value or raises its error."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(function)
        yield lambda: future.result(30)


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    eventually(lambda: set(threading.enumerate()) <= before)


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    with RendezvousServer(SECRET, body_limit=BODY_LIMIT, stop_timeout=0.3) as server:
        yield server


@pytest.fixture
def client(server: RendezvousServer) -> Iterator[RendezvousClient]:
    with RendezvousClient(server.address, server.port, SECRET) as client:
        yield client


@pytest.fixture(params=["memory", "prefix", "client", "in-process"])
def store(request: pytest.FixtureRequest) -> Store:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "prefix":
        return PrefixStore(MemoryStore(), "job/7")
    if request.param == "client":
        return request.getfixturevalue("client")
    return request.getfixturevalue("server").store


def signed(method: str, path: str, body: bytes = b"", *, secret: bytes = SECRET, age: float = 0.0) -> dict[str, str]:
    return sign(secret, method, path, body, time.time() - age, next(NONCES))


def encode(method: str, path: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: here", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def transmit(server: RendezvousServer, *parts: bytes) -> tuple[int, str]:
    """Send bytes as they are; the status and the text of what comes back."""
    with socket.create_connection((server.address, server.port), 30) as connection:
        for part in parts:
            connection.sendall(part)
        response = http.client.HTTPResponse(connection)
        response.begin()
        with response:
            return response.status, response.read().decode()


def send(
    server: RendezvousServer, method: str, path: str, headers: dict[str, str], body: bytes = b""
) -> tuple[int, str]:
    return transmit(server, encode(method, path, headers | {"content-length": str(len(body))}, body))


def others(value: str | bytes) -> st.SearchStrategy[str | bytes]:
    """Values of the same type: any, or differing in one character that leaves a header well-formed."""
    if isinstance(value, bytes):
        return st.binary(max_size=40).filter(lambda other: other != value)
    places = st.integers(0, max(len(value) - 1, 0))
    near = st.builds(lambda i, digit: value[:i] + digit + value[i + 1 :], places, st.sampled_from("0123456789abcdef"))
    return (near | st.text(max_size=20)).filter(lambda other: other != value)


class TestSigning:
    texts = st.text(max_size=20)
    nonces = st.text("0123456789abcdef", min_size=32, max_size=32)
    messages = st.tuples(
        st.binary(min_size=1, max_size=40),
        texts,
        texts,
        st.binary(max_size=40),
        st.integers(0, 10**15).map(lambda microseconds: microseconds / 1e6),
        nonces,
    )

    @unhurried
    @given(messages)
    def test_a_signed_message_is_authentic(self, message: tuple[bytes, str, str, bytes, float, str]) -> None:
        secret, method, path, body, timestamp, nonce = message
        seal = verify(secret, method, path, sign(*message))
        check_body(seal.digest, body)
        assert (seal.timestamp, seal.nonce) == (timestamp, nonce)

    @unhurried
    @given(messages, messages)
    def test_two_messages_never_share_a_signature(self, one: tuple, other: tuple) -> None:
        same = sign(*one)[signing.SIGNATURE] == sign(*other)[signing.SIGNATURE]
        assert same == (one == other)

    @unhurried
    @given(messages, st.data())
    def test_any_change_to_any_field_breaks_it(self, message: tuple, data: st.DataObject) -> None:
        secret, method, path, body, _, _ = message
        fields: dict[str, Any] = {"secret": secret, "method": method, "path": path, "body": body, **sign(*message)}
        name = data.draw(st.sampled_from(sorted(fields)))
        fields[name] = data.draw(others(fields[name]))
        headers = {name: value for name, value in fields.items() if name.startswith("x-")}
        with pytest.raises(RefusedError):
            check_body(verify(fields["secret"], fields["method"], fields["path"], headers).digest, fields["body"])

    def test_text_cannot_move_from_one_field_to_the_next(self) -> None:
        headers = sign(SECRET, "GET", "/keys/a", b"", 1.0, "0" * 32)
        with pytest.raises(RefusedError, match="signature is wrong"):
            verify(SECRET, "GET/", "keys/a", headers)

    @pytest.mark.parametrize("name", [signing.TIMESTAMP, signing.NONCE, signing.BODY_DIGEST, signing.SIGNATURE])
    @pytest.mark.parametrize("value", [None, "", "nan", "1", "é", "٣" * 32, "0" * 1000])
    def test_missing_and_malformed_headers(self, name: str, value: str | None) -> None:
        headers = sign(SECRET, "GET", "/keys/a", b"", 1.0, "0" * 32)
        headers = {key: text for key, text in (headers | {name: value}).items() if text is not None}
        with pytest.raises(RefusedError, match=name):
            verify(SECRET, "GET", "/keys/a", headers)

    def test_an_answer_is_bound_to_status_nonce_and_body(self) -> None:
        headers = signing.sign_answer(SECRET, 200, b"value", "n1")
        check_body(signing.verify_answer(SECRET, 200, "n1", headers), b"value")
        for status, nonce in ((404, "n1"), (200, "n2")):
            with pytest.raises(RefusedError):
                signing.verify_answer(SECRET, status, nonce, headers)
        with pytest.raises(RefusedError):
            check_body(headers[signing.BODY_DIGEST], b"other")


class TestReplayGuard:
    def test_admits_once(self) -> None:
        guard = ReplayGuard()
        guard.admit("a", 1000.0, 1000.0)
        guard.admit("b", 1000.0, 1000.0)
        with pytest.raises(RefusedError, match="received before"):
            guard.admit("a", 1000.0, 1000.0)

    @pytest.mark.parametrize("now", [699.9, 1300.1])
    def test_stale_both_ways(self, now: float) -> None:
        with pytest.raises(RefusedError, match="synchronise the clocks"):
            ReplayGuard().admit("a", 1000.0, now)

    @pytest.mark.parametrize("now", [700.0, 1300.0])
    def test_the_window_is_inclusive(self, now: float) -> None:
        ReplayGuard().admit("a", 1000.0, now)

    def test_entries_expire_and_stay_refused_when_the_clock_goes_back(self) -> None:
        guard = ReplayGuard()
        guard.admit("a", 1000.0, 1000.0)
        guard.admit("b", 1400.0, 1400.0)
        assert len(guard) == 1
        with pytest.raises(RefusedError, match="forgotten"):
            guard.admit("a", 1000.0, 1100.0)

    @unhurried
    @given(st.lists(st.tuples(st.integers(0, 30), st.integers(800, 1200)), max_size=60))
    def test_full_memory_never_admits_twice(self, requests: list[tuple[int, int]]) -> None:
        guard, admitted = ReplayGuard(capacity=4), set()
        for number, timestamp in requests:
            try:
                guard.admit(f"{number}@{timestamp}", timestamp, 1000.0)
            except RefusedError:
                continue
            assert (number, timestamp) not in admitted
            admitted.add((number, timestamp))
            assert len(guard) <= 4

    def test_full_memory_still_admits_what_is_new(self) -> None:
        guard = ReplayGuard(capacity=4)
        for number in range(100):
            guard.admit(str(number), 1000.0 + number / 1000, 1000.0)


class TestStore:
    """What every store does; the same body over each."""

    @pytest.mark.parametrize("key", ["a", "job/rank/0", "//../x", ".", "a b?c=d&e#f%2F", "ключ/鍵/🔑", "x" * 1000])
    @pytest.mark.parametrize("value", [b"", bytes(range(256)), b"\x80\x04N."])
    def test_round_trip(self, store: Store, key: str, value: bytes) -> None:
        store.set(key, value)
        assert store.get(key, 0) == value
        store.delete(key)
        store.delete(key)
        with pytest.raises(CollectiveTimeoutError):
            store.get(key, 0)

    def test_replace(self, store: Store) -> None:
        store.set("key", b"old")
        store.set("key", b"new")
        assert store.get("key", 1) == b"new"

    def test_get_waits_for_a_later_set(self, store: Store) -> None:
        with in_thread(lambda: store.get("late", 30)) as result:
            store.set("other", b"no")
            store.set("late", b"yes")
            assert result() == b"yes"

    def test_timeout_names_key_and_remedy(self, store: Store) -> None:
        with pytest.raises(CollectiveTimeoutError, match=r"absent.*0\.01 s.*raise the timeout"):
            store.get("absent", 0.01)

    def test_counter(self, store: Store) -> None:
        assert [store.add("count", amount) for amount in (5, -7, 0)] == [5, -2, -2]
        assert store.get("count", 0) == b"-2"
        store.set("count", b"40")
        assert store.add("count", 2) == 42

    def test_counters_of_many_threads(self, store: Store) -> None:
        with ThreadPoolExecutor(8) as pool:
            totals = list(pool.map(lambda _: store.add("count", 1), range(200)))
        assert sorted(totals) == list(range(1, 201))

    @pytest.mark.parametrize("value", [b"", b"1.0", b" 1", b"1_0", b"0x1", "٣".encode(), b"9" * 19, b"1" * 5000])
    def test_what_is_no_counter_stays_as_it_is(self, store: Store, value: bytes) -> None:
        store.set("key", value)
        with pytest.raises(InvalidRequestError):
            store.add("key", 1)
        assert store.get("key", 0) == value

    def test_counters_stay_in_64_bits(self, store: Store) -> None:
        assert store.add("count", 2**63 - 1) == 2**63 - 1
        with pytest.raises(InvalidRequestError, match="64-bit"):
            store.add("count", 1)
        assert parse_counter(store.get("count", 0)) == 2**63 - 1

    @pytest.mark.parametrize("key", ["", "a\nb", "a\0", "\x7f", "\x85", "\ud800", "x" * 1025])
    def test_bad_keys(self, store: Store, key: str) -> None:
        for use in (
            lambda: store.set(key, b""),
            lambda: store.get(key, 0),
            lambda: store.add(key, 1),
            lambda: store.delete(key),
        ):
            with pytest.raises(InvalidRequestError, match="key"):
                use()


def test_prefixes_nest_and_separate() -> None:
    inner = MemoryStore()
    PrefixStore(PrefixStore(inner, "a"), "b").set("c", b"1")
    assert inner.peek("a/b/c") == b"1"
    assert PrefixStore(inner, "a/b").get("c", 0) == b"1"
    PrefixStore(inner, "other").delete("c")
    assert inner.peek("a/b/c") == b"1"


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
            connection.sendall(encode("GET", path, signed("GET", path)))
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
        headers = signed("PUT", "/keys/a", b"evil", secret=b"a guess")
        status, text = send(server, "PUT", "/keys/a", headers, b"evil")
        assert (status, "signature is wrong" in text) == (401, True)
        self.nothing_changed(server)

    @pytest.mark.parametrize(
        ("method", "path", "body"),
        [("PUT", "/keys/a", b"evil"), ("PUT", "/keys/b", b"good"), ("DELETE", "/keys/a", b"good")],
    )
    def test_altered_on_the_way(self, server: RendezvousServer, method: str, path: str, body: bytes) -> None:
        assert send(server, method, path, signed("PUT", "/keys/a", b"good"), body)[0] == 401
        self.nothing_changed(server)

    @pytest.mark.parametrize("age", [310.0, -310.0])
    def test_a_stale_request(self, server: RendezvousServer, age: float) -> None:
        status, text = send(server, "PUT", "/keys/a", signed("PUT", "/keys/a", b"late", age=age), b"late")
        assert (status, "synchronise the clocks" in text) == (401, True)
        self.nothing_changed(server)

    @pytest.mark.parametrize("age", [290.0, -290.0])
    def test_clocks_may_differ(self, server: RendezvousServer, age: float) -> None:
        assert send(server, "PUT", "/keys/a", signed("PUT", "/keys/a", b"1", age=age), b"1")[0] == 200

    def test_a_request_counts_once(self, server: RendezvousServer) -> None:
        headers = signed("POST", "/counters/a", b"1") | {"content-length": "1"}
        request = encode("POST", "/counters/a", headers, b"1")
        assert transmit(server, request) == (200, "1")
        status, text = transmit(server, request)
        assert (status, "received before" in text) == (401, True)
        assert server.store.get("a", 0) == b"1"

    def test_a_refused_copy_does_not_use_up_the_original(self, server: RendezvousServer) -> None:
        headers = signed("PUT", "/keys/a", b"good")
        assert send(server, "PUT", "/keys/a", headers, b"evil")[0] == 401
        assert send(server, "PUT", "/keys/a", headers, b"good")[0] == 200

    def test_a_huge_body_is_refused_before_it_is_sent(self, server: RendezvousServer) -> None:
        for headers in (signed("PUT", "/keys/a"), {}):
            status, text = transmit(server, encode("PUT", "/keys/a", headers | {"content-length": str(10**9)}))
            assert (status, str(BODY_LIMIT) in text) == (413, True)
        self.nothing_changed(server)

    def test_an_endless_body_is_cut_at_the_limit(self, server: RendezvousServer) -> None:
        head = encode("PUT", "/keys/a", signed("PUT", "/keys/a") | {"transfer-encoding": "chunked"})
        chunk = b"%x\r\n%b\r\n" % (BODY_LIMIT // 2, bytes(BODY_LIMIT // 2))
        assert transmit(server, head, chunk, chunk, chunk)[0] == 413
        self.nothing_changed(server)

    def test_a_chunked_body_within_the_limit(self, server: RendezvousServer) -> None:
        body = bytes(BODY_LIMIT)
        head = encode("PUT", "/keys/a", signed("PUT", "/keys/a", body) | {"transfer-encoding": "chunked"})
        assert transmit(server, head, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))[0] == 200
        assert server.store.get("a", 0) == body

    def test_a_compressed_body_is_only_bytes(self, server: RendezvousServer) -> None:
        headers = signed("PUT", "/keys/a", b"not gzip") | {"content-encoding": "gzip"}
        assert send(server, "PUT", "/keys/a", headers, b"not gzip")[0] == 200
        assert server.store.get("a", 0) == b"not gzip"

    def test_a_malformed_chunk(self, server: RendezvousServer) -> None:
        head = encode("PUT", "/keys/a", signed("PUT", "/keys/a") | {"transfer-encoding": "chunked"})
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
        answered, text = send(server, method, path, signed(method, path))
        assert answered == status
        assert text
        self.nothing_changed(server)

    def test_what_is_no_http(self, server: RendezvousServer) -> None:
        assert transmit(server, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")[0] == 400
        self.nothing_changed(server)

    def test_no_secret_in_the_log(self, server: RendezvousServer, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG), RendezvousClient(server.address, server.port, SECRET) as client:
            client.set("key", b"a private value")
            send(server, "PUT", "/keys/a", signed("PUT", "/keys/a", secret=b"a guess"))
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

    async def wait(session: aiohttp.ClientSession) -> bytes:
        url = aiohttp.client.URL(f"http://{server.address}:{server.port}{path}", encoded=True)
        async with session.get(url, headers=signed("GET", path)) as response:
            return await response.read()

    async def wait_all() -> list[bytes]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await asyncio.gather(*(wait(session) for _ in range(500)))

    with in_thread(lambda: asyncio.run(wait_all())) as result:
        eventually(lambda: server.waiting == 500)
        server.store.set("the/start", b"go")
        assert result() == [b"go"] * 500


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
        assert (process.num_fds(), threading.active_count()) == (before, threads)

    @staticmethod
    def serve_rude_peers() -> None:
        """Stop while peers are silent, halfway through a head, a body or a long-poll, or do not read their answer."""
        with RendezvousServer(SECRET, stop_timeout=0.1) as server:
            server.store.set("large", bytes(8 << 20))
            peers = [socket.create_connection((server.address, server.port)) for _ in range(5)]
            peers[1].sendall(b"GET /ke")
            peers[2].sendall(encode("PUT", "/keys/a", signed("PUT", "/keys/a") | {"content-length": "10"}, b"half"))
            peers[3].sendall(encode("GET", "/keys/never?wait=60", signed("GET", "/keys/never?wait=60")))
            peers[4].sendall(encode("GET", "/keys/large", signed("GET", "/keys/large")))
            assert peers[4].recv(1)
            eventually(lambda: server.waiting == 1)
        for peer in peers:
            peer.close()


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

    def test_a_clock_that_is_wrong(self, client: RendezvousClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("collectives.rendezvous.service.time", SimpleNamespace(time=lambda: 2e9))
        with pytest.raises(SettingsError, match="synchronise the clocks"):
            client.set("a", b"")

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


def test_what_is_not_http_is_one_line_in_the_log(
    server: RendezvousServer, client: RendezvousClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with socket.create_connection((server.address, server.port), timeout=10) as stranger:
        stranger.sendall(b"\x16\x03\x01 who is there\r\n\r\n")
        while stranger.recv(4096):
            pass
    client.set("key", b"value")
    assert client.get("key", 1.0) == b"value"
    [record] = [record for record in caplog.records if record.name.endswith(".http")]
    assert record.exc_info is None
