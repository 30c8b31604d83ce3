"""Carries out the end of one rank's engine: fails the works, aborts the backends, and tells the other ranks.

A method is for the thread that drives, unless its docstring says that it is for any thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

from collectives.api import (
    CollectiveTimeoutError,
    EngineError,
    HorovodInternalError,
    PeerLostError,
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
from collectives.engine.work_table import WorkTable
from collectives.planning.errors import pack, unpack
from collectives.planning.messages import Abort, Leave, Left, Stop

__all__ = ["Ends"]

logger = logging.getLogger(__name__)

VERDICT_SECONDS = 0.1


class Ends:
    """Ends politely (:meth:`leave`, then the coordinator's :meth:`stop`), or abruptly (:meth:`fail`).

    ``ending`` is the state. Its ``finished`` turns true once, when only :meth:`close` is left to do; its ``failure`` is
    then the reason of an abrupt end. ``announce`` wakes the callers that wait for a work.
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
    ) -> None:
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

    # Polite.

    def leave(self) -> None:
        """Begin the polite end, with the next step; from any thread."""
        self.ending.ask(time.monotonic())
        self._commands.append(self._leave)

    def _leave(self) -> None:
        self.ending.leave(time.monotonic())
        self._decider.decline()
        self._decider.next()  # which reports the calls that failed here: the other ranks must not miss the reason
        self._link.tell(Leave())

    def stop(self, message: Stop) -> None:
        """The coordinator stops the job, and all batches that were decided before have run."""
        self._runner.drain(self._timeouts.collective)
        self._works.refuse({(refuse.process_set, refuse.name): refuse.error() for refuse in message.refused})
        self._fail_works(self.ending.stop(message.rank, message.refused[0].text if message.refused else ""))
        self._decider.decline()
        self._link.tell(Left())

    def all_left(self, message: Left) -> None:
        """All ranks have stopped."""
        self.ending.finish()

    def expire(self) -> None:
        """Finish a polite end that takes too long."""
        if self.ending.is_leaving and self.ending.expire(time.monotonic()):
            logger.warning("rank %d: %s", self._rank, self.ending.unanswered(self._link.unanswered()))

    # Abrupt.

    def fail(self, error: HorovodInternalError) -> None:
        """End everything here with ``error`` and tell the others."""
        if self.ending.fail(error):
            self._runner.abort(error)
            self._link.tell_all(Abort(pack(error)))
            self._fail_works(error)
            self.ending.finish()
            self._announce()

    def hear(self, message: Abort) -> None:
        """Another rank ended abruptly."""
        self.fail(unpack(message.error))

    def break_off(self, error: BaseException) -> None:
        """A step was broken off by ``error``."""
        if isinstance(error, HorovodInternalError):
            self.fail(self._explain(error))
        elif isinstance(error, Exception):
            logger.error("rank %d: unexpected error in the engine", self._rank, exc_info=error)
            failure = EngineError(f"rank {self._rank}: unexpected {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.fail(failure)
        else:
            self.fail(ShutDownError(f"rank {self._rank} was interrupted by {type(error).__name__}"))

    def _explain(self, error: HorovodInternalError) -> HorovodInternalError:
        """The best explanation of ``error``: another rank's error, or the loss of a rank; waits a moment."""
        deadline = time.monotonic() + VERDICT_SECONDS
        while not self.ending.finished and time.monotonic() < deadline:
            lost = self.ending.lost
            for _, message in self._link.arrivals():
                if isinstance(message, Abort):
                    return unpack(message.error)
            if not isinstance(error, PeerLostError | CollectiveTimeoutError):
                break
            if lost is not None:
                return self.ending.loss(lost)
            self._channel.poll(0.05)
        return error

    def abort(self, error: HorovodInternalError) -> None:
        """End everything with ``error``; from any thread."""
        self._commands.append(lambda: self.fail(error))
        self._runner.abort(error)

    def lose(self, rank: int) -> None:
        """On the channel's watch thread: the connection to ``rank`` ended."""
        error = self.ending.lose(rank)
        if error is not None:
            self._runner.abort(error)

    # The last steps of any end.

    def _fail_works(self, error: Exception) -> None:
        for work in self._works.close(self.ending.error()):
            if not work.done:
                self._runner.fail(work, self._works.refusal([work]) or error)
        self._runner.fail_flights(error)

    def disown(self) -> None:
        """In a forked child: close this copy of the connections, silently; the parent keeps its own. Takes no lock."""
        self._works.disown(self.ending.error())
        self.ending.finish()
        self._channel.disown()

    def close(self) -> None:
        """Release everything; works that are still pending fail."""
        self.ending.finish()
        with ExitStack() as stack:
            for backend in self._runner.backends():
                stack.callback(backend.close)
            stack.callback(self._channel.close)
            self._fail_works(self.ending.error())
