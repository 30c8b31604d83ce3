"""How far the monotonic clock of another process is ahead of the own one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Offset", "Trip", "offset"]


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
