"""The sink of a rank other than 0: sends its records to rank 0, with times of the clock of rank 0."""

from __future__ import annotations

import logging
import select
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgpack

from collectives.api import CollectiveTimeoutError, HorovodInternalError, SettingsError, Store
from collectives.handshake.dial import Callee, GoneError, NoListenerError, call
from collectives.net.attempts import ConnectAttempt
from collectives.net.sockets import Connection
from collectives.observe.timeline.address import END, PING, TimelineAddress, pack_records
from collectives.observe.timeline.document import DocumentError, NoDocumentError
from collectives.observe.timeline.records import Record

logger = logging.getLogger(__name__)


class Trip(NamedTuple):
    """A question and its answer: ``sent`` and ``received`` on the own clock, ``there`` on the other one, in seconds."""

    sent: float
    there: float
    received: float


class Offset(NamedTuple):
    """The other clock shows ``seconds`` more than the own one; that is wrong by at most ``error`` seconds."""

    seconds: float
    error: float


def offset(trips: Sequence[Trip]) -> Offset:
    """The offset that agrees with all ``trips``, of which there is at least one.

    Each bounds the offset, because the answer was made between question and arrival. If a clock was set meanwhile so
    that they contradict each other, the fastest one counts. Two processes of one host have one clock: if the bounds
    allow 0, it is 0.
    """
    least = max(trip.there - trip.received for trip in trips)
    most = min(trip.there - trip.sent for trip in trips)
    if least > most:
        fastest = min(trips, key=lambda trip: trip.received - trip.sent)
        least, most = fastest.there - fastest.received, fastest.there - fastest.sent
    if least <= 0.0 <= most:
        return Offset(0.0, 0.0)
    return Offset((least + most) / 2, (most - least) / 2)


CONNECT_SECONDS = 30.0
LOOK_SECONDS = 0.5
"""How long a rank waits for the address of rank 0 before it looks whether it shall end."""
AGAIN_SECONDS = 0.02
TRIPS = 6
TRIP_SECONDS = 0.25
CLOCK_SECONDS = 5.0
"""The time between two estimates of the clock: clocks of two hosts part by some microseconds a second."""
DRAIN_SECONDS = 2.0
TIME = struct.Struct(">d")


class _NoAddressError(Exception):
    """Rank 0 has published no address."""


class AbortedError(HorovodInternalError):
    """The timeline was closed before it was connected."""


class Sender:
    """Connects to rank 0 when it is made, which takes CONNECT_SECONDS at most, or until ``is_aborted`` is true.

    For the thread of the timeline. Raises DocumentError.
    """

    def __init__(self, rendezvous: TimelineAddress, is_aborted: Callable[[], bool]) -> None:
        self._is_aborted = is_aborted
        self.ended = False
        try:
            self._connection, self._origin = self._connect(rendezvous)
        except (HorovodInternalError, SettingsError, OSError) as error:
            rank = rendezvous.world.topology.rank
            raise DocumentError(f"rank {rank} cannot send its timeline to rank 0: {error}") from error
        self.shift = -self._origin
        self._synchronized = 0.0
        self._synchronize()

    def _connect(self, rendezvous: TimelineAddress) -> tuple[Connection, float]:
        rank = rendezvous.world.topology.rank
        with ConnectAttempt(CONNECT_SECONDS, self._check) as attempt, rendezvous.store() as store:
            while True:
                try:
                    callee, origin = self._call(rendezvous, store, attempt)
                    return Connection(callee.sock), float(origin)
                except (_NoAddressError, NoListenerError, GoneError) as error:  # or it was that of an earlier recording
                    if attempt.is_over:
                        raise NoDocumentError(f"rank {rank} is not recorded, because rank 0 records nothing") from error
                except CollectiveTimeoutError:
                    if attempt.is_over:
                        raise
                attempt.wait({}, AGAIN_SECONDS)

    def _call(self, rendezvous: TimelineAddress, store: Store, attempt: ConnectAttempt) -> tuple[Callee, Any]:
        try:
            entry = msgpack.unpackb(store.get(rendezvous.key, LOOK_SECONDS))
        except CollectiveTimeoutError as error:
            raise _NoAddressError from error
        return call(rendezvous.end(attempt), entry, 0, lambda seconds: attempt.wait({}, seconds))

    def _check(self) -> None:
        if self._is_aborted():
            raise AbortedError("the recording has ended before")

    @property
    def is_ready(self) -> bool:
        self._connection.flush()
        return not self._connection.unsent

    def write(self, records: list[Record]) -> None:
        for frame in pack_records(records):
            self._connection.send(frame)
        self._hear()
        if not self.ended and time.monotonic() - self._synchronized > CLOCK_SECONDS:
            self._synchronize()

    def _synchronize(self) -> None:
        trips = [trip for trip in [self._trip() for _ in range(TRIPS)] if trip is not None]
        self._synchronized = time.monotonic()
        if trips:
            self.shift = offset(trips).seconds - self._origin

    def _trip(self) -> Trip | None:
        sent = time.monotonic()
        self._connection.send(PING + TIME.pack(sent))
        deadline = sent + TRIP_SECONDS
        while (left := deadline - time.monotonic()) > 0 and not self.ended:
            self._wait(left)
            for frame in self._hear():
                question, there = TIME.unpack(frame[1:9])[0], TIME.unpack(frame[9:])[0]
                if question == sent:
                    return Trip(sent, there, time.monotonic())
        return None

    def _wait(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._connection.fileno(), select.POLLIN)
        poller.poll(seconds * 1000.0)

    def _hear(self) -> list[bytes]:
        """The answers to questions for the time."""
        frames = self._connection.receive()
        self.ended = self.ended or self._connection.ended or END in frames
        return [frame for frame in frames if frame.startswith(PING)]

    def close(self) -> None:
        """Idempotent."""
        if self._connection.fileno() < 0:
            return
        self._connection.drain(time.monotonic() + DRAIN_SECONDS)
        with suppress(OSError):
            self._connection.hang_up()
        self._connection.close()

    def disown(self) -> None:
        self._connection.close()
