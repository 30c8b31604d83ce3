"""Sleep until a link can send or receive, or until another thread says that this member must look up."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable

from collectives.backends.tcp.link import Link

__all__ = ["Poller"]

HANG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class Poller:
    """For one thread; only :meth:`ring` may be called on others, and not after :meth:`close`."""

    def __init__(self) -> None:
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._events: dict[int, int] = {}

    def sleep(self, links: Iterable[Link], seconds: float) -> set[int]:
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


def _events(link: Link) -> int:
    """The events that let this member go on.

    The end of a link would end each sleep, also where it is no news: after the link has parted, and while there is no
    memory for data that has come before the end.
    """
    work = link.is_sending * select.POLLOUT | link.can_receive * select.POLLIN
    is_blocked = link.is_receiving and not link.can_receive
    return work if link.has_parted or is_blocked else work | select.POLLRDHUP
