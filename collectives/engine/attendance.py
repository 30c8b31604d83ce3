"""The duties of this rank while it waits inside an operation: answers, inquiries, the ends of other ranks."""

from __future__ import annotations

from collections.abc import Callable

from collectives.engine.dispatch import Dispatch
from collectives.engine.inquiries import Inquiries
from collectives.engine.link import Link
from collectives.engine.locator import Locator

__all__ = ["Attendance"]


class Attendance:
    """Answers the coordinator, makes ``inquiries`` and hears of the end of other ranks, inside an operation or a trial.

    It also sends the answers of ``locator``. All other messages wait for the end of the operation. ``is_driving`` tells
    whether the calling thread drives.
    """

    def __init__(
        self, link: Link, dispatch: Dispatch, inquiries: Inquiries, locator: Locator, is_driving: Callable[[], bool]
    ) -> None:
        self._link = link
        self._dispatch = dispatch
        self.inquiries = inquiries
        self._locator = locator
        self._is_driving = is_driving

    def wait(self) -> None:
        """See :data:`collectives.backends.base.OnWait`; only the thread that drives may use the channel."""
        if self._is_driving():
            self.attend()

    def attend(self) -> bool:
        """On the thread that drives: do what may not wait; return whether messages have been kept for later."""
        for message in self._link.attend():
            self._dispatch(message)
        self.inquiries.look()
        self._locator.look(in_operation=True)
        return self._link.has_kept
