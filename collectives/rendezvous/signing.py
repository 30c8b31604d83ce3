"""Signatures of requests and answers, and the memory that refuses replays. Pure: no clock, no socket.

A request is signed with HMAC-SHA256 over method, path with query, timestamp, nonce and the SHA-256 of its body; an
answer over status, the nonce of its request and the SHA-256 of its body. Every field is preceded by its length, so no
two different messages are signed as the same bytes. The digest travels in a header, so that a message is known to be
authentic before its body is read. Nothing is encrypted: an observer of the traffic can read it, but cannot change it,
replay it, or answer in place of the server.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "BODY_DIGEST",
    "NONCE",
    "SIGNATURE",
    "TIMESTAMP",
    "RefusedError",
    "ReplayGuard",
    "Seal",
    "check_body",
    "sign",
    "sign_answer",
    "verify",
    "verify_answer",
]

TIMESTAMP = "x-rendezvous-timestamp"
NONCE = "x-rendezvous-nonce"
BODY_DIGEST = "x-rendezvous-body-sha256"
SIGNATURE = "x-rendezvous-signature"

_FORMS = {
    TIMESTAMP: re.compile(r"[0-9]{1,12}\.[0-9]{6}", re.ASCII),
    NONCE: re.compile(r"[0-9a-f]{32}", re.ASCII),
    BODY_DIGEST: re.compile(r"[0-9a-f]{64}", re.ASCII),
    SIGNATURE: re.compile(r"[0-9a-f]{64}", re.ASCII),
}
_WINDOW = 300.0
_CAPACITY = 1 << 18


class RefusedError(ValueError):
    """A message is unsigned, malformed, altered, stale or replayed. The text is one sentence, safe to send back."""


@dataclass(frozen=True, slots=True)
class Seal:
    """The content of the headers of an authentic request. :func:`check_body` must still compare its body."""

    timestamp: float
    nonce: str
    digest: str


def sign(secret: bytes, method: str, path: str, body: bytes, timestamp: float, nonce: str) -> dict[str, str]:
    """The headers that make a request authentic. ``path`` is as it travels, quoted and with its query.

    ``timestamp`` is in seconds since the epoch, ``nonce`` is 32 hexadecimal digits that were never used before.
    """
    time, digest = f"{timestamp:.6f}", _digest(body)
    signature = _hmac(secret, "request", method, path, time, nonce, digest)
    return {TIMESTAMP: time, NONCE: nonce, BODY_DIGEST: digest, SIGNATURE: signature}


def verify(secret: bytes, method: str, path: str, headers: Mapping[str, str]) -> Seal:
    """The seal of a request with lower-case or case-insensitive ``headers``; RefusedError if it is not authentic."""
    time, nonce, digest = (_header(headers, name) for name in (TIMESTAMP, NONCE, BODY_DIGEST))
    _compare(headers, _hmac(secret, "request", method, path, time, nonce, digest))
    return Seal(float(time), nonce, digest)


def sign_answer(secret: bytes, status: int, body: bytes, nonce: str) -> dict[str, str]:
    """The headers that make the answer to the request with ``nonce`` authentic."""
    digest = _digest(body)
    return {BODY_DIGEST: digest, SIGNATURE: _hmac(secret, "answer", str(status), nonce, digest)}


def verify_answer(secret: bytes, status: int, nonce: str, headers: Mapping[str, str]) -> str:
    """The body digest that an authentic answer announces; RefusedError if it is not authentic."""
    digest = _header(headers, BODY_DIGEST)
    _compare(headers, _hmac(secret, "answer", str(status), nonce, digest))
    return digest


def check_body(digest: str, body: bytes) -> None:
    """Raise RefusedError unless ``body`` matches the signed ``digest``."""
    if not hmac.compare_digest(digest, _digest(body)):
        raise RefusedError("the body is not the one that was signed")


class ReplayGuard:
    """Admits every signed request once, in bounded memory.

    A timestamp may be up to ``window`` seconds away from the receiver's clock, because the clocks of hosts differ. At
    most ``capacity`` nonces are remembered; beyond that the oldest are forgotten, and everything as old as a forgotten
    one is refused, so that load narrows the window but never lets a replay through.
    """

    def __init__(self, window: float = _WINDOW, capacity: int = _CAPACITY) -> None:
        self._window = window
        self._capacity = capacity
        self._seen: set[str] = set()
        self._by_age: list[tuple[float, str]] = []
        self._forgotten = -math.inf

    def __len__(self) -> int:
        """Number of nonces remembered."""
        return len(self._seen)

    def admit(self, nonce: str, timestamp: float, now: float) -> None:
        """Remember the request; RefusedError if it is stale or was admitted before. Call after verification only."""
        while self._by_age and self._by_age[0][0] < now - self._window:
            self._forget_oldest()
        self._check_age(timestamp, now)
        if nonce in self._seen:
            raise RefusedError("this very request was received before, and a request is answered only once")
        self._seen.add(nonce)
        heapq.heappush(self._by_age, (timestamp, nonce))
        if len(self._seen) > self._capacity:
            self._forget_oldest()

    def _check_age(self, timestamp: float, now: float) -> None:
        if abs(now - timestamp) > self._window:
            raise RefusedError(
                f"the request was signed {now - timestamp:.0f} s ago by the clock of this server, and at most "
                f"{self._window:g} s of difference are allowed: synchronise the clocks of the hosts"
            )
        if timestamp <= self._forgotten:
            raise RefusedError("the request is as old as requests that are forgotten already: sign it again")

    def _forget_oldest(self) -> None:
        timestamp, nonce = heapq.heappop(self._by_age)
        self._seen.remove(nonce)
        self._forgotten = max(self._forgotten, timestamp)


def _header(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name)
    if value is None:
        raise RefusedError(f"the message is not signed: the header {name} is missing")
    if not _FORMS[name].fullmatch(value):
        raise RefusedError(f"the header {name} is malformed")
    return value


def _compare(headers: Mapping[str, str], expected: str) -> None:
    if not hmac.compare_digest(expected, _header(headers, SIGNATURE)):
        raise RefusedError("the signature is wrong: the message was altered, or the two sides have different secrets")


def _hmac(secret: bytes, *fields: str) -> str:
    # HMAC fills a short key up with zeros: without hashing it first, b"k" and b"k\0" would be one secret.
    code = hmac.new(hashlib.sha256(secret).digest(), digestmod=hashlib.sha256)
    for field in fields:
        # A path from the network can hold bytes that are not UTF-8; servers pass them on as surrogates.
        raw = field.encode("utf-8", "surrogateescape")
        code.update(len(raw).to_bytes(8, "big") + raw)
    return code.hexdigest()


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
