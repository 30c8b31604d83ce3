"""The connections of one listener that have not shown yet that they know the secret, and warnings about them.

Any host on the network can connect. Therefore only a part of the descriptors goes to such connections, each has a
deadline, and silent ones are closed where others wait. So strangers neither keep the job from connecting nor take the
descriptors that it needs.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable

from collectives.net import descriptors

SECONDS = 60.0
"""The least time between two warnings of one kind."""


class RareWarnings:
    """Logs one warning of a kind a minute to ``logger``, and the others for debugging. For one thread.

    A warning says how many of its kind were left out before it.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._next: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warn(self, text: str, *values: object, kind: str = "") -> None:
        """Log ``text`` with ``values``, as :meth:`logging.Logger.warning` does."""
        now = self._clock()
        if now < self._next.get(kind, now):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            self._logger.debug(text, *values)
            return
        self._next[kind] = now + SECONDS
        count = self._left_out.pop(kind, 0)
        more = f" (and {count} more before, which are not shown)" if count else ""
        self._logger.warning(text + more, *values)


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

    def next_from(self, listener: socket.socket, now: float) -> socket.socket | None:
        """The next connection to ``listener``, now one of the strangers; None if it has gone.

        Raises OSError, mostly for want of a descriptor; then no other one may come for a moment.
        """
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return None
        except OSError as error:
            if descriptors.are_exhausted(error) and descriptors.raise_limit():
                return None
            self.pause(now)
            raise
        sock.setblocking(False)
        descriptors.make_room_after(sock.fileno())
        self.add(sock.fileno(), now)
        return sock

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
