"""Looks at a thread of this process from another thread: the functions it is in, and the processor time it uses."""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, TypeAlias

from collectives.controller.waits import COMPUTING_SHARE, Frame, ProcessState
from collectives.logs import PACKAGES
from collectives.net.channel import Channel

SHOWN_FRAMES = 3
THREAD_CLOCK = 6
"""The kind of the clock of a thread, in the number of a clock: clock_getcpuclockid(3) is unsafe for one that ends."""
KERAS = f"{os.sep}keras{os.sep}src{os.sep}"
_ROOT = Path(__file__).resolve().parents[__name__.count(".")]
_OURS = tuple(f"{_ROOT / package.replace('.', os.sep)}{os.sep}" for package in PACKAGES)
_LIBRARIES = tuple({f"{sysconfig.get_paths()[kind]}{os.sep}" for kind in ("stdlib", "platstdlib")})
_INSTALLED = ("site-packages", "dist-packages")


_THREAD = re.compile(r"(?:Thread|Current thread) 0x([0-9a-f]+)")
_PLACE = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


class StackPlace(NamedTuple):
    """A line of a function that runs, in ``file``."""

    file: str
    function: str
    line: int


Stacks: TypeAlias = Mapping[int, Sequence[StackPlace]]
"""The functions of each thread, by its identifier."""


class Look(NamedTuple):
    """One look at a thread: its functions, the outermost first.

    ``used`` are the seconds in which it has run on a processor, and ``queued`` those in which it waited for one, as far
    as the kernel counts them. ``time`` is that of the look, in monotonic seconds.
    """

    places: Sequence[StackPlace]
    used: float
    queued: float
    time: float

    @property
    def has_ended(self) -> bool:
        """Whether the thread has left the user's code for ever."""
        return not self.places or _is_end(self.places[0])


def look(thread: int, stacks: Stacks) -> Look:
    """A look at ``thread``, by its identifier; it has no places if the thread has ended."""
    places, now = stacks.get(thread, []), time.monotonic()
    if not places:
        return Look((), 0.0, 0.0, now)
    native = next((each.native_id for each in threading.enumerate() if each.ident == thread), None) or 0
    return Look(places, _used(native), _queued(native), now)


def _used(native: int) -> float:
    """The field of a :class:`Look`; 0 for a thread that has just ended."""
    try:
        return time.clock_gettime((~native << 3) | THREAD_CLOCK)
    except OSError:
        return 0.0


def _queued(native: int) -> float:
    """The field of a :class:`Look`; 0 where the kernel does not count it."""
    try:
        fields = Path(f"/proc/self/task/{native}/schedstat").read_text().split()
    except OSError:
        return 0.0
    return int(fields[1]) / 1e9


def read_stacks() -> Stacks:
    """The functions of each thread, the outermost first, but no more than the 100 innermost.

    Code in Python that follows ``f_back`` crashes the process if such a thread goes on meanwhile (CPython issues 99110
    and 111363); faulthandler reads everything in one step. OSError where no descriptor is left, or where the process
    has more threads than the 100 that faulthandler reads.
    """
    stacks: dict[int, list[StackPlace]] = {}
    for line in _dump().splitlines():
        if thread := _THREAD.match(line):
            places = stacks[int(thread[1], 16)] = []
        elif place := _PLACE.match(line):
            places.insert(0, StackPlace(_unescaped(place[1]), _unescaped(place[3]), int(place[2])))
        elif line == "...":
            raise OSError("this process has more threads than faulthandler reads")
    return stacks


def _dump() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode("ascii", "replace")


def _unescaped(text: str) -> str:
    """faulthandler writes other characters than ASCII as escapes."""
    return _ESCAPE.sub(lambda found: chr(int("".join(filter(None, found.groups())), 16)), text)


def _is_end(place: StackPlace) -> bool:
    """Whether the main thread waits for others at the end of the interpreter."""
    return place.function == "_shutdown" and place.file == threading.__file__


def is_in_fit() -> bool:
    """Whether a thread of this process is in fit() of Keras, whose steps may call collectives on other threads."""
    try:
        stacks = read_stacks()
    except OSError:
        return False
    return any(place.function == "fit" and KERAS in place.file for places in stacks.values() for place in places)


def is_idle(first: Look, second: Look) -> bool:
    """Whether a thread, seen twice, makes no call of its own accord.

    It waits for another thread, or inside of our code; or it has no code of the user, and does not compute.
    """
    files = [place.file for place in second.places]
    if not files or files[-1].startswith(_OURS):
        return True
    is_users = any(_is_users(file) and not file.startswith((*_OURS, "<frozen")) for file in files)
    return busy(first, second) < COMPUTING_SHARE and (not is_users or files[-1] == threading.__file__)


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
    pairs = takewhile(lambda pair: pair[0][:2] == pair[1][:2], zip(first.places, second.places, strict=False))
    both = [pair for pair in pairs if not pair[0].file.startswith((*_OURS, "<frozen"))]
    users = [pair for pair in both if _is_users(pair[0].file)]
    called = both[-1:] if both and both[-1] not in users[-1:] else []
    return tuple(_frame(*pair) for pair in [*users[-SHOWN_FRAMES:], *called])


def _is_users(file: str) -> bool:
    return not (file.startswith(_LIBRARIES) or any(name in Path(file).parts for name in _INSTALLED))


def _frame(first: StackPlace, second: StackPlace) -> Frame:
    lines = sorted((first.line, second.line))
    source = linecache.getline(second.file, second.line).strip()
    return Frame(_short(second.file), lines[0], lines[1], second.function, source)


def _short(file: str) -> str:
    """The path from the working folder, if ``file`` is in there."""
    try:
        return file.removeprefix(f"{os.getcwd()}{os.sep}")
    except OSError:  # the folder was deleted
        return file


def state_of(process: int) -> ProcessState | None:
    """The state of the process with this id; None if there is none, or its state cannot be read."""
    try:
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return ProcessState(process, fields[0].decode()) if fields else None


def states_of(channel: Channel, ranks: Iterable[int]) -> Mapping[int, ProcessState]:
    """The states of the processes of ``ranks``, of those that ``channel`` reaches on this host."""
    processes = {rank: channel.process(rank) for rank in ranks}
    found = {rank: state_of(process) for rank, process in processes.items() if process is not None}
    return {rank: state for rank, state in found.items() if state is not None}
