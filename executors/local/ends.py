"""Pure: the end of a worker process -> its failure, in words."""

from __future__ import annotations

import signal

from executors.api import WorkerError
from executors.failure import Failure, kind_of_end
from executors.local.crew import Ended

__all__ = ["TEARDOWN_SECONDS", "died", "ended"]

# A worker whose function returned may take this long to end: handlers of atexit, threads that are no daemons.
TEARDOWN_SECONDS = 60.0


def ended(code: int, last_lines: tuple[str, ...] = (), what: str = "") -> Failure:
    """The failure of a worker that ended with ``code``; ``what`` is the work that it left undone."""
    return Failure(kind_of_end(code, last_lines), f"{_how(code)}{what}", code, last_lines)


def died(event: Ended, what: str, host: str, name: str = "", last_lines: tuple[str, ...] = ()) -> WorkerError:
    """The error for a worker that ended unexpectedly, with its last lines; ``what`` is the work that it left undone.

    ``name`` is the readable name of ``host``, if ``host`` is no such name.
    """
    text = f"rank {event.rank} on {name or host} {_how(event.code)}{what}"
    return WorkerError(text, event.rank, host, event.code, last_lines)


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = "; the host may have run out of memory" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({name}{hint})"
