"""Torch's Gloo as a transport: the collectives of a ProcessGroupGloo, with waits that can be aborted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from collectives.api import DType, ReduceOp, ShutDownError, override
from collectives.backends.base import Group
from collectives.backends.gloo.connections import Connections
from collectives.backends.gloo.library import GLOO_NAMES, disconnected, import_torch, is_exact, timed_out, translate
from collectives.backends.host import Array, Bytes
from collectives.backends.transport import Transport

SLICE = timedelta(seconds=0.05)
GRACE = timedelta(seconds=0.05)
POLL = 0.1


class GlooTransport(Transport):
    """A member of ``group``, with the connected ``process_group`` of torch and its ``connections``.

    ``timeout`` is the process group's, in seconds.
    """

    name = "gloo"

    def __init__(self, group: Group, process_group: Any, connections: Connections, timeout: float) -> None:
        super().__init__(group)
        self._torch = import_torch()
        self._process_group = process_group
        self._connections = connections
        self._timeout = timeout
        self._unfinished: Any = None

    @override
    def alltoall(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int] = (), receive_counts: Sequence[int] = ()
    ) -> None:
        """One step."""
        tensors = self._tensor(destination), self._tensor(source)
        self._run("alltoall_base", *tensors, list(receive_counts), list(send_counts))

    @override
    def allgather(self, source: Bytes, destination: Bytes) -> None:
        """A ring: P - 1 steps, (P - 1) S bytes; torch makes a copy of the result."""
        self._run("_allgather_base", self._tensor(destination), self._tensor(source))

    @override
    def broadcast(self, data: Bytes, root: int) -> None:
        """A tree: log2 P steps, S log2 P bytes at the root."""
        options = self._torch.distributed.BroadcastOptions()
        options.rootRank = root
        self._run("broadcast", [self._tensor(data)], options)

    @override
    def barrier(self) -> None:
        self._run("barrier")

    @override
    def reduces(self, dtype: DType, op: ReduceOp) -> bool:
        return is_exact(dtype, op)

    @override
    def allreduce(self, array: Array, op: ReduceOp) -> None:
        """A ring: 2 (P - 1) steps, 2 S (P - 1) / P bytes."""
        options = self._torch.distributed.AllreduceOptions()
        options.reduceOp = getattr(self._torch.distributed.ReduceOp, GLOO_NAMES[op])
        self._run("allreduce", [self._tensor(array)], options)

    @override
    def close(self) -> None:
        """A thread holds an operation that is not over, and ends with it."""
        self._error = ShutDownError("the gloo backend was closed")  # the traceback of another error may hold memory
        group, work, self._process_group, self._unfinished = self._process_group, self._unfinished, None, None
        if work is not None:
            threading.Thread(target=_drop, args=(group, work), name="hvd-gloo-drop", daemon=True).start()

    @override
    def abort(self, error: Exception) -> None:
        with self._error_lock:
            self._error = error
        if self._process_group is not None:
            self._connections.shut_down()

    def _tensor(self, array: Array) -> Any:
        return self._torch.from_numpy(array if array.flags.writeable else array.copy())

    def _run(self, operation: str, *arguments: object) -> None:
        """Do one operation of the process group.

        No frame of a traceback may hold the work or the group: it would decide when they are dropped.
        """
        began = time.monotonic()
        try:
            self._wait(getattr(self._process_group, operation)(*arguments), began)
        except RuntimeError as error:
            raise self._fail(error) from error.with_traceback(None)
        self.check()

    def _wait(self, work: Any, began: float) -> None:
        """Wait in slices, because only our own flag ends a wait, and because Gloo may miss a broken connection."""
        while not _finished(work, SLICE):
            self.on_wait()
            if self._error is not None or self._connections.broken():
                if not _finished(work, GRACE):
                    self._unfinished = work
                    self._fail(self._without_connection(time.monotonic() - began))
                return

    def _without_connection(self, seconds: float) -> Exception:
        """The error of an operation that lost a connection after ``seconds``. It may have lost it to Gloo's timeout.

        When its timeout expires Gloo closes the connection first. It reports the timeout later, on a busy machine after
        more than GRACE.
        """
        if seconds >= self._timeout:
            return timed_out(self.group, f"Gloo closed the connection after {seconds:.1f} s")
        return disconnected(self.group)

    def _fail(self, error: Exception) -> Exception:
        """The error that this and all later calls raise. Disconnects the peers, so that they do not wait in vain."""
        try:
            return self._end(translate(error, self.group))
        finally:
            self._connections.shut_down()


def _drop(group: Any, work: Any) -> None:
    """Hold ``group`` until ``work`` has ended, within Gloo's timeout; then dropping it does not block.

    It polls, because a thread that waits inside Gloo when the interpreter ends would abort the process.
    """
    while not work.is_completed():
        time.sleep(POLL)


def _finished(work: Any, limit: timedelta) -> bool:
    """Wait for ``work`` for a while; raises its error. An expired wait does not stop the operation."""
    with suppress(RuntimeError):
        work.wait(limit)
        return True
    if not work.is_completed():
        return False
    work.wait()  # It has failed, or it ended just when the limit expired: this raises in the first case.
    return True
