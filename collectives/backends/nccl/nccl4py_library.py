"""NCCL by nccl4py, NVIDIA's own binding: members connect without blocking, and can give up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from collectives.api import DType, HorovodInternalError, override
from collectives.backends.nccl.interface import (
    CODES,
    Combine,
    Communicator,
    Device,
    NcclLibrary,
    Pause,
    failure,
    version_text,
)

SUCCESS, IN_PROGRESS = 0, 7
"""Values of ncclResult_t."""
POLL_SECONDS = 0.0001
OLDEST = 22300
"""nccl4py connects by a call that NCCL 2.23 has first."""


class _Group(threading.local):
    """The communicators that the calling thread has used inside of a group; None outside of one."""

    used: list[_Nccl4pyCommunicator] | None = None


class Nccl4pyLibrary(NcclLibrary):
    """A :class:`NcclLibrary`. Raises ImportError, also for a libnccl that is too old for nccl4py."""

    name = "nccl4py"

    def __init__(self) -> None:
        try:
            import nccl.core
            from nccl.bindings import nccl as calls

            self.version = int(calls.get_version())
        except Exception as error:
            raise ImportError(f"nccl4py does not work here: {error}") from error
        self._core, self._calls = nccl.core, calls
        self._group = _Group()  # NCCL, too, has a group for each thread: the watcher's is not that of an operation
        if self.version < OLDEST:
            raise ImportError(f"nccl4py needs NCCL {version_text(OLDEST)}; this is {version_text(self.version)}")

    @override
    def unique_id(self) -> bytes:
        return bytes(self.checked("unique id", self._core.get_unique_id))

    @override
    def connect(self, id: bytes, size: int, position: int, device: Device, pause: Pause) -> Communicator:
        key, config = self._core.UniqueId.from_bytes(id), self._core.NCCLConfig(blocking=False)
        with device.current():
            end = self.checked("init", self._core.Communicator.init, size, position, key, config)
            try:
                while (state := int(end.get_async_error())) == IN_PROGRESS:
                    pause()
                if state != SUCCESS:
                    raise failure("init", state, end.get_last_error())
            except BaseException:
                end.abort()
                raise
        return _Nccl4pyCommunicator(self, end, self._calls)

    @contextmanager
    @override
    def group(self) -> Iterator[None]:
        self.checked("group start", self._calls.group_start)
        used = self._group.used = []
        try:
            yield
        finally:
            self._group.used = None
            self.checked("group end", self._calls.group_end)
            for communicator in used:
                communicator.settle()

    def begun(self, communicator: _Nccl4pyCommunicator) -> None:
        """A call has returned: outside of a group, the stream may be used when NCCL has put its kernels there."""
        used = self._group.used
        if used is None:
            communicator.settle()
        elif communicator not in used:
            used.append(communicator)

    def checked(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """What ``call`` returns; its errors as HorovodInternalError."""
        try:
            return call(*arguments)
        except self._calls.NCCLError as error:
            raise failure(name, int(getattr(error, "status", -1)), str(error)) from error


class _Nccl4pyCommunicator(Communicator):
    """Calls the low-level functions, which take addresses; ``end`` owns the communicator."""

    def __init__(self, library: Nccl4pyLibrary, end: Any, calls: Any) -> None:
        self._library = library
        self._end = end
        self._calls = calls
        self._pointer = calls.Comm(end.ptr)
        self._is_aborted = False
        # Owned by this object; held for a query of NCCL, which does not block.
        self._asking = threading.Lock()

    @override
    def allreduce(self, source: int, target: int, count: int, dtype: DType, op: Combine, stream: int) -> None:
        call = self._calls.all_reduce
        self._begin("allreduce", call, source, target, count, CODES[dtype], int(op), self._pointer, stream)

    @override
    def reducescatter(self, source: int, target: int, count: int, dtype: DType, op: Combine, stream: int) -> None:
        call = self._calls.reduce_scatter
        self._begin("reducescatter", call, source, target, count, CODES[dtype], int(op), self._pointer, stream)

    @override
    def allgather(self, source: int, target: int, count: int, dtype: DType, stream: int) -> None:
        call = self._calls.all_gather
        self._begin("allgather", call, source, target, count, CODES[dtype], self._pointer, stream)

    @override
    def broadcast(self, source: int, target: int, count: int, dtype: DType, root: int, stream: int) -> None:
        call = self._calls.broadcast
        self._begin("broadcast", call, source, target, count, CODES[dtype], root, self._pointer, stream)

    @override
    def send(self, source: int, count: int, dtype: DType, peer: int, stream: int) -> None:
        self._begin("send", self._calls.send, source, count, CODES[dtype], peer, self._pointer, stream)

    @override
    def receive(self, target: int, count: int, dtype: DType, peer: int, stream: int) -> None:
        self._begin("receive", self._calls.recv, target, count, CODES[dtype], peer, self._pointer, stream)

    @override
    def error(self) -> str:
        state = self._state()
        return "" if state in (SUCCESS, IN_PROGRESS) else str(self._calls.get_last_error(self._pointer))

    @override
    def abort(self) -> None:
        with self._asking:
            self._is_aborted = True
        self._end.abort()

    @override
    def destroy(self) -> None:
        """A communicator that does not block is finalized first."""
        self._library.checked("finalize", self._end.finalize)
        self.settle()
        self._library.checked("destroy", self._end.destroy)

    def settle(self) -> None:
        """Wait until NCCL has launched what was called; it does not wait for other members, but for connections.

        An abort ends the wait, and so does an error, which the watcher finds, too.
        """
        while self._state() == IN_PROGRESS:
            time.sleep(POLL_SECONDS)
        if self._is_aborted:
            raise HorovodInternalError("the communicator was aborted")

    def _state(self) -> int:
        """An abort frees the communicator: nobody asks NCCL about it while that goes on, or later."""
        with self._asking:
            if self._is_aborted:
                return SUCCESS
            return int(self._library.checked("error query", self._calls.comm_get_async_error, self._pointer))

    def _begin(self, name: str, call: Callable[..., Any], *arguments: Any) -> None:
        self._library.checked(name, call, *arguments)
        self._library.begun(self)
