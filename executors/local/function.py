"""A function on worker processes of this host, and its results back."""

from __future__ import annotations

import os
import pickle
import sys

from executors.api import Slot
from executors.local.command import LocalOptions, LocalRun, check_command
from executors.local.crew import Ended, Received
from executors.local.python import call_file, launch_call, search_path
from executors.outcome import Outcome

__all__ = ["TEARDOWN_SECONDS", "run_function"]

# A worker whose function returned may take this long to end: handlers of atexit, threads that are no daemons.
TEARDOWN_SECONDS = 60.0


def run_function(
    call: bytes, size: int, options: LocalOptions, executable: str | os.PathLike[str] | None = None
) -> list[object]:
    """Run ``call``, of :func:`executors.call.pickle_call`, on ``size`` workers of ``executable`` (this Python).

    Returns the results by rank. A worker that fails ends the others. Raises the exception of the function as itself,
    with a RemoteError as its cause, WorkerError for a worker that died, StartTimeoutError, CommandNotFoundError where
    there is no such Python, and OSError where a process or an output file cannot be made. Of several failures it raises
    the likeliest cause, see :meth:`.command.LocalRun.fail`.
    """
    python = os.fspath(executable or sys.executable)
    check_command(python, options.environment)
    outcomes: dict[int, Outcome] = {}
    with call_file(call) as file, LocalRun(size, options) as run:
        for slot in run.slots:
            _launch(run, slot, python, file, options)
        for event in run.events():
            if isinstance(event, Received):
                _receive(run, event, outcomes)
            elif isinstance(event, Ended) and event.rank not in outcomes:
                run.died(event, " before its function returned")
    return [outcomes[rank].unwrap() for rank in range(size)]


def _receive(run: LocalRun, event: Received, outcomes: dict[int, Outcome]) -> None:
    if not event.message:
        run.up(event.rank)
        return
    outcome: Outcome = pickle.loads(event.message)
    outcomes[event.rank] = outcome
    if (error := outcome.exception()) is not None:
        run.fail(error, outcome.rank, outcome.kind)
    elif len(outcomes) == len(run.slots):
        run.crew.after(TEARDOWN_SECONDS, run.crew.end)


def _launch(run: LocalRun, slot: Slot, python: str, file: int, options: LocalOptions) -> None:
    path = search_path({**os.environ, **options.environment}.get("PYTHONPATH"))
    launch_call(
        lambda command, messages, inherited: run.launch(slot, command, {"PYTHONPATH": path}, messages, inherited),
        python,
        file,
    )
