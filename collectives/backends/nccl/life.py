"""A backend over time: it connects, works, fails, closes. The watcher looks at it from a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError, ShutDownError, override
from collectives.backends.base import Group, OnWait
from collectives.backends.completion import DONE, Completion
from collectives.backends.nccl.interface import NcclConnection, Pause
from collectives.backends.nccl.watcher import Watched, Watcher

logger = logging.getLogger(__name__)


class NcclOperation(Completion):
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
    @override
    def is_done(self) -> bool:
        return self._end.is_done and self._succeeded()

    @override
    def wait(self, timeout: float) -> bool:
        return self._end.wait(timeout) and self._succeeded()

    @override
    def precede(self, stream: int) -> None:
        self._check()
        self._end.precede(stream)

    def _succeeded(self) -> bool:
        self._check()
        return True


PAUSE_SECONDS = 0.005
RELEASE_SECONDS = 5.0
INSIDE_SECONDS = 1.0
"""How long an abort waits for a call of NCCL to return; such a call does not wait for other ranks."""
VARIABLE = "HOROVOD_GLOO_TIMEOUT_SECONDS"


class Life(Watched):
    """The state of the member of ``group``. ``timeout`` bounds an operation, in seconds.

    :meth:`fail` is safe from any thread; :meth:`look`, :meth:`prepare` and :meth:`aborted` are for the watcher; all
    else is for the thread that runs operations.
    """

    def __init__(self, group: Group, timeout: float, watcher: Watcher) -> None:
        # Owned by this object: held by the thread that runs operations while it is inside NCCL, for the timeout at
        # most. The watcher takes it for an abort, for INSIDE_SECONDS at most.
        self._inside = threading.Lock()
        self._entered: float | None = None
        self._group = group
        self._timeout = timeout
        self._watcher = watcher
        self._link: NcclConnection | None = None
        # Owned by this object: held while the watcher looks, which does not block, so never for long.
        self._looking = threading.Lock()
        self._operations: deque[NcclOperation] = deque()
        self._last: NcclOperation | None = None
        self._error: Exception | None = None
        # Both are owned by this object. Waits for them are bounded by PAUSE_SECONDS and RELEASE_SECONDS.
        self._failed, self._is_aborted = threading.Event(), threading.Event()

    def check(self) -> None:
        """Raise the error of :meth:`fail`."""
        if self._error is not None:
            raise self._error

    def fail(self, error: Exception) -> None:
        """Let everything raise ``error``, the first one, and end the operations that have begun."""
        self._error = self._error or error
        self._failed.set()
        self._watcher.wake()

    @contextmanager
    def connecting(self, on_wait: OnWait) -> Iterator[Pause]:
        """While the members connect; gives the function to wait with."""
        deadline = time.monotonic() + self._timeout

        def pause() -> None:
            self._failed.wait(PAUSE_SECONDS)
            self.check()
            on_wait()
            if time.monotonic() > deadline:
                raise self._late("connect to NCCL")

        yield pause

    def begin(self, link: NcclConnection) -> None:
        """The members have connected."""
        self._link = link
        self._watcher.add(self)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """While the calling thread is inside NCCL. If it fails after :meth:`fail`, it raises the error of that."""
        with self._inside:
            self.check()
            self._entered = time.monotonic()
            try:
                yield
            except HorovodInternalError:
                self.check()
                raise
            finally:
                self._entered = None

    def launched(self, operation: NcclOperation) -> None:
        """``operation`` has begun."""
        self._operations.append(operation)
        self._last = operation

    @override
    def look(self) -> None:
        with self._looking:
            link = self._link
            if self._error is not None or link is None:
                return
            try:
                self._look(link)
            except HorovodInternalError as error:  # of the GPU
                self.fail(error)
            except Exception as error:  # noqa: BLE001 - no failure of a look may keep the watcher from the aborts
                self.fail(HorovodInternalError(f"a look at NCCL failed: {error!r}; look at the output of all ranks"))

    def _look(self, link: NcclConnection) -> None:
        self._drop_ended()
        text = link.communicator.error()
        if text:
            self.fail(PeerLostError(f"NCCL lost the connection to {self._some()}: {text}", *self._others()))
        elif self._operations and self._operations[0].age() > self._timeout:
            self.fail(self._late("finish an operation on the GPU"))
        elif self._is_stuck(self._entered):
            self.fail(self._late("connect for an operation on the GPU"))

    def _is_stuck(self, entered: float | None) -> bool:
        return entered is not None and time.monotonic() - entered > self._timeout

    @override
    def prepare(self) -> NcclConnection | None:
        if self._error is None or self._link is None or self._is_aborted.is_set():
            return None
        if self._inside.acquire(timeout=INSIDE_SECONDS):
            self._inside.release()  # after the error, so that no other call begins
        return self._link

    @override
    def aborted(self) -> None:
        self._is_aborted.set()

    def close(self) -> None:
        """Release the communicator, when its operations are over or this backend has failed. Idempotent."""
        was_connected = self._link is not None
        if was_connected:
            self._await_operations()
            link = self._taken()
            if link is not None:
                _release(link)
            elif not self._is_aborted.wait(RELEASE_SECONDS):
                logger.warning("NCCL has not ended the operations of %s; their threads stay", self._some())
        self._link = None
        self._watcher.remove(self)
        if self._error is None or not was_connected:
            # An earlier error stays for operations that have begun. Without any it goes: its traceback may hold memory.
            self._error = ShutDownError("the NCCL backend was closed")

    def _taken(self) -> NcclConnection | None:
        """The link, at which the watcher looks no more: NCCL must not be asked while it is released.

        None if the watcher is to abort it.
        """
        with self._looking:
            if self._error is not None:
                return None
            link, self._link = self._link, None
            return link

    def _await_operations(self) -> None:
        """Bounded: the watcher fails an operation that takes longer than the timeout."""
        try:
            while self._error is None and self._last is not None:
                if self._last.ends_within(PAUSE_SECONDS):
                    self._last = None
        except HorovodInternalError as error:
            self.fail(error)

    def _drop_ended(self) -> None:
        while self._operations and self._operations[0].has_ended:
            self._operations.popleft()

    def _late(self, what: str) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"{self._some()} did not {what} within {self._timeout:g} s; look at their output, or raise {VARIABLE}",
            self._others()[0],
        )

    def _some(self) -> str:
        """NCCL does not name the member."""
        others = self._group.others
        return ("" if len(others) < 2 else "at least one of ") + (self._group.describe(others) or "this rank")

    def _others(self) -> tuple[list[int], list[str]]:
        others = self._group.others
        return self._group.ranks_at(others), [self._group.hosts[position] for position in others]


def _release(link: NcclConnection) -> None:
    def destroy() -> None:
        with link.device.current():
            link.communicator.destroy()

    # Owned by this call. It may wait for members of this host that have died: then it stays, as a daemon.
    thread = threading.Thread(target=destroy, name="hvd-nccl-release", daemon=True)
    thread.start()
    thread.join(RELEASE_SECONDS)
    if thread.is_alive():
        logger.warning("NCCL has not released a communicator within %g s", RELEASE_SECONDS)
