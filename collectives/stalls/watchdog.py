"""Notices that the coordinator does not answer, and asks it why tensors of this rank wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from collectives.api import CollectiveTimeoutError, Topology
from collectives.controller.messages import COORDINATOR, Status
from collectives.controller.waits import ProcessState
from collectives.stalls.inspector import StallInspector, StallReporter
from collectives.stalls.liveness import describe_silence
from collectives.stalls.status import InFlight

logger = logging.getLogger(__name__)


GRACE_SECONDS = 1.0
"""The coordinator has at least this time to answer. It does so inside operations, too."""
GRACE_SHARE = 0.1


class Verdict(NamedTuple):
    """The action after a look: ask the coordinator, report that it has been silent for ``seconds``, or end the job."""

    ask: bool = False
    seconds: float | None = None
    fatal: bool = False


NOTHING = Verdict()
ASK = Verdict(ask=True)


class Watchdog:
    """A rank whose tensors wait for long asks the coordinator why; a coordinator that is stopped does not answer.

    ``oldest`` returns when the oldest tensor in flight was submitted, None if nothing is in flight. Looks are planned,
    so that a busy rank has no cost: ``deadline`` is the time of the next one, in monotonic seconds, None as
    long as nothing is in flight. Without ``stalls``, which has the times of the stall check, there are none.
    """

    def __init__(self, stalls: StallInspector | None, oldest: Callable[[], float | None]) -> None:
        self.deadline: float | None = None
        self._stalls = stalls
        self._oldest = oldest
        self._asked: float | None = None

    @property
    def asked(self) -> float | None:
        """When this rank asked the question that has no answer yet, in monotonic seconds; None where it has none."""
        return self._asked

    def look(self, now: float) -> Verdict:
        """The action at the time ``now``."""
        if self._stalls is None or (self.deadline is not None and now < self.deadline):
            return NOTHING
        since = self._oldest()
        if since is None:
            self.deadline = self._asked = None
            return NOTHING
        if self._asked is not None:
            return self._unanswered(self._stalls, self._asked, since, now)
        return self._question(self._stalls, since, now)

    def _question(self, stalls: StallInspector, since: float, now: float) -> Verdict:
        if now < since + stalls.patience:
            self.deadline = since + stalls.patience
            return NOTHING
        self._asked = now
        self.deadline = now + self._grace(stalls)
        return ASK

    def _grace(self, stalls: StallInspector) -> float:
        return max(GRACE_SECONDS, GRACE_SHARE * stalls.patience)

    def _unanswered(self, stalls: StallInspector, asked: float, since: float, now: float) -> Verdict:
        end = stalls.end(since)
        if now >= end:
            return Verdict(seconds=now - asked, fatal=True)
        self.deadline = min(end, now + stalls.interval)
        return Verdict(seconds=now - asked)

    def answered(self, now: float) -> None:
        """The coordinator has answered: it knows the tensors that wait, and reports them."""
        since = self._oldest()
        self._asked = None
        if self._stalls is None or since is None:
            self.deadline = None
            return
        end = self._stalls.end(since)
        following = now + self._stalls.interval
        self.deadline = min(end, following) if end > now else following


def explain(
    topology: Topology, tensors: str, seconds: float, processes: Mapping[int, ProcessState], silent: int = COORDINATOR
) -> str:
    """The report of a rank about its ``tensors`` in flight, when rank 0 has not answered for ``seconds``.

    ``silent`` is rank 0, or the leader of this host. ``processes`` has the state of its process, if it is on this host.
    """
    silence = describe_silence((silent,), topology.hosts, seconds, processes)
    return f"rank {topology.rank} waits for {tensors}, and for the decision of rank 0; {silence}"


class CoordinatorWatch:
    """Acts as ``watchdog`` says, for the tensors in ``works``. For the thread that drives.

    ``inquire`` sends the question and returns whether it has left. ``silent_rank`` returns the rank to name where
    nobody answers, and ``states`` the states of processes of this host.
    """

    def __init__(
        self,
        topology: Topology,
        watchdog: Watchdog,
        stalls: StallReporter,
        works: InFlight,
        inquire: Callable[[], bool],
        silent_rank: Callable[[], int],
        states: Callable[[Iterable[int]], Mapping[int, ProcessState]],
    ) -> None:
        self._topology = topology
        self._watchdog = watchdog
        self._stalls = stalls
        self._works = works
        self._inquire = inquire
        self._silent_rank = silent_rank
        self._states = states

    @property
    def deadline(self) -> float | None:
        """When :meth:`look` must be called, in monotonic seconds; None: not before a tensor is in flight."""
        return self._watchdog.deadline if self._works else None

    def look(self) -> CollectiveTimeoutError | None:
        """Ask the coordinator when tensors wait for long; if it does not answer, report that.

        Returns the error that must end the job, if it has not answered for too long.
        """
        verdict = self._watchdog.look(time.monotonic())
        if verdict.ask:
            self._ask()
        return None if verdict.seconds is None else self._report(verdict, verdict.seconds)

    @property
    def asked(self) -> float | None:
        """When this rank asked the question that has no answer yet, in monotonic seconds; None where it has none."""
        return self._watchdog.asked

    def _ask(self) -> None:
        if self._works.running:
            logger.warning(
                "rank %d waits inside the operation on %s: another rank is slow or stopped, or waits itself",
                self._topology.rank,
                self._works.describe(),
                extra=self._works.about(),
            )
        if not self._inquire():
            self._watchdog.answered(time.monotonic())

    def _report(self, verdict: Verdict, seconds: float) -> CollectiveTimeoutError | None:
        silent = self._silent_rank()
        self._stalls.note(self._works.since(), (silent,), time.monotonic())
        text = explain(self._topology, self._works.describe(), seconds, self._states((silent,)), silent)
        if verdict.fatal:
            remark = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is over: the job ends"
            return CollectiveTimeoutError(f"{text}. {remark}", [silent])
        logger.warning("%s", text, extra=self._works.about())
        return None

    def hear(self, message: Status) -> None:
        """The coordinator answers."""
        self._watchdog.answered(time.monotonic())
        if message.text:
            self._stalls.note(self._works.since(), message.silent, time.monotonic())
            tensors = self._works.describe()
            logger.warning(
                "rank %d waits for %s; from rank %d: %s",
                self._topology.rank,
                tensors,
                COORDINATOR,
                message.text,
                extra=self._works.about(),
            )
