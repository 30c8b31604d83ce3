"""An operation that was launched on a stream."""

from __future__ import annotations

import time
from collections.abc import Callable

from collectives.completion import DONE, Completion

__all__ = ["Operation"]


class Operation(Completion):
    """The ``end`` of the calls on the stream; ``check`` raises if the backend has failed meanwhile.

    ``begin`` is when the stream has come to it: then the operation waits for other ranks only, and no more for the
    kernels of this one. After an abort it is over when the GPU has let go of the memory.
    """

    def __init__(self, end: Completion, check: Callable[[], None], begin: Completion = DONE) -> None:
        self._end = end
        self._check = check
        self._begin = begin
        self._begun: float | None = None

    def age(self) -> float:
        """How long ago the stream has come to it, in seconds, as far as calls of this method have seen it."""
        now = time.monotonic()
        if self._begun is None and self._begin.is_done:
            self._begun = now
        return 0.0 if self._begun is None else now - self._begun

    @property
    def has_ended(self) -> bool:
        """Whether the GPU does not work on it any more, with success or not."""
        return self._end.is_done

    def ends_within(self, seconds: float) -> bool:
        """Block until the GPU does not work on it any more, at most ``seconds``; return whether it does not."""
        return self._end.wait(seconds)

    @property
    def is_done(self) -> bool:
        """See :class:`Completion`."""
        return self._end.is_done and self._succeeded()

    def wait(self, timeout: float) -> bool:
        """See :class:`Completion`."""
        return self._end.wait(timeout) and self._succeeded()

    def precede(self, stream: int) -> None:
        """See :class:`Completion`."""
        self._check()
        self._end.precede(stream)

    def _succeeded(self) -> bool:
        self._check()
        return True
