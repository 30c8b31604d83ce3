"""Whole jobs on this host: the same command on each of a number of worker processes."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from collectives.cores import usable_cores
from executors.api import CommandNotFoundError, Slot, StartTimeoutError, WorkerError
from executors.arguments import resolve_seconds
from executors.failure import CAUSE_SECONDS, Kind, kind_of_end
from executors.job import Job
from executors.local.crew import GRACE_SECONDS, Crew, Ended, Event, Started
from executors.local.output import Output, say
from executors.local.tail import Tails
from executors.placement import assign_ranks
from executors.threads import THREADS, thread_variables

__all__ = ["LocalOptions", "LocalRun", "check_command", "died", "resolve_start_timeout", "run_command"]

logger = logging.getLogger(__name__)

HOST = "localhost"
START_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How to run a job on this host.

    ``environment`` is added to that of this process and of the job, and must not set the variables that place a worker.
    The workers have ``start_timeout`` seconds to come up, and ``grace`` seconds between being asked to end and being
    killed. ``output_directory`` and ``timestamp`` are those of :class:`executors.local.output.Output`; ``verbose``
    prints on standard error which process is which rank.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout: float = START_TIMEOUT_SECONDS
    grace: float = GRACE_SECONDS
    output_directory: str | Path | None = None
    timestamp: bool = False
    verbose: bool = False


def run_command(command: Sequence[str], size: int, options: LocalOptions) -> None:
    """Run ``command`` on ``size`` workers; return when all of them ended with exit code 0.

    A worker that ends otherwise ends the others. Raises WorkerError for the likeliest cause, see :meth:`LocalRun.fail`;
    CommandNotFoundError before anything is started, StartTimeoutError, and OSError if a process or an output file
    cannot be made.
    """
    check_command(command[0], options.environment)
    with LocalRun(size, options) as run:
        for slot in run.slots:
            run.launch(slot, command)
        for event in run.events():
            if isinstance(event, Started):
                run.up(event.rank)
            elif isinstance(event, Ended) and event.code != 0:
                run.died(event)


def resolve_start_timeout(seconds: float | None) -> float:
    """``seconds``, or else HOROVOD_START_TIMEOUT, or else 30. Raises ValueError unless it is a positive number."""
    return resolve_seconds(seconds, "start_timeout", "HOROVOD_START_TIMEOUT", START_TIMEOUT_SECONDS)


class LocalRun:
    """One job on this host, from the rendezvous server to the last worker: a context manager.

    A failure ends the other workers. Leaving the block ends the workers that still run, see :class:`.crew.Crew`, and
    raises the failure, if there was one. Of several failures it raises the likeliest cause.
    """

    def __init__(self, size: int, options: LocalOptions) -> None:
        self.slots = assign_ranks([HOST] * size)
        self._options = options
        self._job = Job(size)
        self._output = Output(size, options.output_directory, options.timestamp)
        self._stack = ExitStack()
        self._coming_up = set(range(size))
        self._tails = Tails(self._output)
        self._failures: list[_Failure] = []
        self._is_ending = False
        self._threads = _threads({**os.environ, **options.environment}, size)

    def __enter__(self) -> LocalRun:
        with ExitStack() as stack:
            stack.enter_context(self._job)
            stack.enter_context(self._output)
            self.crew = stack.enter_context(Crew(self._options.grace))
            self._stack = stack.pop_all()
        self.crew.after(self._options.start_timeout, self._check_up)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        # Not in events(): a generator would turn the StopIteration of a worker into a RuntimeError.
        if error is None and self._failures:
            raise self._cause().error

    def launch(
        self,
        slot: Slot,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        messages: int | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Start the worker of ``slot``, with ``environment`` added to that of the options. See :meth:`Crew.launch`."""
        given = {**self._options.environment, **self._threads, **(environment or {})}
        merged = {**os.environ, **self._job.environment(slot), **given}
        self.crew.launch(slot.rank, command, merged, self._tails, messages, descriptors)

    def events(self) -> Iterator[Event]:
        """The events, until every worker has ended."""
        for event in self.crew.events():
            if self._options.verbose and isinstance(event, Started):
                say(f"rank {event.rank} of {len(self.slots)} is process {event.pid} on {HOST}")
            yield event

    def up(self, rank: int) -> None:
        """The worker of ``rank`` came up."""
        self._coming_up.discard(rank)

    def fail(self, error: BaseException, rank: int | None = None, kind: Kind = Kind.EXCEPTION) -> None:
        """The job failed with ``error``: end all workers, ``rank`` last.

        An exception of the user's code ends them at once. Another kind of failure ends them after a moment, in which a
        likelier cause may be reported. Later failures are ignored, because this job ended those workers itself.
        """
        if self._is_ending:
            return
        self._failures.append(_Failure(kind, error, rank))
        if kind is Kind.EXCEPTION:
            self._end()
        else:
            self.crew.after(CAUSE_SECONDS, self._end)

    def died(self, event: Ended, what: str = "") -> None:
        """The job failed because a worker ended unexpectedly; ``what`` is the work that it left undone."""
        lines = self._tails.last_lines(event.rank)
        self.fail(died(event, what, last_lines=lines), event.rank, kind_of_end(event.code, lines))

    def _end(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            self.crew.end(spare=self._cause().rank)

    def _cause(self) -> _Failure:
        return min(self._failures, key=lambda failure: failure.kind)

    def _check_up(self) -> None:
        if self._coming_up:
            missing = ", ".join(map(str, sorted(self._coming_up)))
            error = StartTimeoutError(
                f"of {len(self.slots)} ranks on {HOST}, these did not come up within "
                f"{self._options.start_timeout:g} s: {missing}; raise the start timeout if this host is slow "
                "(start_timeout, --start-timeout or HOROVOD_START_TIMEOUT)"
            )
            self.fail(error)


def _threads(environment: Mapping[str, str], size: int) -> dict[str, str]:
    """The variables that give each rank its share of the cores; the log shows the share.

    A number that the user has set may be too large. The first rank of a host says so, because it knows the framework's.
    """
    cores = usable_cores()
    variables = thread_variables(environment, cores, size)
    if variables:
        text = "%s=%s for each of the %d ranks, its share of %d cores; set the variable to choose another number"
        logger.info(text, THREADS, variables[THREADS], size, cores)
    return variables


@dataclass(frozen=True, slots=True)
class _Failure:
    kind: Kind
    error: BaseException
    rank: int | None


def died(
    event: Ended, what: str = "", host: str = HOST, name: str = "", last_lines: tuple[str, ...] = ()
) -> WorkerError:
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


def check_command(program: str, environment: Mapping[str, str], host: str = "") -> None:
    """Raise CommandNotFoundError if workers, with ``environment`` added to that of this process, cannot execute
    ``program``. ``host`` is the readable name of this host, if it is not the driver's.
    """
    if shutil.which(program, path={**os.environ, **environment}.get("PATH")) is None:
        where = f" on {host}" if host else ""
        raise CommandNotFoundError(
            f"there is no command {program!r} that can be executed{where}; correct its name or PATH"
        )
