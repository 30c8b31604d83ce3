"""Pure: the kind of failure that ended a rank, and which of several failures is the cause.

When one rank fails, the others fail because of it, and one of them may end before the rank that is the cause. So a
launcher waits for a moment and compares kinds of failure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from collectives import CollectiveTimeoutError, PeerLostError, RefusedCallError, ShutDownError

T = TypeVar("T")

SHOWN_LINES = 12
CAUSE_SECONDS = 1.0
"""Seconds for which a launcher waits for a likelier cause after the first reported failure."""

# Since Python 3.13 a traceback is coloured where FORCE_COLOR is set.
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# The text of the engine in ranks that ended because another one raised.
RAISED_ELSEWHERE = re.compile(
    r"Horovod has been shut down by rank (\d+)(?: while the tensor was in flight)?: it (raised .*?)"
    r"(?:\. Call hvd\.init\(\) to start again)?$"
)


class FailureKind(IntEnum):
    """A kind of failure of a rank; the smallest of several is the likeliest cause of the others."""

    DEATH = -1
    """The worker died, and it is one that no failure of its functions ends."""
    EXCEPTION = 0
    """An exception of the user's code."""
    SIGNAL = 1
    """A signal ended the process."""
    EXIT = 2
    """The process ended for an unknown reason."""
    REFUSED_CALL = 3
    """Another rank refused a call because of its arguments there."""
    LOST_PEER = 4
    """The rank noticed that another one was gone, or did not answer."""
    SHUT_DOWN = 5
    """Another rank shut Horovod down."""

    @property
    def is_consequence(self) -> bool:
        """Whether the failure of another rank is the cause."""
        return self >= FailureKind.REFUSED_CALL


CONSEQUENCES: dict[type[BaseException], FailureKind] = {
    RefusedCallError: FailureKind.REFUSED_CALL,
    PeerLostError: FailureKind.LOST_PEER,
    CollectiveTimeoutError: FailureKind.LOST_PEER,
    ShutDownError: FailureKind.SHUT_DOWN,
}


def kind_of_error(error: BaseException) -> FailureKind:
    """The kind of an exception that the function of a rank raised."""
    if isinstance(error, SystemExit):
        return FailureKind.EXIT
    return next(
        (kind for error_type, kind in CONSEQUENCES.items() if isinstance(error, error_type)), FailureKind.EXCEPTION
    )


def kind_of_chain(error: BaseException) -> FailureKind:
    """The kind of ``error`` as a traceback shows it: an error of this package anywhere in its chain decides."""
    kinds = [kind for each in _chain(error) if (kind := kind_of_error(each)).is_consequence]
    return min(kinds, default=kind_of_error(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def brief(error: BaseException) -> str:
    """The type and the text of ``error``, also if its ``str()`` fails; without notes, and never empty."""
    name = _type_name(type(error))
    try:
        text = str(error).strip()
    except Exception:  # noqa: BLE001  str() runs code of the user
        text = "<its str() failed>"
    return f"{name}: {text}" if text else name


def _type_name(error: type[BaseException]) -> str:
    """As a traceback shows it."""
    is_plain = error.__module__ in ("builtins", "__main__")
    return error.__qualname__ if is_plain else f"{error.__module__}.{error.__qualname__}"


def raised_elsewhere(last_lines: Sequence[str]) -> tuple[int, str] | None:
    """The rank that raised, and how, by the last lines of a rank that ended because of it; None: they name none."""
    found = [match for line in last_lines if (match := RAISED_ELSEWHERE.search(COLOUR.sub("", line)))]
    return (int(found[-1][1]), found[-1][2]) if found else None


def with_last_lines(text: str, last_lines: Sequence[str]) -> str:
    """``text`` about a failure, and the last of the lines of standard error, if there are some."""
    shown = last_lines[-SHOWN_LINES:]
    return "\n    ".join([f"{text}. The last lines of its standard error:", *shown]) if shown else text


def likeliest(failed: Iterable[T], kind: Callable[[T], FailureKind]) -> T:
    """The cause of those that ``failed``: the likeliest by its ``kind``, the first among several."""
    return min(failed, key=kind)


@dataclass(frozen=True, slots=True)
class Patience:
    """For how many seconds a job waits for the other workers, after an exception and after another failure.

    Meanwhile they may end by themselves, or show a likelier cause. Each failure may shorten the wait. A death ends it.
    """

    exception: float = 0.0
    other: float = CAUSE_SECONDS

    def seconds(self, kind: FailureKind) -> float:
        """The wait after a failure of ``kind``."""
        if kind is FailureKind.DEATH:
            return 0.0
        return self.exception if kind is FailureKind.EXCEPTION else self.other


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a worker that did not do its work. ``text`` says how it ended, such as "ended with exit code 1".

    ``exit_code`` is negative for a signal, None when unknown; ``last_lines`` are those of its standard error.
    ``error`` is the exception of its function, where there is one. Unless it ``has_begun``, it had no process, or none
    that came up in time.
    """

    kind: FailureKind
    text: str
    exit_code: int | None = None
    last_lines: tuple[str, ...] = ()
    error: BaseException | None = None
    has_begun: bool = True
