"""The connections of one listener that have not shown yet that they know the secret. Pure: the caller has the clock.

Any host on the network can connect. Therefore only a part of the descriptors goes to such connections, each has a
deadline, and silent ones are closed where others wait. So strangers neither keep the job from connecting nor take the
descriptors that it needs.
"""

from __future__ import annotations

import math

from collectives import descriptors

__all__ = ["DEADLINE", "LEAST", "MOST", "PAUSE", "SILENCE", "Strangers"]

DEADLINE = 10.0
"""Seconds in which a connection has to show that it knows the secret."""
SILENCE = 0.5
"""Seconds after which a connection that says nothing is closed if others wait."""
PAUSE = 0.1
"""Seconds without accepting, after an accept has failed, mostly for want of a descriptor."""
LEAST, MOST = 16, 256


class Strangers:
    """The unauthenticated connections, by descriptor, in the order in which they came. Times are in seconds.

    There are ``most`` at once at most, and fewer where the process has few descriptors: ``expected`` ones are reserved.
    """

    def __init__(self, expected: int = 0, least: int = LEAST, most: int = MOST) -> None:
        self.capacity = descriptors.share_of_strangers(expected, least, most)
        self._since: dict[int, float] = {}
        self._paused_until = -math.inf

    def __contains__(self, descriptor: int) -> bool:
        """Whether the connection is a stranger's."""
        return descriptor in self._since

    def __len__(self) -> int:
        """Their number."""
        return len(self._since)

    @property
    def is_full(self) -> bool:
        """Whether no other one may come now."""
        return len(self._since) >= self.capacity

    def add(self, descriptor: int, now: float) -> None:
        """A connection has come. An earlier one with the same descriptor has ended."""
        self._since.pop(descriptor, None)
        self._since[descriptor] = now

    def discard(self, descriptor: int) -> None:
        """The connection is authenticated, or has ended."""
        self._since.pop(descriptor, None)

    def pause(self, now: float) -> None:
        """Accept nothing for a moment."""
        self._paused_until = now + PAUSE

    def may_accept(self, now: float) -> bool:
        """Whether another one may come."""
        return not self.is_full and now >= self._paused_until

    def overdue(self, now: float) -> list[int]:
        """The connections whose time is over."""
        return self._older_than(DEADLINE, now)

    def in_the_way(self, now: float) -> list[int]:
        """The connections to close, if they are silent, because others wait for their places."""
        is_crowded = self.is_full or now < self._paused_until
        return self._older_than(SILENCE, now) if is_crowded else []

    def next_look(self, now: float) -> float:
        """When something may have changed; infinite if only another connection can change it."""
        patience = SILENCE if self.is_full else DEADLINE
        oldest = next(iter(self._since.values()), math.inf) + patience
        return min(oldest, self._paused_until) if now < self._paused_until else oldest

    def _older_than(self, seconds: float, now: float) -> list[int]:
        found = []
        for descriptor, since in self._since.items():
            if now < since + seconds:
                break
            found.append(descriptor)
        return found
