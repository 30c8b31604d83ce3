"""Asks the coordinator why tensors of this rank wait, and reports its answer, or that it gives none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from collectives.api import CollectiveTimeoutError, HorovodInternalError, Topology
from collectives.engine.locator import InFlight
from collectives.engine.lookout import Lookout
from collectives.engine.silence import Silence, Verdict, explain
from collectives.planning.messages import COORDINATOR, Status
from collectives.planning.whereabouts import ProcessState

__all__ = ["Inquiries"]

logger = logging.getLogger(__name__)


class Inquiries:
    """Acts as ``silence`` says, for the tensors in ``works``. For the thread that drives.

    ``inquire`` sends the question and returns whether it has left. ``states`` returns the states of processes of this
    host, and ``fail`` ends the job.
    """

    def __init__(
        self,
        topology: Topology,
        silence: Silence,
        lookout: Lookout,
        works: InFlight,
        inquire: Callable[[], bool],
        states: Callable[[Iterable[int]], Mapping[int, ProcessState]],
        fail: Callable[[HorovodInternalError], None],
    ) -> None:
        self._topology = topology
        self._silence = silence
        self._lookout = lookout
        self._works = works
        self._inquire = inquire
        self._states = states
        self._fail = fail

    @property
    def deadline(self) -> float | None:
        """When :meth:`look` must be called, in monotonic seconds; None: not before a tensor is in flight."""
        return self._silence.deadline if self._works else None

    def look(self) -> None:
        """Ask the coordinator when tensors wait for long; if it does not answer, report that, and end in time."""
        verdict = self._silence.look(time.monotonic())
        if verdict.ask:
            self._ask()
        if verdict.seconds is not None:
            self._report(verdict, verdict.seconds)

    @property
    def asked(self) -> float | None:
        """See :class:`Silence`."""
        return self._silence.asked

    def _ask(self) -> None:
        if self._works.running:
            logger.warning(
                "rank %d waits inside the operation on %s: another rank is slow or stopped, or waits itself",
                self._topology.rank,
                self._works.describe(),
                extra=self._works.about(),
            )
        if not self._inquire():
            self._silence.answered(time.monotonic())

    def _report(self, verdict: Verdict, seconds: float) -> None:
        self._lookout.note(self._works.since(), (COORDINATOR,), time.monotonic())
        text = explain(self._topology, self._works.describe(), seconds, self._states((COORDINATOR,)))
        if verdict.fatal:
            remark = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is over: the job ends"
            self._fail(CollectiveTimeoutError(f"{text}. {remark}", [COORDINATOR]))
        else:
            logger.warning("%s", text, extra=self._works.about())

    def hear(self, message: Status) -> None:
        """The coordinator answers."""
        self._silence.answered(time.monotonic())
        if message.text:
            self._lookout.note(self._works.since(), message.silent, time.monotonic())
            tensors = self._works.describe()
            logger.warning(
                "rank %d waits for %s; from rank %d: %s",
                self._topology.rank,
                tensors,
                COORDINATOR,
                message.text,
                extra=self._works.about(),
            )
