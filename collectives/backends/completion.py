"""When an operation on memory is over."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from collectives.api import override

POLL_SECONDS = (0.00002, 0.001)
"""A wait looks again after the first time, and less and less often, up to the second."""


class Completion(ABC):
    """The end of an operation that has begun. It belongs to the device that runs the operation. Safe from any thread.

    The operation may have failed: then every method raises its error.
    """

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether the operation is over. Never blocks."""

    @abstractmethod
    def wait(self, timeout: float) -> bool:
        """Block this thread until the operation is over, at most ``timeout`` seconds; return whether it is."""

    @abstractmethod
    def precede(self, stream: int) -> None:
        """Let everything that is enqueued on ``stream`` from now on begin after the operation. Does not block.

        ``stream`` is the handle of a queue of the device, such as a ``cudaStream_t``.
        """

    def notify(self, call: Callable[[], None]) -> bool:
        """Have ``call`` called when the operation is over or has failed: on any thread, once or more often.

        The call may come before this method returns. Returns False where the device cannot do so: then the operation
        must be polled.
        """
        return False


class Polled(Completion):
    """An operation of which a thread can only ask whether it is over."""

    @override
    def wait(self, timeout: float) -> bool:
        deadline, (seconds, longest) = time.monotonic() + timeout, POLL_SECONDS
        while not self.is_done:
            if time.monotonic() > deadline:
                return False
            time.sleep(seconds)
            seconds = min(1.5 * seconds, longest)
        return True


class _Done(Completion):
    """An operation that was over when the backend returned. A single object, so that it has no cost."""

    @property
    def is_done(self) -> bool:
        return True

    def wait(self, timeout: float) -> bool:
        return True

    def precede(self, stream: int) -> None:
        return

    def notify(self, call: Callable[[], None]) -> bool:
        call()
        return True


DONE: Completion = _Done()


class _All(Completion):
    """Several operations; over when the last is."""

    def __init__(self, parts: Sequence[Completion]) -> None:
        self._parts = parts

    @property
    def is_done(self) -> bool:
        return all([part.is_done for part in self._parts])

    def wait(self, timeout: float) -> bool:
        return all([part.wait(timeout) for part in self._parts])

    def precede(self, stream: int) -> None:
        for part in self._parts:
            part.precede(stream)

    def notify(self, call: Callable[[], None]) -> bool:
        return all([part.notify(call) for part in self._parts])


def all_of(completions: Sequence[Completion]) -> Completion:
    """The end of all of ``completions``."""
    open = [completion for completion in completions if completion is not DONE]
    if len(open) < 2:
        return open[0] if open else DONE
    return _All(open)
