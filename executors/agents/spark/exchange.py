"""How the tasks of a stage exchange their texts: by the driver, or by Spark's barrier. Pure: the driver's side.

Spark's barrier looks for its end once a second, so each exchange by it takes a second. By the driver one takes
milliseconds, but only where all tasks reach the driver. A task that does not is in the barrier at once, and cannot say
so. So the driver decides, for all tasks and once: for itself when all are connected, and for the barrier when that has
not come true in time, a task is lost, or one comes that is of another attempt of the stage. A task in an exchange by
the driver is never sent to the barrier: if it cannot end, the stage fails. No exchange of either kind ends without all.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from enum import Enum, auto
from typing import Generic, TypeVar

BY_DRIVER = b"d"
BY_BARRIER = b"b"
BROKEN = b"x"
TEXTS = b"t"
ROUNDS = 2
"""The locations of the tasks; then the server of rank 0."""

Caller = TypeVar("Caller", bound=Hashable)


class _Phase(Enum):
    OPEN = auto()
    EXCHANGING = auto()
    CLOSED = auto()


class TextExchange(Generic[Caller]):
    """The exchange of ``size`` tasks, each with a connection that is its ``caller``.

    All methods return what to send now: a message by caller. BY_DRIVER or BY_BARRIER is the first message to each, and
    the only one if it is BY_BARRIER. TEXTS, with JSON of all texts by partition, is the answer to each text, or BROKEN.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._phase = _Phase.OPEN
        self._callers: dict[int, Caller] = {}  # by partition, until the exchange is over
        self._texts: dict[Caller, str] = {}  # those of this round
        self._rounds = 0

    def join(self, caller: Caller, partition: int) -> dict[Caller, bytes]:
        """The task of ``partition`` has connected. A second one of a partition is of another attempt of the stage."""
        if self._phase is not _Phase.OPEN or partition in self._callers:
            return self._give_up() | {caller: BY_BARRIER}
        self._callers[partition] = caller
        if len(self._callers) < self._size:
            return {}
        self._phase = _Phase.EXCHANGING
        return dict.fromkeys(self._callers.values(), BY_DRIVER)

    def say(self, caller: Caller, text: str) -> dict[Caller, bytes]:
        """A task says the ``text`` of this round, which is of no use after the end of the exchange."""
        if self._phase is not _Phase.EXCHANGING or caller not in self._callers.values():
            return {}
        self._texts[caller] = text
        return self._end_round() if len(self._texts) == self._size else {}

    def leave(self, caller: Caller) -> dict[Caller, bytes]:
        """A connection has ended."""
        partitions = [partition for partition, each in self._callers.items() if each == caller]
        for partition in partitions:
            del self._callers[partition]
        return self._give_up() if partitions else {}

    def expire(self) -> dict[Caller, bytes]:
        """The time for all tasks to connect is over."""
        return self._give_up() if self._phase is _Phase.OPEN else {}

    def _end_round(self) -> dict[Caller, bytes]:
        callers = [caller for _, caller in sorted(self._callers.items())]
        message = TEXTS + json.dumps([self._texts[caller] for caller in callers]).encode()
        self._texts.clear()
        self._rounds += 1
        if self._rounds == ROUNDS:
            self._close()
        return dict.fromkeys(callers, message)

    def _give_up(self) -> dict[Caller, bytes]:
        told = dict.fromkeys(self._callers.values(), BY_BARRIER if self._phase is _Phase.OPEN else BROKEN)
        self._close()
        return told

    def _close(self) -> None:
        self._phase = _Phase.CLOSED
        self._callers.clear()
