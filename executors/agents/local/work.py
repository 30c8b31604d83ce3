"""The work of each worker of a job: a command, or a function. It can be pickled, for the agents of other hosts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from executors.agents.local.processes import check_command
from executors.agents.local.supervisor import Supervisor
from executors.agents.local.task import call_file, launch_call, search_path
from executors.job.output import Sinks

NOT_STARTED = "could not be started: {}"
"""How a worker failed whose start raised an OSError."""

Launch = Callable[[Supervisor, int, Mapping[str, str], Sinks], None]
"""Starts the worker of a number in a supervisor, with an environment and a destination for its output. Raises
OSError."""


class WorkerPayload(Protocol):
    """The work of each worker of a job."""

    def check(self, environment: Mapping[str, str]) -> None:
        """Raise CommandNotFoundError if workers, with ``environment`` added to that of this process, cannot start."""

    def opened(self, descriptors: Sequence[int] = ()) -> AbstractContextManager[Launch]:
        """A function that starts the workers of this host, inside of the block; they inherit ``descriptors``."""


@dataclass(frozen=True)
class CommandWork:
    """Every worker runs ``command``."""

    command: tuple[str, ...]

    def check(self, environment: Mapping[str, str]) -> None:
        check_command(self.command[0], environment)

    @contextmanager
    def opened(self, descriptors: Sequence[int] = ()) -> Iterator[Launch]:
        yield partial(self._launch, descriptors)

    def _launch(
        self,
        descriptors: Sequence[int],
        supervisor: Supervisor,
        number: int,
        environment: Mapping[str, str],
        output: Sinks,
    ) -> None:
        supervisor.launch(number, self.command, environment, output, descriptors=descriptors)


@dataclass(frozen=True)
class CallWork:
    """Every worker runs the pickled ``call`` in the Python ``python``, which searches ``path`` for modules.

    None stands for the Python, and the modules, of the process that starts the worker. ``search`` changes the path.
    """

    call: bytes = field(repr=False)
    python: str | None = None
    path: str | None = None
    search: Callable[[str], str] | None = None

    def check(self, environment: Mapping[str, str]) -> None:
        check_command(self.python or sys.executable, environment)

    @contextmanager
    def opened(self, descriptors: Sequence[int] = ()) -> Iterator[Launch]:
        with call_file(self.call) as file:
            yield partial(self._launch, file, descriptors)

    def _launch(
        self,
        file: int,
        descriptors: Sequence[int],
        supervisor: Supervisor,
        number: int,
        environment: Mapping[str, str],
        output: Sinks,
    ) -> None:
        path = search_path(environment.get("PYTHONPATH")) if self.path is None else self.path
        given = {**environment, "PYTHONPATH": self.search(path) if self.search else path}
        launch_call(
            lambda command, messages, inherited: supervisor.launch(
                number, command, given, output, messages, (*inherited, *descriptors)
            ),
            self.python or sys.executable,
            file,
        )
