"""A point in time after which an activity has taken too long."""

from __future__ import annotations

import time

from executors import StartTimeoutError as TimeoutException

__all__ = ["Timeout", "TimeoutException"]


class Timeout:
    """Begins now and lasts ``timeout`` seconds; ``message`` may have ``{activity}`` and ``{timeout}`` in it."""

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._message = message
        self._end = time.monotonic() + timeout

    def remaining(self) -> float:
        """The seconds that are left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def timed_out(self) -> bool:
        """Whether the time is up."""
        return self.remaining() == 0

    def check_time_out_for(self, activity: str) -> None:
        """Raise TimeoutException with the message if the time is up."""
        if self.timed_out():
            raise TimeoutException(self._message.format(activity=activity, timeout=self._timeout))
