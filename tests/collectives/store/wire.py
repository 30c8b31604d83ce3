"""Requests to the rendezvous, signed or not, byte by byte."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

from collectives.store.server import RendezvousServer
from collectives.store.signing import NO_TIME, ServerTime, sign

SECRET = b"the secret of this job"
BODY_LIMIT = 64 * 1024
NONCES = (f"{number:032x}" for number in count())


def eventually(condition: Callable[[], object]) -> None:
    for _ in range(6000):  # half a minute or more
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


def time_of(server: RendezvousServer, secret: bytes = SECRET) -> ServerTime:
    """The time of ``server``, as a client learns it."""
    headers = sign(secret, "GET", "/time", b"", NO_TIME, next(NONCES))
    status, text = send(server, "GET", "/time", headers)
    assert status == 200, text
    return ServerTime.decode(text.encode())


def signed(
    server: RendezvousServer, method: str, path: str, body: bytes = b"", *, secret: bytes = SECRET, age: float = 0.0
) -> dict[str, str]:
    """The headers of a request to ``server`` that was signed ``age`` seconds ago."""
    return sign(secret, method, path, body, time_of(server).after(-age), next(NONCES))


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
