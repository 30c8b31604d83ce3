"""Signatures of requests and answers, and the memory that refuses replays. Pure: no clock, no socket.

A request is signed with HMAC-SHA256 over method, path with query, challenge, timestamp, nonce and the SHA-256 of its
body; an answer over status, the nonce of its request and the SHA-256 of its body. The digest of the body travels in a
header, so that a message is known to be authentic before its body is read. Nothing is encrypted: an observer of the
traffic can read it, but cannot change it, replay it, or answer in place of the server.

No clock of a host takes part. The *challenge* is a random number of one run of the server, and a timestamp is the
monotonic time of that run, in seconds. A client asks for both, and counts on from there (:class:`ServerTime`). So a
request that was recorded is refused by a server that was started again, however the clocks of the hosts differ or step.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from collectives.net import frames

CHALLENGE = "x-rendezvous-challenge"
TIMESTAMP = "x-rendezvous-timestamp"
NONCE = "x-rendezvous-nonce"
BODY_DIGEST = "x-rendezvous-body-sha256"
SIGNATURE = "x-rendezvous-signature"

_SECONDS = r"[0-9]{1,12}\.[0-9]{6}"
_FORMS = {
    CHALLENGE: re.compile(r"[0-9a-f]{32}", re.ASCII),
    TIMESTAMP: re.compile(_SECONDS, re.ASCII),
    NONCE: re.compile(r"[0-9a-f]{32}", re.ASCII),
    BODY_DIGEST: re.compile(r"[0-9a-f]{64}", re.ASCII),
    SIGNATURE: re.compile(r"[0-9a-f]{64}", re.ASCII),
}
_TIME = re.compile(rf"(?P<challenge>[0-9a-f]{{32}}) (?P<seconds>{_SECONDS})", re.ASCII)
WINDOW = 300.0
"""Seconds by which a timestamp may differ from the time of the server."""
_CAPACITY = 1 << 18


class RefusedError(ValueError):
    """A message is unsigned, malformed, altered, stale or replayed. The text is one sentence, safe to send back."""


class StaleError(RefusedError):
    """A request has another challenge or time than the server. Its sender may ask for both, and sign it again."""


@dataclass(frozen=True, slots=True)
class ServerTime:
    """The ``challenge`` of a server, and its monotonic time in ``seconds``, at one moment."""

    challenge: str
    seconds: float

    def after(self, seconds: float) -> ServerTime:
        """The time ``seconds`` later."""
        return ServerTime(self.challenge, self.seconds + seconds)

    def encode(self) -> bytes:
        """The body of an answer."""
        return f"{self.challenge} {self.seconds:.6f}".encode()

    @classmethod
    def decode(cls, body: bytes) -> ServerTime:
        """The time in the ``body`` of an answer. Raises RefusedError."""
        match = _TIME.fullmatch(body.decode("ascii", "replace"))
        if match is None:
            raise RefusedError("the time of the server is malformed")
        return cls(match["challenge"], float(match["seconds"]))


NO_TIME = ServerTime("0" * 32, 0.0)
"""Signs the request for the time of the server."""


@dataclass(frozen=True, slots=True)
class Seal:
    """The content of the headers of an authentic request. :func:`check_body` must still compare its body."""

    time: ServerTime
    nonce: str
    digest: str


def sign(secret: bytes, method: str, path: str, body: bytes, time: ServerTime, nonce: str) -> dict[str, str]:
    """The headers that make a request authentic. ``path`` is as it travels, quoted and with its query.

    ``time`` is that of the server, or NO_TIME; ``nonce`` is 32 hexadecimal digits that were never used before.
    """
    seconds, digest = f"{time.seconds:.6f}", _digest(body)
    signature = _hmac(secret, "request", method, path, time.challenge, seconds, nonce, digest)
    return {CHALLENGE: time.challenge, TIMESTAMP: seconds, NONCE: nonce, BODY_DIGEST: digest, SIGNATURE: signature}


def verify(secret: bytes, method: str, path: str, headers: Mapping[str, str]) -> Seal:
    """The seal of a request with lower-case or case-insensitive ``headers``; RefusedError if it is not authentic."""
    names = (CHALLENGE, TIMESTAMP, NONCE, BODY_DIGEST)
    challenge, seconds, nonce, digest = (_header(headers, name) for name in names)
    _compare(headers, _hmac(secret, "request", method, path, challenge, seconds, nonce, digest))
    return Seal(ServerTime(challenge, float(seconds)), nonce, digest)


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
    """Admits every signed request once, in bounded memory, for one run of a server with this ``challenge``.

    A timestamp may be up to ``window`` seconds away from the time of the server: a request can be long on its way, and
    the time of a host can stand still for a while. At most ``capacity`` nonces are remembered; beyond that the oldest
    are forgotten, and everything as old as a forgotten one is refused, so that load narrows the window but never lets
    a replay through. The time of the server, ``now``, must never fall.
    """

    def __init__(self, challenge: str, window: float = WINDOW, capacity: int = _CAPACITY) -> None:
        self._challenge = challenge
        self._window = window
        self._capacity = capacity
        self._seen: set[str] = set()
        self._by_age: list[tuple[float, str]] = []
        self._forgotten = -math.inf

    def __len__(self) -> int:
        """Number of nonces remembered."""
        return len(self._seen)

    def check(self, seal: Seal, now: float) -> None:
        """Raise StaleError if the request is stale, RefusedError if it was admitted before. Remembers nothing."""
        while self._by_age and self._by_age[0][0] < now - self._window:
            self._forget_oldest()
        if seal.time.challenge != self._challenge:
            raise StaleError("the request was signed for another run of this server: ask for its time, and sign again")
        if seal.nonce in self._seen:
            raise RefusedError("this very request was received before, and a request is answered only once")
        self._check_age(seal.time.seconds, now)

    def admit(self, seal: Seal, now: float) -> None:
        """Remember the request; raises the errors of :meth:`check`. Call after the verification of the body only."""
        self.check(seal, now)
        self._seen.add(seal.nonce)
        heapq.heappush(self._by_age, (seal.time.seconds, seal.nonce))
        if len(self._seen) > self._capacity:
            self._forget_oldest()

    def _check_age(self, seconds: float, now: float) -> None:
        if abs(now - seconds) > self._window:
            raise StaleError(
                f"the request was signed {now - seconds:.0f} s ago by the time of this server, and at most "
                f"{self._window:g} s of difference are allowed: ask for its time, and sign again"
            )
        if seconds <= self._forgotten:
            raise StaleError("the request is as old as requests that are forgotten already: sign it again")

    def _forget_oldest(self) -> None:
        seconds, nonce = heapq.heappop(self._by_age)
        self._seen.remove(nonce)
        self._forgotten = max(self._forgotten, seconds)


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
    # A path from the network can hold bytes that are not UTF-8; servers pass them on as surrogates.
    return frames.digest(secret, *(field.encode("utf-8", "surrogateescape") for field in fields)).hex()


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
