"""Moves the data of all links of a member, and waits for the other members."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable

from collectives.api import CollectiveTimeoutError, PeerLostError, ShutDownError
from collectives.backends.base import Call, Group, OnWait, ignore_waits
from collectives.backends.tcp.link import TcpLink

HANG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class Poller:
    """For one thread; only :meth:`ring` may be called on others, and not after :meth:`close`."""

    def __init__(self) -> None:
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._events: dict[int, int] = {}

    def sleep(self, links: Iterable[TcpLink], seconds: float) -> set[int]:
        """Return when one of ``links`` can go on, after ``seconds``, or at once after :meth:`ring`.

        Returns the descriptors of the links that have hung up.
        """
        for link in links:
            self._await(link.descriptor, _events(link))
        return {descriptor for descriptor, events in self._poll.poll(seconds * 1000.0) if events & HANG_UP}

    def _await(self, descriptor: int, events: int) -> None:
        if self._events.get(descriptor, 0) == events:
            return
        self._events[descriptor] = events
        if events:
            self._poll.register(descriptor, events)
        else:
            self._poll.unregister(descriptor)

    def ring(self) -> None:
        """End the present sleep and all later ones."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Release the descriptor."""
        os.close(self._bell)


def _events(link: TcpLink) -> int:
    """The events that let this member go on.

    The end of a link would end each sleep, also where it is no news: after the link has parted, and while there is no
    memory for data that has come before the end.
    """
    work = link.is_sending * select.POLLOUT | link.can_receive * select.POLLIN
    is_blocked = link.is_receiving and not link.can_receive
    return work if link.has_parted or is_blocked else work | select.POLLRDHUP


SPINS = 100
"""Looks at links, with a yield after all of them, before this member sleeps. None where ranks share cores: a member
that yields gets its core back late, one that is woken gets it soon."""
SLICE_SECONDS = 0.05
EARLY = 10
"""After so many looks a member that works as fast as this one would have answered."""
VOTING_SECONDS = 0.005
"""A member that does not know yet whether all run an operation looks up so often."""


class Pump:
    """``links`` are those of a member of ``group``; this pump owns them.

    ``timeout`` bounds a silence of the other members, in seconds. ``crowded``: the host has more ranks than cores.
    """

    def __init__(self, group: Group, links: Iterable[TcpLink], timeout: float, crowded: bool) -> None:
        self._group = group
        self._links = links = list(links)
        self._timeout = timeout
        self._spins = 0 if crowded else SPINS // max(1, len(links))
        self._early = min(self._spins, EARLY)
        self._looks_again = bool(self._spins) or any(link.hides_data for link in links)
        self._poller = Poller()
        self._error: Exception | None = None
        self._silent_since = self._attended = 0.0
        self.on_wait: OnWait = ignore_waits
        self.on_end: Call = ignore_waits
        """Called when the links are ended, from any thread."""
        # Owned by this pump, held for a few system calls: no thread uses a descriptor that another one has closed. A
        # signal handler may abort while its thread is in it.
        self._lock = threading.RLock()
        self._is_closed = False

    def check(self) -> None:
        """Raise the error that ended this pump, if one did."""
        if self._error is not None:
            raise self._error

    def add(self, link: TcpLink) -> None:
        """Move the data of ``link``, too, and own it. For a member whose links come one by one."""
        with self._lock:
            self._links.append(link)
            self._spins = SPINS // len(self._links) if self._spins else 0
            if self._error is not None:
                link.shut_down()

    def tend(self) -> None:
        """For a wait in an operation that no link ends: as :meth:`check`, and the engine works now and then."""
        self.check()
        self._attend(time.monotonic())

    def run(self) -> None:
        """Return when the links have sent and received everything.

        Raises PeerLostError, CollectiveTimeoutError, or the error of :meth:`abort`.
        """
        quiet, self._attended = 0, time.monotonic()
        while self._is_busy():
            if self._step():
                quiet = 0
                self._attend(time.monotonic())
            elif quiet < self._spins:
                quiet += 1
                os.sched_yield()
            else:
                self._sleep(quiet == self._spins)
                quiet = self._spins + 1
            self.check()

    def run_until(self, is_over: Callable[[], bool], early: Callable[[], None], waiting: Callable[[], None]) -> None:
        """Move data until ``is_over()``, however long the others take.

        ``early`` is called when that is not at once, ``waiting`` every few milliseconds. Raises PeerLostError, or the
        error of :meth:`abort`.
        """
        quiet = 0
        while not is_over():
            if self._step():
                quiet = 0
                if self._looks_again or is_over():
                    continue
            self.check()
            if quiet == self._early:
                early()
            if quiet < self._spins:
                os.sched_yield()
            else:
                self._doze(waiting)
            quiet += 1

    def flush(self) -> None:
        """Move what can be moved now. Raises PeerLostError, or the error of :meth:`abort`."""
        self.check()
        self._step()

    def abort(self, error: Exception) -> None:
        """Make a present and all later calls raise ``error``, and end the links; from any thread."""
        with self._lock:
            self._error = error
            if not self._is_closed:
                self._poller.ring()
                self._shut_down()

    def close(self) -> None:
        """Release everything. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._poller.close()
                for link in self._links:
                    if self._error is None:
                        link.part()
                    link.close()
            self._error = ShutDownError("the tcp backend was closed")  # the traceback of another error may hold memory

    def _is_busy(self) -> bool:
        for link in self._links:  # noqa: SIM110 - faster, and every small operation asks
            if link.is_receiving or link.is_sending:
                return True
        return False

    def _step(self) -> bool:
        moved = False
        for link in self._links:
            if not (link.is_receiving or link.is_sending):
                continue
            try:
                moved |= link.step()
            except OSError as error:
                raise self.fail(self._lost(link, error)) from error
        return moved

    def _look_for_losses(self, ended: Collection[int]) -> None:
        """A member whose data is here may be lost; another one may wait for it, and this one for that one."""
        for link in self._links:
            if link.descriptor in ended and not link.is_receiving:
                try:
                    link.check_end()
                except OSError as error:
                    raise self.fail(self._lost(link, error)) from error

    def _attend(self, now: float) -> None:
        """The engine works now and then, also while data comes steadily."""
        if now >= self._attended + SLICE_SECONDS:
            self._attended = now
            self.on_wait()

    def _sleep(self, is_first: bool) -> None:
        """Wait for data a little at a time. Bound: the timeout; an abort ends the sleep."""
        now = time.monotonic()
        if is_first:
            self._silent_since = now
        elif now >= self._silent_since + self._timeout:
            raise self.fail(self._late())
        self._attend(now)
        self._look_for_losses(self._poller.sleep(self._links, SLICE_SECONDS))

    def _doze(self, waiting: Callable[[], None]) -> None:
        """Wait for data for a moment. Bound: a few milliseconds; ``waiting`` may abort."""
        begin = time.monotonic()
        self._look_for_losses(self._poller.sleep(self._links, VOTING_SECONDS))
        if time.monotonic() >= begin + VOTING_SECONDS:
            waiting()

    def fail(self, error: Exception) -> Exception:
        """The error that this and all later calls raise. Ends the links, so that no other member waits in vain."""
        with self._lock:
            self._error = self._error or error
            self._shut_down()
        return self._error

    def _shut_down(self) -> None:
        self.on_end()
        for link in self._links:
            link.shut_down()

    def _lost(self, link: TcpLink, error: OSError) -> PeerLostError:
        where = [link.position]
        return PeerLostError(
            f"the connection to {self._group.describe(where)} is gone; form a new job ({error})",
            self._group.ranks_at(where),
            [self._group.hosts[link.position]],
        )

    def _late(self) -> CollectiveTimeoutError:
        """Names the members that have sent nothing; or, if all have sent something, those that this one waits for."""
        readers = [link for link in self._links if link.is_sending]
        waiting = [link for link in self._links if link.can_receive] or readers
        late = [link.position for link in waiting if not link.has_received] or [link.position for link in waiting]
        some = "at least one of " if len(late) > 1 else ""
        return CollectiveTimeoutError(
            f"{some}{self._group.describe(late)} did not answer in time: no data moved for {self._timeout:g} s",
            self._group.ranks_at(late),
        )
