"""Looks at a thread of this process from another thread: the functions it is in, and the processor time it uses."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from collectives.logs import PACKAGES
from collectives.planning.whereabouts import Frame

__all__ = ["Look", "busy", "is_in_fit", "look", "region"]

SHOWN_FRAMES = 3
THREAD_CLOCK = 6
"""The kind of the clock of a thread, in the number of a clock: clock_getcpuclockid(3) is unsafe for one that ends."""
KERAS = f"{os.sep}keras{os.sep}src{os.sep}"
_ROOT = Path(__file__).resolve().parents[2]
_OURS = tuple(f"{_ROOT / package}{os.sep}" for package in PACKAGES)
_LIBRARIES = tuple({f"{sysconfig.get_paths()[kind]}{os.sep}" for kind in ("stdlib", "platstdlib")})
_INSTALLED = ("site-packages", "dist-packages")


class Place(NamedTuple):
    """A line of a function that runs."""

    code: CodeType
    line: int


class Look(NamedTuple):
    """One look at a thread: its functions, the outermost first.

    ``used`` are the seconds in which it has run on a processor, and ``queued`` those in which it waited for one, as far
    as the kernel counts them. ``time`` is that of the look, in monotonic seconds.
    """

    places: Sequence[Place]
    used: float
    queued: float
    time: float

    @property
    def has_ended(self) -> bool:
        """Whether the thread has left the user's code for ever."""
        return not self.places or _is_end(self.places[0].code)


def look(thread: int) -> Look:
    """A look at ``thread``, by its identifier; it has no places if the thread has ended."""
    frame, now = sys._current_frames().get(thread), time.monotonic()
    if frame is None:
        return Look((), 0.0, 0.0, now)
    native = next((each.native_id for each in threading.enumerate() if each.ident == thread), None) or 0
    return Look(_places(frame), _used(native), _queued(native), now)


def _used(native: int) -> float:
    """See :class:`Look`; 0 for a thread that has just ended."""
    try:
        return time.clock_gettime((~native << 3) | THREAD_CLOCK)
    except OSError:
        return 0.0


def _queued(native: int) -> float:
    """See :class:`Look`; 0 where the kernel does not count it."""
    try:
        fields = Path(f"/proc/self/task/{native}/schedstat").read_text().split()
    except OSError:
        return 0.0
    return int(fields[1]) / 1e9


def _places(frame: FrameType | None) -> Sequence[Place]:
    places = []
    while frame is not None:
        places.append(Place(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return places[::-1]


def _is_end(code: CodeType) -> bool:
    """Whether the main thread waits for others at the end of the interpreter."""
    return code.co_name == "_shutdown" and code.co_filename == threading.__file__


def is_in_fit() -> bool:
    """Whether a thread of this process is in fit() of Keras, whose steps may call collectives on other threads."""
    return any(_is_fit(place.code) for frame in sys._current_frames().values() for place in _places(frame))


def _is_fit(code: CodeType) -> bool:
    return code.co_name == "fit" and KERAS in code.co_filename


def busy(first: Look, second: Look) -> float:
    """The part of the time between two looks in which the thread used a processor, 0 to 1.

    The time in which it could not get one does not count: a busy machine makes no thread sleep.
    """
    used = max(0.0, second.used - first.used)
    free = second.time - first.time - (second.queued - first.queued)
    return used / max(used, free) if used else 0.0


def region(first: Look, second: Look) -> tuple[Frame, ...]:
    """The functions in which both looks found the thread: a few of the user's, and the library that they have called.

    A thread that computes has moved on between the looks; it is in a loop of the innermost of these functions. A thread
    that has ended is in none.
    """
    if second.has_ended:
        return ()
    pairs = takewhile(lambda pair: pair[0].code is pair[1].code, zip(first.places, second.places, strict=False))
    both = [pair for pair in pairs if not pair[0].code.co_filename.startswith((*_OURS, "<frozen"))]
    users = [pair for pair in both if _is_users(pair[0].code.co_filename)]
    called = both[-1:] if both and both[-1] not in users[-1:] else []
    return tuple(_frame(*pair) for pair in [*users[-SHOWN_FRAMES:], *called])


def _is_users(file: str) -> bool:
    return not (file.startswith(_LIBRARIES) or any(name in Path(file).parts for name in _INSTALLED))


def _frame(first: Place, second: Place) -> Frame:
    file, lines = second.code.co_filename, sorted((first.line, second.line))
    source = linecache.getline(file, second.line).strip()
    return Frame(_short(file), lines[0], lines[1], second.code.co_name, source)


def _short(file: str) -> str:
    """The path from the working folder, if ``file`` is in there."""
    try:
        return file.removeprefix(f"{os.getcwd()}{os.sep}")
    except OSError:  # the folder was deleted
        return file
