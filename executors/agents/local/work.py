"""How a Python worker of this host gets its call and the modules of this process."""

from __future__ import annotations

import os
import site
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from executors.agents.local.output import Sinks
from executors.agents.local.processes import check_command
from executors.agents.local.supervisor import Supervisor

ZIP = f"python{sys.version_info.major}{sys.version_info.minor}.zip"

LaunchPython = Callable[[Sequence[str], int, tuple[int, ...]], None]


@contextmanager
def call_file(call: bytes) -> Iterator[int]:
    """A file without a name, from which any number of workers read ``call``."""
    with tempfile.TemporaryFile() as file:
        file.write(call)
        file.flush()
        yield file.fileno()


def launch_call(launch: LaunchPython, python: str, file: int, host_name: str = "") -> None:
    """Start a worker that runs the call in ``file``, on a host with the readable name ``host_name``.

    ``launch`` gets the worker's command, the pipe of its messages, and the descriptors that it must inherit.
    """
    reader, writer = os.pipe()
    try:
        launch([python, "-m", "executors.agents.local.task", str(file), str(writer), host_name], reader, (file, writer))
    finally:
        os.close(writer)


def forget_folder() -> None:
    """In a program that ``python -m`` has started: take the working directory out of the search path.

    "-m" puts it before the search path of the driver.
    """
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]


def search_path(own: str | None) -> str:
    """The module folders of this process, for PYTHONPATH, without those that every Python finds; then ``own``."""
    standard = os.path.dirname(os.__file__)
    packages = {*site.getsitepackages(), site.getusersitepackages(), os.path.join(os.path.dirname(standard), ZIP)}
    # An entry that is no file is a mark for a path hook; every Python with the hook makes it for itself.
    files = [entry for entry in sys.path if isinstance(entry, str) and os.path.exists(entry or ".")]
    entries = [os.path.abspath(entry) for entry in files]
    entries = [entry for entry in entries if entry not in packages and not f"{entry}/".startswith(f"{standard}/")]
    return os.pathsep.join(dict.fromkeys(entries + (own.split(os.pathsep) if own else [])))


NOT_STARTED = "could not be started: {}"
"""How a worker failed whose start raised an OSError."""

Launch = Callable[[Supervisor, int, Mapping[str, str], Sinks], None]
"""Starts the worker of a number in a crew, with an environment and a destination for its output. Raises OSError."""


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
        self, descriptors: Sequence[int], crew: Supervisor, number: int, environment: Mapping[str, str], output: Sinks
    ) -> None:
        crew.launch(number, self.command, environment, output, descriptors=descriptors)


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
        crew: Supervisor,
        number: int,
        environment: Mapping[str, str],
        output: Sinks,
    ) -> None:
        path = search_path(environment.get("PYTHONPATH")) if self.path is None else self.path
        given = {**environment, "PYTHONPATH": self.search(path) if self.search else path}
        launch_call(
            lambda command, messages, inherited: crew.launch(
                number, command, given, output, messages, (*inherited, *descriptors)
            ),
            self.python or sys.executable,
            file,
        )
