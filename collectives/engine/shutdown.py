"""How the engine of one rank ends, and what that means for its works and for the other ranks.

Up to Python 3.13, a daemon thread that takes the GIL of an interpreter in finalisation is ended by pthread_exit. That
unwinds the C++ frames of extensions such as torch, where it ends in std::terminate: the process aborts.

A method is for the thread that drives, unless its docstring says that it is for any thread.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cache, partial

from collectives.api import (
    CollectiveTimeoutError,
    HorovodInternalError,
    PeerLostError,
    Request,
    ShutDownError,
    Timeouts,
    Topology,
)
from collectives.controller.agreement import name_ranks
from collectives.controller.errors import for_other_ranks, unpack
from collectives.controller.messages import Abort, Leave, Left, Ping, Stop
from collectives.engine.bypass import Bypass
from collectives.engine.link import Link
from collectives.engine.negotiation import Negotiation
from collectives.engine.runner import Runner
from collectives.engine.threads import CommandQueue, Waiters
from collectives.engine.work_table import WorkTable
from collectives.net.channel import Channel
from collectives.stalls.deadlocks import remedy
from collectives.stalls.liveness import GRACE_SECONDS, verdict
from collectives.stalls.stacks import is_in_fit
from collectives.stalls.watchdog import CoordinatorWatch

logger = logging.getLogger(__name__)


EXIT_SECONDS = 0.25
"""How long the end of the process waits for threads that used the engine and are not in a call of it."""
HOLD_SECONDS = 60.0
"""How long a thread is held; the process has ended long before, unless another exit handler waits for that thread."""
LOOK_SECONDS = 0.001


class ProcessExit:
    """The end of this process: :meth:`begin`, then :meth:`settle`, by the thread that runs the exit handlers.

    Daemon threads call :meth:`hold`.
    """

    def __init__(self) -> None:
        self._thread: int | None = None
        self._held: set[int] = set()
        # Owned by this object and never set: threads that are held wait for it, at most HOLD_SECONDS.
        self._never = threading.Event()

    def begin(self) -> None:
        """From now on, threads other than this one are held."""
        self._thread = threading.get_ident()

    def hold(self) -> None:
        """Return at once, but block a daemon thread of a process that ends: its next steps may abort the process."""
        if self._thread is None or self._thread == threading.get_ident() or not threading.current_thread().daemon:
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # a signal would make this thread take the GIL
        self._held.add(threading.get_ident())
        self._never.wait(HOLD_SECONDS)

    def settle(self, threads: Iterable[int]) -> None:
        """Wait until those of ``threads`` that are daemons are held or have ended, at most GRACE_SECONDS."""
        users, deadline = set(threads), time.monotonic() + EXIT_SECONDS
        while self._free(users) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)

    def _free(self, users: set[int]) -> set[int]:
        alive = {thread.ident for thread in threading.enumerate() if thread.daemon and thread.ident is not None}
        return (users & alive) - self._held - {self._thread or 0}


class Ending:
    """Runs until one of four ends: polite, abrupt, a lost rank, or a shutdown that timed out.

    Polite: :meth:`ask`, :meth:`leave`, :meth:`stop`, then :meth:`finish` when all ranks have left. Timed out: after
    :meth:`leave` not every rank answered within ``seconds``. Abrupt: :meth:`fail`. A lost rank is noted by
    :meth:`lose` and becomes an abrupt end, unless the engine ends anyway. ``finished`` turns true once; ``failure``
    then is the error of an abrupt end, None for the others. ``lost`` is the first rank that was lost.
    """

    def __init__(self, topology: Topology, seconds: float) -> None:
        self.finished = False
        self.failure: Exception | None = None
        self.lost: int | None = None
        self._topology = topology
        self._seconds = seconds
        self._has_ended = False
        self._asked: float | None = None
        self._deadline: float | None = None
        self._stopping = False
        self._refused = self._cause = self._last = ""
        self._stopped_by = topology.rank

    @property
    def deadline(self) -> float | None:
        """When :meth:`expire` finishes the end, in monotonic seconds; None before :meth:`leave`."""
        return self._deadline

    @property
    def is_leaving(self) -> bool:
        """Whether the polite end has begun here: no caller is expected to drive any more."""
        return self._deadline is not None

    @property
    def is_whole(self) -> bool:
        """Whether this rank knows of no lost rank, and the engine has not ended."""
        return self.lost is None and not self.finished

    def error(self, request: Request | None = None, is_in_fit: bool = False) -> Exception:
        """The error of a pending or a later ``request``, of a rank that perhaps ``is_in_fit`` of Keras."""
        if self.failure is not None:
            return self.failure
        ended = "Horovod has been shut down"
        if self._stopped_by != self._topology.rank:
            return ShutDownError(f"{ended} by rank {self._stopped_by}{self._why(request, is_in_fit)}")
        ended = f"{ended}; before, {self._refused}" if self._refused else ended
        return ShutDownError(f"{ended}. Call hvd.init() to start again")

    def ask(self, now: float) -> None:
        """This rank wants to end politely."""
        self._asked = now

    def leave(self, now: float) -> None:
        """The wish to end goes out to the other ranks."""
        self._deadline = now + self._seconds

    def stop(self, message: Stop) -> None:
        """The coordinator stops the job."""
        self._stopping = True
        self._stopped_by = message.rank
        self._cause = message.cause
        self._last = message.last
        self._refused = message.refused[0].text if message.refused else ""

    def in_flight(self, request: Request, is_in_fit: bool = False) -> ShutDownError:
        """The error of ``request``, which was still in flight at the :meth:`stop`, see :meth:`error`."""
        ended = f"Horovod has been shut down by rank {self._stopped_by} while the tensor was in flight"
        return ShutDownError(f"{ended}{self._why(request, is_in_fit)}")

    def _why(self, request: Request | None, is_in_fit: bool) -> str:
        """The cause, a call that a rank has refused and others have still to make, or else the likeliest one."""
        if self._cause:
            return f": it {self._cause}"
        if self._refused or request is None:
            return f"; {self._refused}" if self._refused else ""
        return f"; {remedy(self._last, request.operation, request.name, is_in_fit)}"

    def finish(self) -> None:
        """Only the close is left to do."""
        self.finished = True

    def expire(self, now: float) -> bool:
        """Finish a polite end that takes too long; returns whether it did."""
        if self.finished or self._deadline is None or now <= self._deadline:
            return False
        self.finished = True
        return True

    def overdue(self, now: float, absent: Sequence[int]) -> ShutDownError | None:
        """The error of an abrupt end, if this rank asked for the end long ago and has not been able to leave.

        It has not, because the ranks ``absent``, or others if there are none, have not reached an operation.
        """
        if self._asked is None or now <= self._asked + self._seconds:
            return None
        late = name_ranks(absent) if absent else "another rank"
        return ShutDownError(f"Horovod has been shut down by rank {self._topology.rank}; {self.unanswered(late)}")

    def unanswered(self, ranks: str) -> str:
        """Says that ``ranks`` did not answer the shutdown, for a message."""
        return f"{ranks} did not answer the shutdown within {self._seconds:g} s"

    def fail(self, error: HorovodInternalError) -> bool:
        """Begin an abrupt end: the caller fails all works, then calls :meth:`finish`; False if already finished."""
        if self.finished:
            return False
        self.failure = error
        return True

    def lose(self, rank: int, has_ended: bool = False) -> PeerLostError | None:
        """The connection to ``rank`` ended or, if it ``has_ended``, its process.

        Returns the error for calls of backends, None if the loss was expected.
        """
        if self.lost is None:
            self.lost, self._has_ended = rank, has_ended
        return None if self._stopping or self.finished else self.loss(rank)

    def loss(self, rank: int) -> PeerLostError:
        """The error for the loss of ``rank``."""
        has_ended = self._has_ended and rank == self.lost
        reason = "its process ended" if has_ended else "its process ended or its connection broke"
        host = self._topology.hosts[rank]
        text = f"rank {rank} on host {host!r} is gone: {reason}; look at the output of that rank"
        return PeerLostError(text, [rank], [host], has_ended)


POLL_SECONDS = 0.05
ANSWER_SECONDS = 2 * GRACE_SECONDS
"""Rank 0 has explained an error within this time, unless it is silent itself."""


class Ends:
    """Ends politely (:meth:`leave`, then the coordinator's :meth:`stop`), or abruptly (:meth:`fail`).

    ``ending`` is the state. Its ``finished`` turns true once, when only :meth:`close` is left to do; its ``failure`` is
    then the reason of an abrupt end. ``watch`` knows when this rank asked rank 0 a question that has no answer yet.
    ``on_death`` is called when it is certain that the process of another rank has ended, on a thread that watches.
    """

    def __init__(
        self,
        topology: Topology,
        timeouts: Timeouts,
        channel: Channel,
        link: Link,
        bypass: Bypass,
        negotiation: Negotiation,
        works: WorkTable,
        runner: Runner,
        queue: CommandQueue,
        waiters: Waiters,
        watch: CoordinatorWatch,
    ) -> None:
        self._topology = topology
        self.on_death: Callable[[PeerLostError], None] = lambda error: None
        self._watch = watch
        self.ending = Ending(topology, timeouts.shutdown)
        self._rank = topology.rank
        self._timeouts = timeouts
        self._channel = channel
        self._link = link
        self._bypass = bypass
        self._negotiation = negotiation
        self._works = works
        self._runner = runner
        self._queue = queue
        self._waiters = waiters
        self._ordered: HorovodInternalError | None = None  # the error of :meth:`abort`

    # Polite.

    def leave(self, cause: str = "") -> None:
        """Begin the polite end, with the next step; from any thread. The other ranks hear of the ``cause``."""
        self.ending.ask(time.monotonic())
        self._queue.call(partial(self._leave, cause))

    def _leave(self, cause: str) -> None:
        self.ending.leave(time.monotonic())
        self._bypass.decline()
        self._negotiation.report()  # which reports the calls that failed here: the other ranks must not miss the reason
        last = self._works.last
        self._link.tell(Leave(cause, "" if last is None else last[0].name))

    def stop(self, message: Stop) -> None:
        """The coordinator stops the job, and all batches that were decided before have run."""
        self._runner.drain(self._timeouts.collective)
        self._works.refuse({(refuse.process_set, refuse.name): refuse.error() for refuse in message.refused})
        self.ending.stop(message)
        in_fit = cache(is_in_fit)  # which reads all stacks; a change of world usually finds no work in flight
        self._fail_works(lambda request: self.ending.in_flight(request, in_fit()))
        self._runner.fail_flights(self.ending.error())
        self._bypass.decline()
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
            self._waiters.announce()

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
            return
        if isinstance(error, Exception):
            text = "rank %d: unexpected error in the engine"
            logger.error(text, self._rank, exc_info=error, extra=self._works.about())
        self.fail(for_other_ranks(error, f"rank {self._rank}"))

    def _explain(self, error: HorovodInternalError) -> HorovodInternalError:
        """The best explanation of ``error``: another rank's error, the loss of a rank, or the verdict of rank 0.

        Waits as long as rank 0 may have a better explanation: the ranks in ``error`` may themselves wait for another.
        """
        is_vague = isinstance(error, PeerLostError | CollectiveTimeoutError)
        known = self._known_reason(is_vague)
        if known is not None or self.ending.finished or not is_vague:
            return known or error
        self._link.accuse(error)
        began = self._watch.asked or time.monotonic()
        while time.monotonic() < began + ANSWER_SECONDS:
            known = self._known_reason()
            if known is not None:
                return known
            self._channel.poll(POLL_SECONDS)
        silent = (self._channel.silent_rank,)
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
        self._queue.call(lambda: self.fail(error))
        self._runner.abort(error)

    def lose(self, rank: int, has_ended: bool = False) -> None:
        """On a thread that watches: the connection to ``rank`` or, if it ``has_ended``, its process ended."""
        error = self.ending.lose(rank, has_ended)  # None if the loss was expected
        if error is not None:
            self._runner.abort(error)
        self._queue.notify()
        self._channel.wake()
        if has_ended and error is not None:
            self.on_death(error)

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
