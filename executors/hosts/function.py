"""A function on worker processes of this host, and its results back."""

from __future__ import annotations

import os
import sys

from executors.hosts.job import HostsJob, HostsOptions
from executors.hosts.outcomes import Outcomes
from executors.local.python import search_path
from executors.local.work import CallWork
from executors.membership import Limits

__all__ = ["run_function"]


def run_function(
    call: bytes, limits: Limits, options: HostsOptions, executable: str | os.PathLike[str] | None = None
) -> list[object]:
    """Run ``call``, of :func:`executors.call.pickle_call`, on workers of ``executable`` (this Python).

    Returns the results by rank: in an elastic job, the ranks of the world in which the first worker was done. In a
    static job, a worker that fails ends the others. Raises the exception of the function as itself, with a RemoteError
    as its cause, WorkerError for a worker that died, StartTimeoutError, CommandNotFoundError where there is no such
    Python, ExecutorError for too few workers, and OSError where a process or an output file cannot be made. Of several
    failures it raises the likeliest cause, see :class:`executors.driver.Driver`.
    """
    path = search_path({**os.environ, **options.environment}.get("PYTHONPATH"))
    work = CallWork(call, os.fspath(executable or sys.executable), path)
    work.check(options.environment)
    outcomes = Outcomes()
    with HostsJob(limits, options, work, outcomes) as job:
        job.run()
    return outcomes.values(job.driver.order)
