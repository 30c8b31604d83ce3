"""Pure: the tensors that wait, and where the ranks that they wait for stand."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

Key: TypeAlias = tuple[int, str]

SAME_SECONDS = 1.0
"""Ranks that fell silent within this time of each other are reported together."""


class Waiting(NamedTuple):
    """A tensor that only some members submitted: since when, in seconds of ``time.monotonic()``, and which did not.

    ``silent``: the missing ranks have not submitted anything else since then, either.
    """

    since: float
    missing: tuple[int, ...]
    submitted: tuple[int, ...]
    silent: bool = False


Pending: TypeAlias = Mapping[Key, Waiting]
"""(Process set, name) -> the ranks that it waits for."""


def stalled_join(join: Waiting, heard: Mapping[int, float], waiting: Collection[int]) -> Waiting | None:
    """The ranks that may stall ``join``, a join that is not over; None if no rank does.

    Ranks that have joined wait as long as the others have data. So the wait for a missing rank begins with its last
    message (``heard``: rank -> time). A rank in ``waiting`` stalls nothing: one of its tensors waits for another rank.
    """
    since = {rank: max(join.since, heard.get(rank, join.since)) for rank in join.missing if rank not in waiting}
    if not since:
        return None
    first = min(since.values())
    silent = tuple(rank for rank, last in since.items() if last <= first + SAME_SECONDS)
    return Waiting(first, silent, join.submitted, silent=True)


COMPUTING_SHARE = 0.1
"""A thread that uses a processor for this part of the time computes. Threads that sleep use less than a thousandth."""
SHOWN_CALLS = 3
SHOWN_CHARACTERS = 100


class Activity(Enum):
    """The activity of the thread of a rank that calls collectives."""

    WAITS = "waits"
    """It waits for other ranks, in a collective."""
    COMPUTES = "computes"
    BLOCKED = "blocked"
    """It sleeps, or waits in a call for something else than a collective."""
    ENDED = "ended"
    """The process goes on without it."""
    UNKNOWN = "unknown"
    """The process runs, but could not find out."""


class CallInFlight(NamedTuple):
    """A collective that a rank submitted ``seconds`` ago."""

    name: str
    process_set: int
    seconds: float


class Frame(NamedTuple):
    """A function on the stack, in ``file``. It was at the lines ``first`` to ``last``; ``source`` is the last one."""

    file: str
    first: int
    last: int
    function: str
    source: str


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Worker to coordinator: where ``rank`` stands; the answer to a :class:`collectives.controller.messages.Locate`.

    ``thread`` is the name of the thread that calls collectives, and ``busy`` the part of the time, 0 to 1, in which it
    used a processor, where one was free. ``last`` is the collective that the rank submitted last, ``waits`` are those
    that it waits for. ``frames`` are the innermost functions of the user's code, the innermost last. ``is_held``: each
    thread that may call collectives waits in one, so nothing more is submitted before ``waits`` change.
    """

    rank: int
    activity: Activity
    thread: str = "MainThread"
    busy: float = 0.0
    last: CallInFlight | None = None
    waits: tuple[CallInFlight, ...] = ()
    frames: tuple[Frame, ...] = ()
    is_held: bool = False


class ProcessState(NamedTuple):
    """The state of the process ``id`` on this host: a letter of proc(5)."""

    id: int
    letter: str


def activity(is_alive: bool, is_inside: bool, waits: Sequence[CallInFlight], busy: float) -> Activity:
    """The activity of a thread that ``is_inside`` a call of the library, and used a processor for the part ``busy``."""
    if not is_alive:
        return Activity.ENDED
    if is_inside and waits:
        return Activity.WAITS
    return Activity.COMPUTES if busy >= COMPUTING_SHARE else Activity.BLOCKED


def describe(found: RankStatus) -> str:
    """Where a rank stands, for a message: a sentence, then a line for each function."""
    sentences = [f"rank {found.rank} {_DOES[found.activity](found)}", *_last(found)]
    return "\n    ".join([". ".join(sentences), *map(_frame, found.frames)])


def describe_silent(ranks: Sequence[int], processes: Mapping[int, ProcessState]) -> str:
    """Why ``ranks`` give no answer, as far as the state of their processes on this host says."""
    known = [_silent(processes[rank]) for rank in ranks if rank in processes]
    unknown = [] if len(known) == len(ranks) else [_UNKNOWN]
    return "; ".join([*known, *unknown])


_UNKNOWN = "The process is stopped, or one call holds its Python interpreter; look at it"
_STATES = {
    "T": "Process {0} is stopped (state T): by SIGSTOP, or by Ctrl-Z in its shell; `kill -CONT {0}` lets it go on",
    "t": "Process {0} is stopped by a debugger (state t)",
    "D": "Process {0} waits for a disk or a network file system (state D)",
    "R": "Process {0} runs (state R), but one call of a library may hold its Python interpreter; see py-spy",
    "S": "Process {0} sleeps (state S), in a call of a library that may hold its Python interpreter; see py-spy",
    "Z": "Process {0} has ended (state Z)",
}


def _silent(process: ProcessState) -> str:
    return _STATES.get(process.letter, f"Process {{0}} is in state {process.letter}").format(process.id)


def _thread(found: RankStatus) -> str:
    return "its main thread" if found.thread == "MainThread" else f"its thread {found.thread!r}"


def _waits(found: RankStatus) -> str:
    return f"waits itself, for {_calls(found)}"


def _calls(found: RankStatus) -> str:
    return " and ".join(map(_call, found.waits[:SHOWN_CALLS]))


def _computes(found: RankStatus) -> str:
    share = f"{found.busy:.0%} of the time that it gets"
    return f"computes, perhaps in an endless loop: {_thread(found)} uses a processor for {share}"


def _blocked(found: RankStatus) -> str:
    if found.waits:
        where = "is in another call, such as a step of a graph in fit(), or a sleep"
        return f"needs other ranks itself, for {_calls(found)}; {_thread(found)} {where}"
    return f"is blocked in a call that is not a collective, such as a sleep: {_thread(found)} uses no processor"


def _ended(found: RankStatus) -> str:
    return f"will submit nothing more: {_thread(found)} has ended, but another thread keeps its process"


def _unknown(_: RankStatus) -> str:
    return "runs, and could not find out where it stands: its log says why"


_DOES = {
    Activity.WAITS: _waits,
    Activity.COMPUTES: _computes,
    Activity.BLOCKED: _blocked,
    Activity.ENDED: _ended,
    Activity.UNKNOWN: _unknown,
}


def _last(found: RankStatus) -> list[str]:
    if found.activity is Activity.WAITS or (found.activity is Activity.BLOCKED and found.waits):
        return []
    return ["It has submitted nothing yet" if found.last is None else f"Its last collective is {_call(found.last)}"]


def _call(call: CallInFlight) -> str:
    where = f" on process set {call.process_set}" if call.process_set else ""
    return f"{cut(call.name)!r}{where}, submitted {call.seconds:.0f} s ago"


def _frame(frame: Frame) -> str:
    lines = f"{frame.first}" if frame.first == frame.last else f"{frame.first}-{frame.last}"
    source = f": {cut(frame.source)}" if frame.source else ""
    return f"{frame.file}:{lines} in {frame.function}{source}"


def cut(text: str) -> str:
    """``text``, or its beginning where it is long."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
