"""A transport over queues between threads: no library, no native collectives."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from collectives.api import CollectiveTimeoutError, ShutDownError
from collectives.backends.base import Group
from collectives.backends.transport import Message, PointToPoint

__all__ = ["QueueTransport", "Queues"]

SLICE_SECONDS = 0.01


class Queues:
    """The queues of a group, one for each pair of members in each direction, and how much went through them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[tuple[int, int], queue.Queue[np.ndarray]] = defaultdict(queue.Queue)
        self.messages: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()

    def between(self, sender: int, receiver: int) -> queue.Queue[np.ndarray]:
        with self._lock:
            return self._queues[sender, receiver]


class QueueTransport(PointToPoint):
    """A member of ``group``; all members have one ``queues``."""

    name = "queues"

    def __init__(self, group: Group, queues: Queues, timeout: float = 20.0) -> None:
        super().__init__(group)
        self._queues = queues
        self._timeout = timeout
        self._error: Exception | None = None

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        self.check()
        here, others = self.group.position, set(self.group.others)
        for messages in (outgoing, incoming):
            members = [member for member, _ in messages]
            assert len(set(members)) == len(members), "two messages for one member"
            assert set(members) <= others, "a message to itself"
        for member, data in outgoing:
            assert data.size, "an empty message"
            self._queues.messages[here] += 1
            self._queues.bytes[here] += data.size
            self._queues.between(here, member).put(data.copy())
        for member, data in incoming:
            data[:] = self._receive(member)

    def _receive(self, member: int) -> np.ndarray:
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            self.check()
            try:
                return self._queues.between(member, self.group.position).get(timeout=SLICE_SECONDS)
            except queue.Empty:
                continue
        raise CollectiveTimeoutError(f"{self.group.describe([member])} sent nothing within {self._timeout:g} s")

    def close(self) -> None:
        self._error = self._error or ShutDownError("the transport was closed")

    def abort(self, error: Exception) -> None:
        self._error = error
