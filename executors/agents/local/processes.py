"""One worker process of this host, under its guard."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from collectives import descriptors
from executors.api import CommandNotFoundError


def check_command(program: str, environment: Mapping[str, str], host: str = "") -> None:
    """Raise CommandNotFoundError if workers, with ``environment`` added to that of this process, cannot execute
    ``program``. ``host`` is the readable name of this host, if it is not the driver's.
    """
    if shutil.which(program, path={**os.environ, **environment}.get("PATH")) is None:
        where = f" on {host}" if host else ""
        problem = f"there is no command {program!r} that can be executed{where}"
        if program.endswith(".py"):
            raise CommandNotFoundError(f"{problem}; say python {program}")
        raise CommandNotFoundError(f"{problem}; correct its name or PATH")


PASSED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def passed_on(pass_on: Callable[[int], None]) -> AbstractContextManager[None]:
    """Call ``pass_on(number)``, which must not wait, for each of PASSED, as :func:`heeded` does."""
    return heeded(PASSED, pass_on)


@contextmanager
def heeded(numbers: Iterable[int], heed: Callable[[int], object]) -> Iterator[None]:
    """Call ``heed(number)`` for each of the signals ``numbers`` that comes while the main thread is in the block.

    A signal that is ignored stays so, such as SIGHUP under nohup. In another thread, signals are as they were.
    """
    is_main = threading.current_thread() is threading.main_thread()
    found = [number for number in numbers if is_main and signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, lambda number, _: heed(number)) for number in found}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def unheeded(number: int) -> Iterator[None]:
    """Let the signal ``number`` do nothing while the main thread is in the block: a handler that raises could leave
    anything half done. In another thread, and with a handler that is not Python's, signals are as they were.
    """
    is_main = threading.current_thread() is threading.main_thread() and signal.getsignal(number) is not None
    previous = signal.signal(number, lambda number, frame: None) if is_main else None
    try:
        yield
    finally:
        if previous is not None:
            signal.signal(number, previous)


GUARD = Path(__file__).with_name("guard.py")
REAP_SECONDS = 10.0


class WorkerProcess:
    """Starts ``command`` under a guard, which ends it and all processes that it started when this process ends.

    ``stdout``, ``stderr`` and ``report`` are the reading ends of pipes, which the caller closes. The worker inherits
    ``inherited`` and reads ``stdin``. The guard ends with the thread that makes this object: make it in the thread that
    waits for it. Raises OSError where no process can be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        grace: float,
        inherited: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        pipes = [os.pipe() for _ in range(3)]
        self.stdout, self.stderr, self.report = (reader for reader, _ in pipes)
        stdout, stderr, report = (writer for _, writer in pipes)
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), *self._numbers(grace, report), *command],
                env=dict(environment),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                pass_fds=(report, *inherited),
            )
        except BaseException:
            _close(self.stdout, self.stderr, self.report)
            raise
        finally:
            _close(stdout, stderr, report)

    @staticmethod
    def _numbers(grace: float, report: int) -> list[str]:
        return [str(os.getpid()), str(grace), str(report), str(descriptors.first_limit())]

    def terminate(self, number: int = signal.SIGTERM) -> None:
        """Ask the worker to end by ``number``, SIGTERM or SIGINT, then the processes that it started.

        Those left after the time of grace are killed.
        """
        self._guard.send_signal(number)

    def pass_on(self, number: int) -> None:
        """Send the worker ``number``, one of :data:`executors.agents.local.processes.PASSED`."""
        self._guard.send_signal(number)

    def hurry(self) -> None:
        """Kill the worker and all processes that it started now."""
        self._guard.send_signal(signal.SIGQUIT)

    def kill(self) -> None:
        """Kill a guard that does not answer, and with it the worker; processes that the worker started may be left."""
        if self._guard.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._guard.pid, signal.SIGKILL)

    def reap(self) -> int:
        """The exit code of the guard, which has closed its report pipe: it is about to exit."""
        # Bound: REAP_SECONDS. A guard that has closed its report pipe ends within microseconds.
        return self._guard.wait(REAP_SECONDS)


def _close(*descriptors: int) -> None:
    for fd in descriptors:
        os.close(fd)
