"""SIGTERM as a notice: this process of an elastic job hands over to the others, and ends."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

from collectives.api import HorovodInternalError
from hvd_cluster.worlds import Worlds

__all__ = ["heed_notice"]

logger = logging.getLogger(__name__)


def heed_notice(worlds: Worlds) -> None:
    """Let SIGTERM be a notice to the driver of ``worlds``, unless the user handles it, or this is no main thread.

    In a child that this process forks, SIGTERM does what it does without this: it ends the child.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    signal.signal(signal.SIGTERM, _Handler(worlds))


class _Handler:
    """Ends this process at once if nobody would hear of the notice: the job is over, or this process is not in it."""

    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds
        self._process = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        worlds = self._worlds
        # A handler of the user may call this one in a forked child, too.
        if os.getpid() != self._process or worlds.is_over or worlds.is_alone or worlds.is_abandoned:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        # A thread of its own, which ends with the call: a signal handler must not wait for the network.
        threading.Thread(target=_give_notice, args=(worlds,), name="hvd-notice", daemon=True).start()


def _give_notice(worlds: Worlds) -> None:
    try:
        worlds.give_notice()
    except HorovodInternalError as error:
        logger.warning("%s ends now: it could not tell the driver that it will end: %s", worlds.identity.worker, error)
        worlds.is_abandoned = True
        os.kill(os.getpid(), signal.SIGTERM)


def _forget() -> None:
    """In a forked child."""
    if isinstance(signal.getsignal(signal.SIGTERM), _Handler):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)
