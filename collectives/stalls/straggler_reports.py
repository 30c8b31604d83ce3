"""Names the ranks that others wait for, on rank 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from collectives.controller.messages import WaitReport
from collectives.events import EventStream, Straggling
from collectives.stalls.stragglers import Cause, Straggler, StragglerChange, StragglerInspector

logger = logging.getLogger(__name__)

REPEAT_SECONDS = 60.0
"""A rank is in the log once in this time."""
_SYMPTOMS = {Cause.LATE: "It submits its tensors late", Cause.BACKEND: "It is slow inside of operations"}
_PLACES = {Cause.LATE: "its data and its computation", Cause.BACKEND: "the load of its cores and its memory"}


class StragglerReporter:
    """Logs the stragglers that ``inspector`` finds and publishes them on ``events``; ``hosts`` are those of the ranks.

    For the thread that drives, but ``stragglers`` for any.
    """

    def __init__(self, inspector: StragglerInspector, events: EventStream, hosts: Sequence[str]) -> None:
        self._inspector = inspector
        self._events = events
        self._hosts = hosts
        self._logged: dict[int, float] = {}

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """The ranks that others wait for now."""
        return self._inspector.stragglers

    def hear(self, rank: int, report: WaitReport) -> None:
        """``rank`` says how long it waits."""
        now = time.monotonic()
        self._tell(self._inspector.hear(rank, report, now), now)

    def silent(self, ranks: Sequence[int], seconds: float) -> None:
        """``ranks`` have not answered for so many ``seconds``; another part logs that."""
        self._publish(self._inspector.silent(ranks, seconds), time.monotonic())

    def answered(self, rank: int) -> None:
        """``rank`` has answered, perhaps after it was silent."""
        self._publish(self._inspector.answered(rank), time.monotonic())

    def _tell(self, changes: Sequence[StragglerChange], now: float) -> None:
        self._publish(changes, now)
        for straggler, is_over in changes:
            rank = straggler.rank
            if not is_over and now >= self._logged.get(rank, -REPEAT_SECONDS) + REPEAT_SECONDS:
                self._logged[rank] = now
                logger.warning("%s", describe(straggler, self._hosts[rank] if rank < len(self._hosts) else ""))

    def _publish(self, changes: Iterable[StragglerChange], now: float) -> None:
        if Straggling in self._events.wanted:
            for straggler, is_over in changes:
                self._events.publish(Straggling(straggler, is_over, now))


def describe(straggler: Straggler, host: str) -> str:
    """A sentence about ``straggler``, which runs on ``host``."""
    where = f" of process set {straggler.process_set}" if straggler.process_set else ""
    wait = f"{straggler.seconds * 1e3:.0f} ms each time, {straggler.share:.0%} of their time"
    return (
        f"rank {straggler.rank} on host {host!r} is a straggler: the other ranks{where} wait for it, {wait}. "
        f"{_advice(straggler, host)}"
    )


def _advice(straggler: Straggler, host: str) -> str:
    symptom, place = _SYMPTOMS[straggler.cause], _PLACES[straggler.cause]
    queued = f"It waited for a processor for {straggler.queued:.0%} of its own time"
    reasons = f"host {host!r} has other work, more ranks than cores, or a small CPU quota"
    remedy = "Give the job cores of its own, or start fewer ranks there"
    if straggler.lacks_cores:
        return f"{queued}: {reasons}. {remedy}"
    if straggler.all_lack_cores:
        return f"{symptom}. {queued}, the others hardly less: {reasons}. {remedy}; if it stays late, look at {place}"
    return f"{symptom}: look at {place}"
