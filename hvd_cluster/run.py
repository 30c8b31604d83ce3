"""``run()``: a function on several processes, from Python."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from executors.arguments import check_variables
from executors.call import Call, pickle_call
from executors.local.command import LocalOptions, resolve_start_timeout
from executors.local.function import run_function

__all__ = ["run"]

T = TypeVar("T")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    start_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    output_filename: str | Path | None = None,
    verbose: bool | int | None = None,
    executable: str | os.PathLike[str] | None = None,
    np: int | None = None,
) -> list[T]:
    """Run ``func(*args, **kwargs)`` on ``num_proc`` processes of this host; return the results by rank.

    The output of the processes appears here, each line after ``[rank]<stdout>:`` or ``[rank]<stderr>:``. The first
    process that fails ends the others.

    Args:
        func: the function; it travels by cloudpickle, so it may be a lambda, a closure or a part of the main script.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of processes, at least 1.
        start_timeout: seconds that the processes may take to come up; None means HOROVOD_START_TIMEOUT, or else 30.
        env: variables to add to the environment of the processes, or to replace in it.
        output_filename: a folder for the files ``rank.<rank>/stdout`` and ``rank.<rank>/stderr``; made if needed.
        verbose: true to see on standard error which process is which rank.
        executable: the Python of the processes; None means this one. It must be able to import hvd_cluster.
        np: old name of ``num_proc``.

    Raises:
        ValueError: an argument has a value that is not allowed; nothing was started.
        TypeError: ``func`` or an argument cannot be called or pickled, as the text says; nothing was started.
        CommandNotFoundError: there is no such ``executable``; nothing was started.
        StartTimeoutError: a process did not come up in time.
        WorkerError: a process died, or called ``sys.exit``, or its result cannot be pickled.
        Exception: an exception of ``func``, as itself; its ``__cause__`` is a RemoteError with rank and traceback.
    """
    options = LocalOptions(
        environment=check_variables(env, "env", "run()"),
        start_timeout=resolve_start_timeout(start_timeout),
        output_directory=output_filename,
        verbose=bool(verbose),
    )
    size = _check_num_proc(num_proc if np is None else _old_name(np, num_proc))
    results = run_function(pickle_call(Call.of(func, args, kwargs)), size, options, executable)
    return cast("list[T]", results)


def _old_name(np: int, num_proc: int) -> int:
    if num_proc != 1:
        raise ValueError(f"num_proc={num_proc!r} and its old name np={np!r} are both given; leave np out")
    warnings.warn("np is the old name of num_proc; use num_proc", DeprecationWarning, stacklevel=3)
    return np


def _check_num_proc(value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"num_proc is {value!r}, but must be an integer of at least 1")
    return value
