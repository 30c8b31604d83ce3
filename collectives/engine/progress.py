"""Drives the loop of an engine, on its communication thread or on a caller that waits.

The thread that holds the lock of :class:`DrivingThread` drives. Two thread hand-overs cost more than a small allreduce,
so a caller that waits takes the lock and drives itself; the communication thread then parks, and looks again every few
milliseconds.
"""

from __future__ import annotations

import os
import threading
import time

from collectives.backends.placement import pin
from collectives.engine.loop import EngineLoop
from collectives.engine.threads import CommandQueue, DrivingThread, Waiters
from collectives.engine.work import Watch, Work
from collectives.kernels.subnormals import HALF, SMALLEST_NORMAL, KeptSubnormals

RECENT_SECONDS = 1.0
"""How long after a caller drove a patient communication thread expects the next one."""
PARK_SECONDS = 0.002
LONG_PARK_SECONDS = 0.016
"""Where callers drive again and again, each wake of the communication thread takes the core from a rank."""
SPINS = 100
FEW_SPINS = 4
"""Where ranks share cores, a spinning rank may occupy the core of the rank that it waits for."""
WAIT_SLICE_SECONDS = 1.0


class ProgressEngine:
    """Drives ``loop`` until it has finished, then closes it.

    A ``patient`` engine has no core of its own: its communication thread sleeps through submissions, and leaves decided
    batches to the callers for tens of milliseconds. ``crowded``: the host has more ranks than cores. The communication
    thread runs on ``core``.
    """

    def __init__(
        self,
        loop: EngineLoop,
        queue: CommandQueue,
        driving: DrivingThread,
        waiters: Waiters,
        name: str,
        crowded: bool = False,
        core: int | None = None,
    ) -> None:
        self.napping = False
        self._core = core
        self._spins = FEW_SPINS if crowded else SPINS
        self._loop = loop
        self._end = loop.ends.ending
        self._channel = loop.channel
        self._queue = queue
        self._driving = driving
        self._waiters = waiters
        self._numbers = KeptSubnormals()  # of the caller that drives
        self._park_seconds = PARK_SECONDS
        self._driven_at = 0.0
        # Owned by this object; sleeps in poll, ended when the loop has finished, joined by join().
        self._thread = threading.Thread(target=self._communicate, name=name, daemon=True)

    def start(self) -> None:
        """Start the communication thread."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the end, at most ``timeout`` seconds; return whether it came."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def await_end(self, timeout: float) -> bool:
        """Wait until the loop has finished, at most ``timeout`` seconds; return whether it has. It closes later."""
        return self._waiters.wait_for(lambda: self._end.finished, timeout)

    @property
    def patient(self) -> bool:
        """Whether this engine has no core of its own."""
        return self._loop.parameters.patient

    @property
    def is_running(self) -> bool:
        """Whether the communication thread has not ended."""
        return self._thread.is_alive()

    def is_driven_by(self, thread: int) -> bool:
        """Whether ``thread`` is a caller that drives."""
        return self._driving.caller == thread

    # Callers.

    def run_now(self, work: Work) -> bool:
        """Run ``work``, which has not entered, at once if no other thread drives and nothing else is to be done.

        Return whether it entered: it is done then, or it waits as any work does. Only repeated calls can run at once.
        """
        if not self._driving.lock.acquire(blocking=False):
            return False
        try:
            self._driving.caller = threading.get_ident()
            if SMALLEST_NORMAL * HALF:  # inline: this thread keeps subnormal numbers, as nearly all do
                return self._run_now(work)
            with self._numbers:
                return self._run_now(work)
        finally:
            self._driving.caller = 0
            self._driving.lock.release()
            self._after_driving()

    def _run_now(self, work: Work) -> bool:
        entered = self._loop.run_now(work)
        if self._loop.overdue:
            self._catch_up()
        return entered

    def wait(self, work: Work | Watch) -> None:
        """Return when ``work`` is done; drive meanwhile, if no other thread does."""
        while not work.done:
            if self._driving.lock.acquire(blocking=False):
                try:
                    with self._numbers:
                        self._drive_for(work)
                finally:
                    self._driving.caller = 0
                    self._driving.lock.release()  # inline: an interrupt at the entry of a helper function would skip it
                    self._after_driving()
            else:
                self._await_change(work)
        if self._loop.has_batches:  # which the communication thread may have left to this caller
            self._queue.notify()

    def _drive_for(self, work: Work | Watch) -> None:
        self._driving.caller = threading.get_ident()
        while not (work.done or self._end.finished):
            if not (self._step() or self._spin()):
                self._sleep()
        if not work.done:  # entered after all had failed, or taken out of the table by an interrupt
            work.fail(self._end.error())
        if self._loop.overdue:
            self._catch_up()

    def _catch_up(self) -> None:
        """Hear messages that wait: callers that make one call after the other drive all the time, and need none."""
        if not self._end.finished:
            self._step()

    def _spin(self) -> bool:
        """Poll for a moment, which costs less than a sleep; return whether there is something to do."""
        for _ in range(self._spins):
            os.sched_yield()  # the awaited peer may be queued on this very core
            if self._channel.peek() or not self._loop.may_sleep:
                return True
        return False

    def _after_driving(self) -> None:
        self._driven_at = time.monotonic()
        if not self._loop.is_quiet:
            self._queue.notify()
        self._waiters.announce()

    def _await_change(self, work: Work | Watch) -> None:
        if self._loop.commands:
            self._queue.notify()
        self._waiters.wait(WAIT_SLICE_SECONDS, lambda: not work.done and self._driving.lock.locked())

    # The communication thread.

    def _communicate(self) -> None:
        self._driving.communication = threading.get_ident()
        if self._core is not None:
            pin(self._core)
        try:
            with KeptSubnormals():  # a thread starts in the mode of the thread that starts it
                self._drive_and_rest()
        finally:
            with self._driving.lock:
                self._loop.ends.close()
            self._waiters.announce()

    def _drive_and_rest(self) -> None:
        while not self._end.finished:
            self._queue.unpark.clear()
            if self._driving.lock.acquire(blocking=False):
                self._drive()
            if not self._end.finished:
                self._rest()

    def _drive(self) -> None:
        try:
            while not self._end.finished and self._step():
                self._park_seconds = PARK_SECONDS  # callers do not do all the work
        finally:
            self._driving.lock.release()
            self._waiters.announce()

    def _rest(self) -> None:
        """Sleep until there may be work; while callers drive, park instead, to stay out of their way."""
        idle = time.monotonic() - self._driven_at
        if self._driving.lock.locked():
            if self._loop.commands:  # this thread may have taken the wake of the caller that drives
                self._channel.wake()
            self._loop.overdue = self._channel.peek()
            self._park()
        elif idle < self._park_seconds and not self._end.is_leaving:
            if not self._loop.commands:
                self._park()
        elif self.patient and (self._loop.has_works or idle < RECENT_SECONDS):
            self._nap()
            self._park_seconds = PARK_SECONDS
        else:
            self._sleep()
            self._park_seconds = PARK_SECONDS

    def _park(self) -> None:
        self.napping = self.patient  # a caller that submits now will probably wait, and drive, before this ends
        try:
            self._queue.unpark.wait(self._park_seconds)
        finally:
            self.napping = False
        self._park_seconds = min(2 * self._park_seconds, LONG_PARK_SECONDS)

    def _nap(self) -> None:
        """Sleep through submissions for a while: each wake would take the computation's core and the GIL."""
        me = threading.get_ident()
        self._queue.polling.add(me)
        self.napping = True
        try:
            if not self._queue.unpark.is_set():
                until = self._until_deadline()
                patience = self._loop.parameters.patience
                self._channel.poll(patience if until is None else min(until, patience))
        finally:
            self.napping = False
            self._queue.polling.discard(me)

    # The driving thread.

    def _step(self) -> bool:
        eager = bool(self._driving.caller) or not self.patient
        active = self._loop.step(eager, waited=bool(self._waiters.threads))
        if self._end.finished:
            self._queue.notify()
        return active

    def _sleep(self) -> None:
        me = threading.get_ident()
        self._queue.polling.add(me)
        try:
            if self._loop.may_sleep:
                self._channel.poll(self._until_deadline())
        finally:
            self._queue.polling.discard(me)

    def _until_deadline(self) -> float | None:
        deadline = self._loop.deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())
