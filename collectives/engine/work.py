"""The handle of one submitted tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from collectives.api import EngineError, HorovodInternalError, Request
from collectives.backends.completion import DONE, Completion
from collectives.buffers import Buffer

Allocator: TypeAlias = Callable[[tuple[int, ...]], Buffer]
Destination: TypeAlias = Buffer | Allocator | None


class Work:
    """A tensor in flight. ``done`` turns true once, after ``output`` or ``error`` is set.

    ``destination`` is a buffer or, where the result's shape depends on the other ranks, a function from shape to
    buffer. That may be called again, with another shape: a trial that does not run has the sizes of an earlier call.
    ``received_splits`` counts the rows that came from each member (allgather, alltoall). ``answer`` is the rank that
    joined last, or the id of a new process set. ``owner`` stands for the engine. ``since`` is when it was submitted, in
    seconds of ``time.monotonic()``. ``batch`` is the number of its batch once that has started, None before and where
    no observer listens. ``is_counted``: its name is a number, which all ranks count. ``end`` is DONE, unless the device
    still works on it when this is done: then the user of the output lets a stream wait for it.
    """

    __slots__ = (
        "answer",
        "batch",
        "destination",
        "done",
        "end",
        "error",
        "is_counted",
        "output",
        "owner",
        "received_splits",
        "request",
        "since",
        "source",
        "urged",
    )

    def __init__(self, request: Request, source: Buffer | None, destination: Destination) -> None:
        self.request = request
        self.source = source
        self.destination = destination
        self.output: Buffer | None = None
        self.error: Exception | None = None
        self.received_splits: tuple[int, ...] = ()
        self.answer = 0
        self.batch: int | None = None
        self.urged = False
        self.is_counted = False
        self.owner: object = None
        self.since = 0.0
        self.end: Completion = DONE
        self.done = False

    def input(self) -> Buffer:
        """The buffer that was submitted."""
        if self.source is None:
            raise EngineError(f"{self.request.operation.value} {self.request.name!r} was submitted without a tensor")
        return self.source

    def allocate(self, shape: tuple[int, ...]) -> Buffer:
        """The buffer for a result of ``shape``; sets ``output``. That of a trial that did not run is used again."""
        output = self.destination
        if callable(output):
            output = self._made(output, shape) if self.output is None or self.output.shape != shape else self.output
        if output is None or output.shape != shape:
            raise EngineError(f"{self.request.name!r}: no destination of shape {shape}, only {output}")
        self.output = output
        return output

    def _made(self, allocate: Allocator, shape: tuple[int, ...]) -> Buffer:
        try:
            return allocate(shape)
        except Exception as error:
            text = f"no memory for the result {shape} of {self.request.name!r}: {error}"
            raise HorovodInternalError(text) from error

    def result(self) -> Buffer:
        """The output of a finished work."""
        if self.output is None:
            raise EngineError(f"{self.request.operation.value} {self.request.name!r} has no result")
        return self.output

    def outcome(self) -> Buffer | None:
        """The output of a work that is done; raises its error."""
        if self.error is not None:
            raise fresh(self.error)
        return self.output

    def finish(self) -> None:
        """The output is complete; drops the input."""
        self.source = None
        self.done = True

    def fail(self, error: Exception) -> None:
        """The operation ended with ``error``."""
        self.source = None
        self.error = error
        self.done = True


class Watch:
    """Stands for a list of works where a caller waits for any of them.

    ``done`` turns true when one of them is done, or when another thread has ``interrupted`` the wait: it also calls
    :meth:`Engine.rouse`.
    """

    __slots__ = ("interrupted", "works")

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works
        self.interrupted = False

    @property
    def done(self) -> bool:
        """Whether the caller shall look at the list again."""
        return self.interrupted or any([work.done for work in self.works])

    def fail(self, error: Exception) -> None:
        """As :meth:`Work.fail`, for all that are not done."""
        for work in self.works:
            if not work.done:
                work.fail(error)


def fresh(error: Exception) -> Exception:
    """A copy to raise: an object that is raised repeatedly keeps the frames, and so the tensors, of each raise.

    It has the data of ``error``. Its constructor is not called, because it may take other arguments than ``args``.
    """
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    return copy
