"""A command, or a function and its results back, on the workers of a job of hosts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from executors.agents.hosts.job import START_TIMEOUT_SECONDS, HostsJob, HostsOptions
from executors.agents.local.job import CommandProgram, FunctionProgram
from executors.agents.local.processes import passed_on
from executors.agents.local.python import search_path
from executors.agents.local.work import CallWork, CommandWork
from executors.job.arguments import resolve_seconds
from executors.membership import Limits


def run_command(command: Sequence[str], limits: Limits, options: HostsOptions) -> None:
    """Run ``command`` on workers within ``limits``; return when all of them ended with exit code 0.

    In a static job, a worker that ends otherwise ends the others. Raises WorkerError for the likeliest cause, see
    :class:`executors.driver.driver.Driver`; CommandNotFoundError before anything is started, StartTimeoutError,
    ExecutorError for too few workers, and OSError if a process or an output file cannot be made. In the main thread,
    SIGUSR1, SIGUSR2 and SIGHUP are passed on to the workers that have a handler, until all have ended; raises
    SystemExit where SIGHUP ended a worker.
    """
    work = CommandWork(tuple(command))
    work.check(options.environment)
    job = HostsJob(limits, options, work, CommandProgram())
    with passed_on(job.pass_on), job:
        job.run()


def resolve_start_timeout(seconds: float | None) -> float:
    """``seconds``, or else HOROVOD_START_TIMEOUT, or else 30. Raises ValueError unless it is a positive number."""
    return resolve_seconds(seconds, "start_timeout", "HOROVOD_START_TIMEOUT", START_TIMEOUT_SECONDS)


def run_function(
    call: bytes, limits: Limits, options: HostsOptions, executable: str | os.PathLike[str] | None = None
) -> list[object]:
    """Run ``call``, of :func:`executors.job.call.pickle_call`, on workers of ``executable`` (this Python).

    Returns the results by rank: in an elastic job, the ranks of the world in which the first worker was done. In a
    static job, a worker that fails ends the others. Raises the exception of the function as itself, with a RemoteError
    as its cause, WorkerError for a worker that died, StartTimeoutError, CommandNotFoundError where there is no such
    Python, ExecutorError for too few workers, and OSError where a process or an output file cannot be made. Of several
    failures it raises the likeliest cause, see :class:`executors.driver.driver.Driver`.
    """
    path = search_path({**os.environ, **options.environment}.get("PYTHONPATH"))
    work = CallWork(call, os.fspath(executable or sys.executable), path)
    work.check(options.environment)
    with HostsJob(limits, options, work, FunctionProgram()) as job:
        job.run()
    return job.values()
