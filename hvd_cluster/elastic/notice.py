"""The ends of this process that others must hear of: SIGTERM as a notice, and an exception that nothing catches."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from types import FrameType, TracebackType

from collectives import HorovodInternalError
from executors import FailureKind, brief, kind_of_chain
from hvd_cluster.core.worlds import Worlds

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


def tell_of_uncaught(worlds: Worlds) -> None:
    """Tell the driver of ``worlds`` of the exception that ends this process, when its traceback has been shown."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(worlds)


class _Hook:
    """Does first what the hook before it does."""

    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds
        self._before = sys.excepthook
        self._process = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)
        if (
            os.getpid() == self._process
            and isinstance(error, Exception)
            and kind_of_chain(error) is FailureKind.EXCEPTION
        ):
            self._worlds.tell_exception(brief(error), is_uncaught=True)
