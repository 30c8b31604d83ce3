"""The life of workers, which ends with the connection of this process to the cluster at the latest."""

from __future__ import annotations

from collections.abc import Callable

from executors.api import ExecutorError
from executors.ray.connection import connection

__all__ = ["Life", "have_ended"]


class Life:
    """Begins now; ``release`` is called at its end, and may be called again.

    Actors and placement groups end with their connection, and no other connection knows them.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._connection = connection()
        self._release = release
        self._reason: str | None = None

    @property
    def is_connected(self) -> bool:
        """Whether this process still has the connection that it had at the beginning."""
        return self._connection == connection()

    @property
    def is_over(self) -> bool:
        """Whether it was ended."""
        return self._reason is not None

    def check(self) -> None:
        """Raise ExecutorError if the workers have ended."""
        if not self.is_connected:
            self.end("ray.shutdown() was called meanwhile")
        if self._reason is not None:
            raise have_ended(self._reason)

    def end(self, reason: str) -> None:
        """The workers end, for the ``reason``; the first one counts. Goes on with an end that was interrupted."""
        self._reason = self._reason or reason
        self._release()

    def if_connected(self, action: Callable[..., None], *args: object) -> None:
        """Call ``action(*args)``, unless the connection has gone with all that it is for."""
        if self.is_connected:
            action(*args)


def have_ended(reason: str) -> ExecutorError:
    """The error of a call to workers that have ended."""
    return ExecutorError(f"the workers have ended: {reason}; call shutdown() and start() again")
