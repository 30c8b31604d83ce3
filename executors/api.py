"""The vocabulary of the executors: slots, the secret of a job, errors. Imports no sibling.

::

    RuntimeError
    └── ExecutorError
        ├── CommandNotFoundError  there is no such command: correct it; nothing was started
        ├── PlacementError        the workers do not fit: ask for less, or add hosts; also a TimeoutError
        ├── StartTimeoutError     workers did not come up in time
        ├── WorkerError           a worker failed; holds rank, host, exit code or remote traceback
        └── RemoteError           cause of a worker's own exception: its rank and remote traceback as text
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field


def counted(number: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def worker_id(number: int) -> str:
    """The id of worker ``number``, for the life of its process. In a static job, the number is its rank."""
    return f"worker-{number}"


def number_of(worker: str) -> int:
    """The reverse of :func:`worker_id`."""
    return int(worker.rpartition("-")[2])


class ExecutorError(RuntimeError):
    """A job could not be started or carried out."""


class CommandNotFoundError(ExecutorError):
    """The command of the workers does not exist or cannot be executed. Nothing was started."""


class PlacementError(ExecutorError, TimeoutError):
    """The requested workers do not fit the cluster. Nothing was started. Horovod on Ray raises TimeoutError for it."""


class StartTimeoutError(ExecutorError):
    """Workers did not come up within the start timeout."""


class WorkerError(ExecutorError):
    """Worker ``rank`` on ``host`` died.

    ``exit_code`` is negative for a signal, None when unknown. ``last_lines`` are the last lines that the worker wrote
    to standard error, without their ends; empty when unknown.
    """

    def __init__(
        self, message: str, rank: int, host: str, exit_code: int | None = None, last_lines: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.exit_code = exit_code
        self.last_lines = last_lines

    def __reduce__(self) -> tuple[type[WorkerError], tuple[str, int, str, int | None, tuple[str, ...]]]:
        return type(self), (str(self), self.rank, self.host, self.exit_code, self.last_lines)


class RemoteError(ExecutorError):
    """The ``__cause__`` of an exception that a worker raised: where it happened and the traceback there.

    ``host_name`` is the readable name of the host, if ``host`` is no such name.
    """

    def __init__(self, rank: int, host: str, traceback: str, host_name: str = "") -> None:
        super().__init__(f"raised by rank {rank} on {host_name or host}:\n{traceback}")
        self.rank = rank
        self.host = host
        self.traceback = traceback
        self.host_name = host_name or host

    def __reduce__(self) -> tuple[type[RemoteError], tuple[int, str, str, str]]:
        return type(self), (self.rank, self.host, self.traceback, self.host_name)


@dataclass(frozen=True, slots=True)
class Slot:
    """One place for one rank, with all six Horovod coordinates.

    ``host`` is the executor's identity of the host (a host name, a Ray node id), never an address to connect to.
    """

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def environment(self) -> dict[str, str]:
        """The ``HOROVOD_*`` variables that tell a worker its place."""
        return {
            "HOROVOD_HOSTNAME": self.host,
            "HOROVOD_RANK": str(self.rank),
            "HOROVOD_SIZE": str(self.size),
            "HOROVOD_LOCAL_RANK": str(self.local_rank),
            "HOROVOD_LOCAL_SIZE": str(self.local_size),
            "HOROVOD_CROSS_RANK": str(self.cross_rank),
            "HOROVOD_CROSS_SIZE": str(self.cross_size),
        }

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Slot:
        """The slot that :meth:`environment` has described."""
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
        return cls(environment["HOROVOD_HOSTNAME"], *(int(environment[f"HOROVOD_{name}"]) for name in names))


@dataclass(frozen=True, slots=True)
class JobSecret:
    """The per-job secret that signs every rendezvous request. Never logged, never on a command line."""

    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
