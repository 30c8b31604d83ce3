"""Calls of Python that a compiled program makes: XLA passes a number and addresses, in functions of any framework.

An operation may be in flight from a call that starts it to a call that waits for it.
"""

from __future__ import annotations

import ctypes as c
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np

from collectives import (
    Buffer,
    DType,
    Engine,
    EngineError,
    HorovodInternalError,
    InvalidRequestError,
    Work,
    empty,
)

T = TypeVar("T", bound=Hashable)


class CallTable(Generic[T]):
    """Calls by number. For any thread."""

    def __init__(self) -> None:
        # Owned by this object, held for a look-up.
        self._lock = threading.Lock()
        self._numbers: dict[T, int] = {}
        self._calls: list[T] = []

    def number_of(self, call: T) -> int:
        """The same call, traced again, has the same number."""
        with self._lock:
            number = self._numbers.setdefault(call, len(self._calls))
            if number == len(self._calls):
                self._calls.append(call)
            return number

    def __getitem__(self, number: int) -> T:
        return self._calls[number]


def buffer_at(address: int | None, dtype: DType, shape: tuple[int, ...]) -> Buffer:
    """The memory of the program at ``address``, which is not looked at where there are no elements."""
    size = prod(shape) * dtype.itemsize
    if not size:
        return empty(dtype, shape)
    memory: Any = (c.c_char * size).from_address(address or 0)
    return Buffer(np.frombuffer(memory, dtype.storage), dtype, shape)


def let_end(engine: Engine, works: Sequence[Work]) -> None:
    """The memory of the program must not be written any more. The engine bounds each wait, as it does that of a step.

    Those that have not begun on all ranks are given up.
    """
    engine.abandon([work for work in works if not work.done])
    _wait(engine, works)


def _wait(engine: Engine, works: Sequence[Work]) -> None:
    for work in works:
        with suppress(HorovodInternalError):
            engine.synchronize(work)


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """``works`` of one call, which write ``results``; ``size`` is the number of ranks for which it was compiled."""

    engine: Engine
    works: Sequence[Work]
    results: Sequence[Buffer]
    name: str
    size: int

    def require_shapes(self) -> None:
        """InvalidRequestError unless all ranks gave the same number of rows."""
        for work, expected in zip(self.works, self.results, strict=True):
            if work.result().shape != expected.shape or len(set(work.received_splits)) > 1:
                raise InvalidRequestError(
                    f"{work.request.name!r} in a compiled function has the result {list(work.result().shape)}, and XLA "
                    f"expects {list(expected.shape)}, for {self.size} ranks that give as many rows as this one; give "
                    "equal numbers of rows, or leave jit_compile=True out"
                )


PROGRAM_BITS = 40
"""A ticket has the number of its program above the lowest 40 bits."""
_programs = count(1)


def next_program() -> int:
    """The first ticket of a new program, of no call."""
    return next(_programs) << PROGRAM_BITS


class PendingRuns:
    """For any thread. The calls of a program come one after the other; several programs may run at the same time."""

    def __init__(self) -> None:
        self._pending: dict[int, Pending] = {}
        self._numbers = count(1)
        # Owned by this object, held for a look-up.
        self._lock = threading.Lock()
        self._names: set[str] = set()

    def reserve(self, name: str) -> str:
        """``name``, with a number if that is in flight: a function may be called at several places of a program."""
        with self._lock:
            found = next(each for each in _numbered(name) if each not in self._names)
            self._names.add(found)
            return found

    def release(self, name: str) -> None:
        """The name is free again."""
        with self._lock:
            self._names.discard(name)

    def begin(self, run: Pending, before: int) -> int:
        """The ticket for :meth:`end`; ``before`` is an earlier one of the program."""
        ticket = _first_of(before) | next(self._numbers)
        self._pending[ticket] = run
        return ticket

    def end(self, tickets: Sequence[int], addresses: Sequence[int | None]) -> None:
        """Wait for all works; raises the error of one. ``addresses`` are those of the results now."""
        runs = [self._taken(ticket) for ticket in tickets]
        try:
            for run in runs:
                for work in run.works:
                    run.engine.synchronize(work)
            for run in runs:
                run.require_shapes()
            _require_places([result for run in runs for result in run.results], addresses)
        except BaseException:
            for run in runs:
                let_end(run.engine, run.works)
            raise
        finally:
            for run in runs:
                self.release(run.name)

    def _taken(self, ticket: int) -> Pending:
        run = self._pending.pop(ticket, None)
        if run is None:
            raise EngineError(f"XLA waits for the operation {ticket}, which was not started")
        return run

    def give_up(self, ticket: int) -> None:
        """The program of ``ticket`` ends, as a call of it has failed: nothing may write its memory any more.

        A function that was traced in another program counts as a part of that one. So this thread waits for the
        operations of other programs, and does not give them up.
        """
        own = [each for each in list(self._pending) if _first_of(each) == _first_of(ticket)]
        runs = [run for each in own if (run := self._pending.pop(each, None)) is not None]
        try:
            for run in runs:
                let_end(run.engine, run.works)
            for run in list(self._pending.values()):
                _wait(run.engine, run.works)
        finally:
            for run in runs:
                self.release(run.name)


def _first_of(ticket: int) -> int:
    return ticket >> PROGRAM_BITS << PROGRAM_BITS


def _numbered(name: str) -> Iterator[str]:
    return (f"{name}~{number}" if number else name for number in count())


def _require_places(results: Sequence[Buffer], addresses: Sequence[int | None]) -> None:
    for result, address in zip(results, addresses, strict=True):
        if result.count and result.pointer != address:
            raise EngineError("XLA has moved the memory of a collective while it was in flight; please report this")


runs = PendingRuns()
"""The operations in flight of this process."""
