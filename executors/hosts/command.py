"""Whole jobs on this host: the same command on each of a number of worker processes."""

from __future__ import annotations

from collections.abc import Sequence

from executors.arguments import resolve_seconds
from executors.failure import Failure
from executors.hosts.job import START_TIMEOUT_SECONDS, HostsJob, HostsOptions
from executors.local.ends import ended
from executors.local.signals import passed_on
from executors.local.work import CommandWork
from executors.membership import Limits

__all__ = ["resolve_start_timeout", "run_command"]


def run_command(command: Sequence[str], limits: Limits, options: HostsOptions) -> None:
    """Run ``command`` on workers within ``limits``; return when all of them ended with exit code 0.

    In a static job, a worker that ends otherwise ends the others. Raises WorkerError for the likeliest cause, see
    :class:`executors.driver.Driver`; CommandNotFoundError before anything is started, StartTimeoutError, ExecutorError
    for too few workers, and OSError if a process or an output file cannot be made. In the main thread, SIGUSR1, SIGUSR2
    and SIGHUP are passed on to the workers; raises SystemExit where one of these ended a worker.
    """
    work = CommandWork(tuple(command))
    work.check(options.environment)
    with HostsJob(limits, options, work, _Command()) as job, passed_on(job.pass_on):
        job.run()


def resolve_start_timeout(seconds: float | None) -> float:
    """``seconds``, or else HOROVOD_START_TIMEOUT, or else 30. Raises ValueError unless it is a positive number."""
    return resolve_seconds(seconds, "start_timeout", "HOROVOD_START_TIMEOUT", START_TIMEOUT_SECONDS)


class _Command:
    def started(self, job: HostsJob, number: int) -> None:
        job.driver.up(f"worker-{number}")

    def received(self, job: HostsJob, number: int, message: bytes) -> None:
        """A command sends none."""

    def failure(self, number: int, code: int, last_lines: tuple[str, ...]) -> Failure | None:
        return None if code == 0 else ended(code, last_lines)

    def has_returned(self, number: int) -> bool:
        return False
