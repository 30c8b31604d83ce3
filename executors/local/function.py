"""A function on worker processes of this host, and its results back."""

from __future__ import annotations

import os
import pickle
import site
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import cloudpickle

from executors.api import Slot
from executors.arguments import check_arguments
from executors.local.command import LocalOptions, LocalRun, check_command, died
from executors.local.crew import Ended, Received
from executors.outcome import CONSEQUENCES, Outcome

__all__ = ["pickle_call", "run_function"]

CAUSE_SECONDS = 1.0
# A worker whose function returned may take this long to end: handlers of atexit, threads that are no daemons.
TEARDOWN_SECONDS = 60.0
ZIP = f"python{sys.version_info.major}{sys.version_info.minor}.zip"


def pickle_call(
    func: Callable[..., object], args: Sequence[object] | None, kwargs: Mapping[str, object] | None
) -> bytes:
    """The call ``func(*args, **kwargs)`` as bytes. Raises TypeError for what cannot be called or pickled."""
    if not callable(func):
        raise TypeError(f"func must be a function, or something else that can be called, not {func!r}")
    call = (func, *check_arguments(args, kwargs))
    try:
        data: bytes = cloudpickle.dumps(call)
        return data
    except Exception as error:
        culprit = "arguments of function" if _can_be_pickled(func) else "function"
        raise TypeError(
            f"{culprit} {_name(func)} cannot be pickled, so it cannot be sent to the workers ({error}); do not refer "
            "to open files, locks, connections or the like from outside: make them inside the function"
        ) from error


def run_function(
    call: bytes, size: int, options: LocalOptions, executable: str | os.PathLike[str] | None = None
) -> list[object]:
    """Run the ``call`` of :func:`pickle_call` on ``size`` workers of ``executable`` (this Python); results by rank.

    The first worker that fails ends the others. Raises the exception of the function as itself, with a RemoteError as
    its cause, WorkerError for a worker that died, StartTimeoutError, CommandNotFoundError where there is no such
    Python, and OSError where a process or an output file cannot be made.
    """
    python = os.fspath(executable or sys.executable)
    check_command(python, options)
    outcomes: dict[int, Outcome] = {}
    with _anonymous_file(call) as file, LocalRun(size, options) as run:
        for slot in run.slots:
            _launch(run, slot, python, file, options)
        for event in run.events():
            if isinstance(event, Received):
                _receive(run, event, outcomes)
            elif isinstance(event, Ended) and event.rank not in outcomes:
                run.fail(died(event, " before its function returned"), event.rank)
    return [outcomes[rank].unwrap() for rank in range(size)]


def _receive(run: LocalRun, event: Received, outcomes: dict[int, Outcome]) -> None:
    if not event.message:
        run.up(event.rank)
        return
    outcome: Outcome = pickle.loads(event.message)
    outcomes[event.rank] = outcome
    if (error := outcome.exception()) is not None:
        _fail(run, event.rank, error)
    elif len(outcomes) == len(run.slots):
        run.crew.after(TEARDOWN_SECONDS, run.crew.end)


def _fail(run: LocalRun, rank: int, error: BaseException) -> None:
    if isinstance(error, CONSEQUENCES):
        run.crew.after(CAUSE_SECONDS, lambda: run.fail(error, rank))
    else:
        run.fail(error, rank)


def _launch(run: LocalRun, slot: Slot, executable: str, file: int, options: LocalOptions) -> None:
    reader, writer = os.pipe()
    try:
        command = [executable, "-m", "executors.local.task", str(file), str(writer)]
        environment = {"PYTHONPATH": _search_path({**os.environ, **options.environment}.get("PYTHONPATH"))}
        run.launch(slot, command, environment, reader, (file, writer))
    finally:
        os.close(writer)


@contextmanager
def _anonymous_file(data: bytes) -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        yield file.fileno()


def _search_path(own: str | None) -> str:
    """Where this process finds modules, for PYTHONPATH, without what every Python finds by itself; then ``own``."""
    standard = os.path.dirname(os.__file__)
    packages = {*site.getsitepackages(), site.getusersitepackages(), os.path.join(os.path.dirname(standard), ZIP)}
    # What is no file is a mark for a path hook, which every Python that has the hook makes for itself.
    files = [entry for entry in sys.path if isinstance(entry, str) and os.path.exists(entry or ".")]
    entries = [os.path.abspath(entry) for entry in files]
    entries = [entry for entry in entries if entry not in packages and not f"{entry}/".startswith(f"{standard}/")]
    return os.pathsep.join(dict.fromkeys(entries + (own.split(os.pathsep) if own else [])))


def _can_be_pickled(func: Callable[..., object]) -> bool:
    try:
        cloudpickle.dumps(func)
    except Exception:  # noqa: BLE001  pickling runs code of the user
        return False
    return True


def _name(func: Callable[..., object]) -> str:
    return f"{getattr(func, '__module__', '?')}.{getattr(func, '__qualname__', repr(func))}"
