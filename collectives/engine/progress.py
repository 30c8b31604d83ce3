"""Drives an exchange, on its communication thread or on a caller that waits.

The thread that holds ``_driving`` drives. Two thread hand-overs cost more than a small allreduce, so a caller that
waits takes the lock and drives itself; the communication thread then parks, and looks again every few milliseconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from collectives.cores import pin
from collectives.engine.loop import EngineLoop
from collectives.engine.work import Watch, Work
from collectives.kernels.subnormals import HALF, SMALLEST_NORMAL, KeptSubnormals
from collectives.net.channel import SignalEvent

RECENT_SECONDS = 1.0
"""How long after a caller drove a patient communication thread expects the next one."""
PARK_SECONDS = 0.002
LONG_PARK_SECONDS = 0.016
"""Where callers drive again and again, each wake of the communication thread takes the core from a rank."""
SPINS = 100
FEW_SPINS = 4
"""Where ranks share cores, a spinning rank may occupy the core of the rank that it waits for."""
WAIT_SLICE_SECONDS = 1.0


class Inside:
    """The threads that are inside calls of the engine: a signal handler there must not wait for other threads.

    ``hold``, once set, is called at the end of each call: it blocks daemon threads while the process ends.
    """

    def __init__(self) -> None:
        self.hold: Callable[[], None] | None = None
        self._threads: dict[int, bool] = {}

    def __enter__(self) -> None:
        self._threads[threading.get_ident()] = True

    def __exit__(self, *_: object) -> None:
        self._threads[threading.get_ident()] = False
        if self.hold is not None:
            self.hold()

    def __contains__(self, thread: int) -> bool:
        return self._threads.get(thread, False)

    def ever(self) -> dict[int, bool]:
        """The threads that have made calls, and whether each is inside of one."""
        return dict(self._threads)


class ProgressEngine:
    """Drives ``exchange`` until it has finished, then closes it.

    A ``patient`` driver has no core of its own: its communication thread sleeps through submissions, and leaves decided
    batches to the callers for tens of milliseconds. ``crowded``: the host has more ranks than cores. The communication
    thread runs on ``core``.
    """

    def __init__(
        self, exchange: EngineLoop, name: str, patient: bool, crowded: bool = False, core: int | None = None
    ) -> None:
        self.inside = Inside()
        self.patient = patient
        self.napping = False
        self._core = core
        self._spins = FEW_SPINS if crowded else SPINS
        self._exchange = exchange
        self._end = exchange.ends.ending
        self._channel = exchange.channel
        # Owned by the driving thread; no thread blocks on it without a bound: callers wait for _changed instead.
        self._driving = threading.Lock()
        self._numbers = KeptSubnormals()  # of the caller that drives
        # Owned by the driver; wakes waiting callers when a work is done or a thread stops driving; waits are sliced.
        self._changed = threading.Condition(threading.RLock())
        self._waiters: set[int] = set()
        # Owned by the communication thread, which parks here, for milliseconds, while a caller drives.
        self._unpark = SignalEvent()
        self._park_seconds = PARK_SECONDS
        self._polling: set[int] = set()
        self._driven_at = 0.0
        self._caller = 0
        # Owned by the driver; sleeps in poll, ended when the exchange has finished, joined by join().
        self._thread = threading.Thread(target=self._communicate, name=name, daemon=True)

    def start(self) -> None:
        """Start the communication thread."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the end, at most ``timeout`` seconds; return whether it came."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def await_end(self, timeout: float) -> bool:
        """Wait until the exchange has finished, at most ``timeout`` seconds; return whether it has. It closes later."""
        me = threading.get_ident()
        with self._changed:
            self._waiters.add(me)
            try:
                return self._changed.wait_for(lambda: self._end.finished, timeout)
            finally:
                self._waiters.discard(me)

    @property
    def is_running(self) -> bool:
        """Whether the communication thread has not ended."""
        return self._thread.is_alive()

    def is_driven_by(self, thread: int) -> bool:
        """Whether ``thread`` is a caller that drives."""
        return self._caller == thread

    def drives(self, thread: int) -> bool:
        """Whether ``thread``, which runs a part of the exchange, is the one that drives."""
        return thread == (self._caller or self._thread.ident)

    def notify(self) -> None:
        """There is work: wake the thread that drives, or the communication thread."""
        if self._polling:
            self._channel.wake()
        self._unpark.set()

    def announce(self) -> None:
        """A work is done, or no thread drives: wake the waiting callers."""
        if self._waiters:
            with self._changed:
                self._changed.notify_all()

    # Callers.

    def run_now(self, work: Work) -> bool:
        """Run ``work``, which has not entered, at once if no other thread drives and nothing else is to be done.

        Return whether it entered: it is done then, or it waits as any work does. Only repeated calls can run at once.
        """
        if not self._driving.acquire(blocking=False):
            return False
        try:
            self._caller = threading.get_ident()
            if SMALLEST_NORMAL * HALF:  # inline: this thread keeps subnormal numbers, as nearly all do
                return self._run_now(work)
            with self._numbers:
                return self._run_now(work)
        finally:
            self._caller = 0
            self._driving.release()
            self._after_driving()

    def _run_now(self, work: Work) -> bool:
        entered = self._exchange.run_now(work)
        if self._exchange.overdue:
            self._catch_up()
        return entered

    def wait(self, work: Work | Watch) -> None:
        """Return when ``work`` is done; drive meanwhile, if no other thread does."""
        while not work.done:
            if self._driving.acquire(blocking=False):
                try:
                    with self._numbers:
                        self._drive_for(work)
                finally:
                    self._caller = 0
                    self._driving.release()  # inline: an interrupt at the entry of a helper function would skip it
                    self._after_driving()
            else:
                self._await_change(work)
        if self._exchange.has_batches:  # which the communication thread may have left to this caller
            self.notify()

    def _drive_for(self, work: Work | Watch) -> None:
        self._caller = threading.get_ident()
        while not (work.done or self._end.finished):
            if not (self._step() or self._spin()):
                self._sleep()
        if not work.done:  # entered after all had failed, or taken out of the table by an interrupt
            work.fail(self._end.error())
        if self._exchange.overdue:
            self._catch_up()

    def _catch_up(self) -> None:
        """Hear messages that wait: callers that make one call after the other drive all the time, and need none."""
        if not self._end.finished:
            self._step()

    def _spin(self) -> bool:
        """Poll for a moment, which costs less than a sleep; return whether there is something to do."""
        for _ in range(self._spins):
            os.sched_yield()  # the awaited peer may be queued on this very core
            if self._channel.peek() or not self._exchange.may_sleep:
                return True
        return False

    def _after_driving(self) -> None:
        self._driven_at = time.monotonic()
        if not self._exchange.is_quiet:
            self.notify()
        self.announce()

    def _await_change(self, work: Work | Watch) -> None:
        if self._exchange.commands:
            self.notify()
        me = threading.get_ident()
        with self._changed:
            try:
                self._waiters.add(me)
                if not work.done and self._driving.locked():
                    self._changed.wait(WAIT_SLICE_SECONDS)
            finally:
                self._waiters.discard(me)

    # The communication thread.

    def _communicate(self) -> None:
        if self._core is not None:
            pin(self._core)
        try:
            with KeptSubnormals():  # a thread starts in the mode of the thread that starts it
                self._drive_and_rest()
        finally:
            with self._driving:
                self._exchange.ends.close()
            self.announce()

    def _drive_and_rest(self) -> None:
        while not self._end.finished:
            self._unpark.clear()
            if self._driving.acquire(blocking=False):
                self._drive()
            if not self._end.finished:
                self._rest()

    def _drive(self) -> None:
        try:
            while not self._end.finished and self._step():
                self._park_seconds = PARK_SECONDS  # callers do not do all the work
        finally:
            self._driving.release()
            self.announce()

    def _rest(self) -> None:
        """Sleep until there may be work; while callers drive, park instead, to stay out of their way."""
        idle = time.monotonic() - self._driven_at
        if self._driving.locked():
            if self._exchange.commands:  # this thread may have taken the wake of the caller that drives
                self._channel.wake()
            self._exchange.overdue = self._channel.peek()
            self._park()
        elif idle < self._park_seconds and not self._end.is_leaving:
            if not self._exchange.commands:
                self._park()
        elif self.patient and (self._exchange.has_works or idle < RECENT_SECONDS):
            self._nap()
            self._park_seconds = PARK_SECONDS
        else:
            self._sleep()
            self._park_seconds = PARK_SECONDS

    def _park(self) -> None:
        self.napping = self.patient  # a caller that submits now will probably wait, and drive, before this ends
        try:
            self._unpark.wait(self._park_seconds)
        finally:
            self.napping = False
        self._park_seconds = min(2 * self._park_seconds, LONG_PARK_SECONDS)

    def _nap(self) -> None:
        """Sleep through submissions for a while: each wake would take the computation's core and the GIL."""
        me = threading.get_ident()
        self._polling.add(me)
        self.napping = True
        try:
            if not self._unpark.is_set():
                until = self._until_deadline()
                patience = self._exchange.parameters.patience
                self._channel.poll(patience if until is None else min(until, patience))
        finally:
            self.napping = False
            self._polling.discard(me)

    # The driving thread.

    def _step(self) -> bool:
        eager = bool(self._caller) or not self.patient
        active = self._exchange.step(eager, waited=bool(self._waiters))
        if self._end.finished:
            self.notify()
        return active

    def _sleep(self) -> None:
        me = threading.get_ident()
        self._polling.add(me)
        try:
            if self._exchange.may_sleep:
                self._channel.poll(self._until_deadline())
        finally:
            self._polling.discard(me)

    def _until_deadline(self) -> float | None:
        deadline = self._exchange.deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())
