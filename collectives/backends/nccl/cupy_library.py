"""NCCL by cupy, whose communicators block: a thread of their own connects, and the watcher aborts."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from collectives.api import DType, HorovodInternalError, override
from collectives.backends.nccl.interface import (
    CODES,
    INSTALL_CUPY,
    INSTALL_NCCL,
    Combine,
    Communicator,
    Device,
    NcclLibrary,
    Pause,
    failure,
    require_version,
)

R = TypeVar("R")


def import_nccl() -> Any:
    """``cupy.cuda.nccl``; ImportError with the remedy where cupy or libnccl is missing."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ImportError(f"the nccl backend needs cupy; install it with: {INSTALL_CUPY}") from error
    if not nccl.available:
        # An NCCL before 2.18 lacks functions that cupy is linked to, and a warning of cupy has the name of the first.
        raise ImportError(f"cupy finds no libnccl, or one that is too old for it; install it with: {INSTALL_NCCL}")
    return nccl


class CupyLibrary(NcclLibrary):
    """A :class:`NcclLibrary`. Raises ImportError, and UnsupportedRequestError for a libnccl that is too old."""

    name = "cupy"

    def __init__(self) -> None:
        self._nccl = import_nccl()
        self.version = self._nccl.get_version()
        require_version(self.version)

    @override
    def unique_id(self) -> bytes:
        id: bytes = self._checked("unique id", self._nccl.get_unique_id)
        return id

    @override
    def connect(self, id: bytes, size: int, position: int, device: Device, pause: Pause) -> Communicator:
        """If it is given up, its thread stays until NCCL gives up, after a minute or so."""
        attempt = _Attempt()

        def connect() -> None:
            try:
                with device.current():
                    attempt.end(self._checked("init", self._nccl.NcclCommunicator, size, id, position))
            except Exception as error:  # noqa: BLE001 - for the waiting thread
                attempt.end(error)

        # Owned by this call. A daemon, because nothing ends a call that waits for members.
        threading.Thread(target=connect, name="hvd-nccl-connect", daemon=True).start()
        with device.current():
            return _CupyCommunicator(attempt.wait(pause), self._checked)

    @contextmanager
    @override
    def group(self) -> Iterator[None]:
        self._checked("group start", self._nccl.groupStart)
        try:
            yield
        finally:
            self._checked("group end", self._nccl.groupEnd)

    def _checked(self, name: str, call: Callable[..., R], *arguments: Any) -> R:
        try:
            return call(*arguments)
        except self._nccl.NcclError as error:
            raise failure(name, getattr(error, "status", -1), str(error)) from error
        except KeyError as error:  # of cupy, which has no name for some results
            raise failure(name, int(error.args[0]), f"result {error.args[0]}") from error


class _Attempt:
    """The connecting of members by another thread."""

    def __init__(self) -> None:
        # Owned by this object, held for a few instructions.
        self._lock = threading.Lock()
        self._result: Any = None
        self._is_given_up = False

    def end(self, result: Any) -> None:
        """Called by the other thread, with a communicator or an error."""
        with self._lock:
            self._result = result
            is_late = self._is_given_up
        if is_late:
            _abort(result)

    def wait(self, pause: Pause) -> Any:
        """The communicator. Raises the error, and what ``pause`` raises; that gives the attempt up."""
        try:
            while self._result is None:
                pause()
        except BaseException:
            with self._lock:
                self._is_given_up = True
                late = self._result
            _abort(late)
            raise
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def _abort(late: Any) -> None:
    """Abort a communicator that came after its start was given up. Cupy would destroy it, and may wait for ever."""
    if late is not None and not isinstance(late, Exception):
        late.abort()


class _CupyCommunicator(Communicator):
    """Owns ``end``, which cupy would destroy when it is dropped: that may wait for members that have died."""

    def __init__(self, end: Any, checked: Callable[..., Any]) -> None:
        self._end = end
        self._checked = checked
        self._allreduce = functools.partial(checked, "allreduce", end.allReduce)

    @override
    def allreduce(self, source: int, target: int, count: int, dtype: DType, op: Combine, stream: int) -> None:
        self._allreduce(source, target, count, CODES[dtype], int(op), stream)

    @override
    def reducescatter(self, source: int, target: int, count: int, dtype: DType, op: Combine, stream: int) -> None:
        call = self._end.reduceScatter
        self._checked("reducescatter", call, source, target, count, CODES[dtype], int(op), stream)

    @override
    def allgather(self, source: int, target: int, count: int, dtype: DType, stream: int) -> None:
        self._checked("allgather", self._end.allGather, source, target, count, CODES[dtype], stream)

    @override
    def broadcast(self, source: int, target: int, count: int, dtype: DType, root: int, stream: int) -> None:
        self._checked("broadcast", self._end.broadcast, source, target, count, CODES[dtype], root, stream)

    @override
    def send(self, source: int, count: int, dtype: DType, peer: int, stream: int) -> None:
        self._checked("send", self._end.send, source, count, CODES[dtype], peer, stream)

    @override
    def receive(self, target: int, count: int, dtype: DType, peer: int, stream: int) -> None:
        self._checked("receive", self._end.recv, target, count, CODES[dtype], peer, stream)

    @override
    def error(self) -> str:
        try:
            self._checked("error query", self._end.check_async_error)
        except HorovodInternalError as error:
            is_in_progress = isinstance(error.__cause__, KeyError)
            return "" if is_in_progress else str(error)
        return ""

    @override
    def abort(self) -> None:
        self._end.abort()

    @override
    def destroy(self) -> None:
        self._end.destroy()
