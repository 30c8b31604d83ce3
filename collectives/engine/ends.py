"""Carries out the end of one rank's engine: fails the works, aborts the backends, and tells the other ranks.

A method is for the thread that drives, unless its docstring says that it is for any thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from collectives.api import (
    CollectiveTimeoutError,
    EngineError,
    HorovodInternalError,
    PeerLostError,
    Request,
    ShutDownError,
    Timeouts,
    Topology,
)
from collectives.control.base import Channel
from collectives.engine.commands import Commands
from collectives.engine.deciders.base import Decider
from collectives.engine.ending import Ending
from collectives.engine.link import Link
from collectives.engine.runner import Runner
from collectives.engine.stacks import is_in_fit
from collectives.engine.work_table import WorkTable
from collectives.planning.errors import unpack
from collectives.planning.messages import COORDINATOR, Abort, Leave, Left, Ping, Stop
from collectives.planning.roll_call import GRACE_SECONDS, verdict

__all__ = ["Ends"]

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
ANSWER_SECONDS = 2 * GRACE_SECONDS
"""Rank 0 has explained an error within this time, unless it is silent itself."""


class Ends:
    """Ends politely (:meth:`leave`, then the coordinator's :meth:`stop`), or abruptly (:meth:`fail`).

    ``ending`` is the state. Its ``finished`` turns true once, when only :meth:`close` is left to do; its ``failure`` is
    then the reason of an abrupt end. ``announce`` wakes the callers that wait for a work. ``asked`` returns when this
    rank asked rank 0 a question that has no answer yet; None where it has none.
    """

    def __init__(
        self,
        topology: Topology,
        timeouts: Timeouts,
        channel: Channel,
        link: Link,
        decider: Decider,
        works: WorkTable,
        runner: Runner,
        commands: Commands,
        announce: Callable[[], None],
        asked: Callable[[], float | None],
    ) -> None:
        self._topology = topology
        self._asked = asked
        self.ending = Ending(topology, timeouts.shutdown)
        self._rank = topology.rank
        self._timeouts = timeouts
        self._channel = channel
        self._link = link
        self._decider = decider
        self._works = works
        self._runner = runner
        self._commands = commands
        self._announce = announce
        self._ordered: HorovodInternalError | None = None  # the error of :meth:`abort`

    # Polite.

    def leave(self, cause: str = "") -> None:
        """Begin the polite end, with the next step; from any thread. The other ranks hear of the ``cause``."""
        self.ending.ask(time.monotonic())
        self._commands.append(partial(self._leave, cause))

    def _leave(self, cause: str) -> None:
        self.ending.leave(time.monotonic())
        self._decider.decline()
        self._decider.next()  # which reports the calls that failed here: the other ranks must not miss the reason
        last = self._works.last
        self._link.tell(Leave(cause, "" if last is None else last[0].name))

    def stop(self, message: Stop) -> None:
        """The coordinator stops the job, and all batches that were decided before have run."""
        self._runner.drain(self._timeouts.collective)
        self._works.refuse({(refuse.process_set, refuse.name): refuse.error() for refuse in message.refused})
        self.ending.stop(message)
        in_fit = is_in_fit()
        self._fail_works(lambda request: self.ending.in_flight(request, in_fit))
        self._runner.fail_flights(self.ending.error())
        self._decider.decline()
        self._link.tell(Left())

    def all_left(self, message: Left) -> None:
        """All ranks have stopped."""
        self.ending.finish()

    def expire(self) -> None:
        """Finish a polite end that takes too long."""
        if self.ending.is_leaving and self.ending.expire(time.monotonic()):
            logger.warning("rank %d: %s", self._rank, self.ending.unanswered(self._link.unanswered()))
            self._channel.skip_relays()

    # Abrupt.

    def fail(self, error: HorovodInternalError) -> None:
        """End everything here with ``error`` and tell the others."""
        if self.ending.fail(error):
            self._note(error)
            self._runner.abort(error)
            self._link.abort(error)
            self._fail_all(error)
            self.ending.finish()
            self._announce()

    def _note(self, error: HorovodInternalError) -> None:
        """The error and the log name the works that it ends."""
        about = self._works.about()
        error.tensors, error.batch = about["tensors"], about["batch"]
        logger.info("rank %d: the engine ends: %s", self._rank, error, extra=about)

    def hear(self, message: Abort) -> None:
        """Another rank ended abruptly."""
        self.fail(unpack(message.error))

    def break_off(self, error: BaseException) -> None:
        """A step was broken off by ``error``."""
        if isinstance(error, HorovodInternalError):
            self.fail(self._explain(error))
        elif isinstance(error, Exception):
            text = "rank %d: unexpected error in the engine"
            logger.error(text, self._rank, exc_info=error, extra=self._works.about())
            failure = EngineError(f"rank {self._rank}: unexpected {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.fail(failure)
        else:
            self.fail(ShutDownError(f"rank {self._rank} was interrupted by {type(error).__name__}"))

    def _explain(self, error: HorovodInternalError) -> HorovodInternalError:
        """The best explanation of ``error``: another rank's error, the loss of a rank, or the verdict of rank 0.

        Waits as long as rank 0 may have a better explanation: the ranks in ``error`` may themselves wait for another.
        """
        is_vague = isinstance(error, PeerLostError | CollectiveTimeoutError)
        known = self._known_reason(is_vague)
        if known is not None or self.ending.finished or not is_vague:
            return known or error
        self._link.accuse(error)
        began = self._asked() or time.monotonic()
        while time.monotonic() < began + ANSWER_SECONDS:
            known = self._known_reason()
            if known is not None:
                return known
            self._channel.poll(POLL_SECONDS)
        silent = (COORDINATOR,)
        seconds, states = time.monotonic() - began, self._link.states(silent)
        return verdict(error, silent, seconds, self._topology.hosts, "", states)

    def _known_reason(self, is_vague: bool = True) -> HorovodInternalError | None:
        """The error of an abort here; or that for which another rank, or rank 0 here, ends the job; or a lost rank.

        Where the error of this rank is not vague, a loss is no better, and the error itself is the answer to rank 0.
        """
        if self._ordered is not None:
            return self._ordered
        lost = self.ending.lost  # read first, because the last messages of the lost rank may explain more
        for message in self._link.attend():
            if isinstance(message, Abort):
                return unpack(message.error)
            if isinstance(message, Ping) and is_vague:
                self._link.pong(message)
        return self.ending.loss(lost) if is_vague and lost is not None else None

    def abort(self, error: HorovodInternalError) -> None:
        """End everything with ``error``, which needs no better explanation; from any thread."""
        self._ordered = error
        self._commands.append(lambda: self.fail(error))
        self._runner.abort(error)

    def lose(self, rank: int, has_ended: bool = False) -> PeerLostError | None:
        """On a thread that watches: the connection to ``rank`` or, if it ``has_ended``, its process ended.

        Returns the error, None if the loss was expected.
        """
        error = self.ending.lose(rank, has_ended)
        if error is not None:
            self._runner.abort(error)
        return error

    # The last steps of any end.

    def _fail_all(self, error: Exception) -> None:
        self._fail_works(lambda _: error)
        self._runner.fail_flights(error)

    def _fail_works(self, error: Callable[[Request], Exception]) -> None:
        for work in self._works.close(self._too_late):
            if not work.done:
                self._runner.fail(work, self._works.refusal([work]) or error(work.request))

    def _too_late(self, request: Request) -> Exception:
        """The error of a ``request`` after the end; on any thread."""
        return self.ending.error(request, is_in_fit())

    def disown(self) -> None:
        """In a forked child: close this copy of the connections, silently; the parent keeps its own. Takes no lock."""
        self._works.disown(self._too_late)
        self.ending.finish()
        self._channel.disown()

    def close(self) -> None:
        """Release everything; works that are still pending fail."""
        self.ending.finish()
        with ExitStack() as stack:
            for backend in self._runner.backends():
                stack.callback(backend.close)
            stack.callback(self._channel.close)
            self._fail_all(self.ending.error())
