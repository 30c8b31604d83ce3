"""The outcome of a call of the C API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from collectives.api import EngineError
from hvd_cluster.tensorflow.native.library import calls

__all__ = ["checked", "status_of", "temporary"]

OK = 0


@contextmanager
def temporary() -> Iterator[int]:
    """A status for a few calls."""
    status = calls.TF_NewStatus()
    try:
        yield status
    finally:
        calls.TF_DeleteStatus(status)


@contextmanager
def checked() -> Iterator[int]:
    """A status for a few calls; EngineError at the end, unless all of them succeeded."""
    with temporary() as status:
        yield status
        if calls.TF_GetCode(status) != OK:
            raise EngineError(f"TensorFlow refuses a call of its C API: {calls.TF_Message(status).decode()}")


@contextmanager
def status_of(code: int, message: str) -> Iterator[int]:
    """A status that reports a failure."""
    with temporary() as status:
        calls.TF_SetStatus(status, code, message.encode("utf-8", "replace"))
        yield status
