"""The parent of one worker process: after any kind of end, a job leaves no process behind.

Run as ``python guard.py DRIVER GRACE REPORT LIMIT COMMAND...``: the process id of the driver, the seconds between
asking and killing, a file descriptor for reports, the soft limit of descriptors of the worker, the worker's command.
Imports the standard library only: it starts once per worker, without site packages.

* The guard adopts the processes that the worker leaves behind: no grandchild escapes, even in its own session.
* The kernel sends SIGTERM to the guard when the driver dies, even of SIGKILL, and SIGKILL to the worker when the guard
  dies.
* SIGTERM and SIGINT ask the worker to end, by the same signal. The processes that it started serve it while it ends, so
  they get SIGTERM when it has ended, or in the last tenth of ``GRACE`` seconds. Those left after ``GRACE`` are killed.
  SIGQUIT kills at once. When the worker ends, the guard ends the processes left behind in the same way.
* SIGUSR1, SIGUSR2 and SIGHUP from the driver are passed on to the worker if it has a handler, else to the first of its
  descendants that have one: the worker may be a wrapper. Where there is none, SIGHUP ends the worker, and the others
  are not passed on, as they would end it, too.
* A worker that is a shell shares SIGTERM and SIGINT with the processes that it runs, as one of them is the rank.
* Reports are lines: ``started PID``, ``ended CODE``, where the code is negative for a signal, and ``unheard NUMBER``
  for a signal that was not passed on.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ASKING = (signal.SIGTERM, signal.SIGINT)
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
PASSED = (*NOTICES, signal.SIGHUP)
WAKING = (*ASKING, *PASSED, signal.SIGQUIT, signal.SIGCHLD)
SHELLS = {"sh", "ash", "bash", "busybox", "dash", "ksh", "ksh93", "mksh", "yash", "zsh"}
LAST_PART = 0.1
LAST_SECONDS = 5.0
# Python ignores these signals; the worker gets the kernel's default actions back.
RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)
RETRY_SECONDS = 0.05
BLOCKED_SECONDS = 0.05
UNKILLABLE_SECONDS = 5.0


class Guard:
    """Starts the worker, waits for it, and ends the processes that it leaves behind."""

    def __init__(self, grace: float, report: int, driver: int) -> None:
        self._grace = grace
        self._driver = driver
        self._report = report
        self._worker = 0
        self._deadline: float | None = None
        self._number = signal.SIGTERM
        self._asked: set[int] = set()
        self._interrupted: set[int] = set()

    def run(self, command: list[str]) -> int:
        """Start ``command``; return 0 when no process of it is left, 1 if a process cannot be killed."""
        self._worker = _start(command)
        self._tell(f"started {self._worker}")
        while self._reap() and not self._gives_up():
            if self._worker == 0:
                self._stop()
            if self._deadline is not None:
                self._press()
            # Bound: _pause(); abort: any signal of WAKING.
            received = signal.sigtimedwait(WAKING, self._pause())
            if received is not None:
                self._obey(received.si_signo, received.si_pid)
        return int(self._gives_up())

    def _reap(self) -> bool:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._worker:
                self._ended(os.waitstatus_to_exitcode(status))

    def _ended(self, code: int) -> None:
        self._tell(f"ended {code}")
        self._worker = 0

    def _obey(self, number: int, sender: int) -> None:
        if number in ASKING:
            self._stop(number)
        elif number in PASSED and sender == self._driver:
            # A batch system that signals all processes of a job has signalled the worker itself.
            self._pass_on(number)
        elif number == signal.SIGQUIT:
            self._deadline = min(self._deadline or math.inf, time.monotonic())

    def _stop(self, number: int = signal.SIGTERM) -> None:
        self._number = signal.Signals(number)
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace

    def _press(self) -> None:
        # Again after every wake-up: a process may have started another one before it got the signal.
        if self._patience() > 0.0:
            self._ask()
        else:
            _signal_all(_descendants(), signal.SIGKILL)
            # The kernel makes the children of killed processes ours within a moment; look again soon.
            signal.sigtimedwait((signal.SIGCHLD,), RETRY_SECONDS)

    def _ask(self) -> None:
        is_last = self._patience() <= self._last_seconds
        meant = set(_descendants()) if is_last else set(self._ranks() if self._worker else _children()[os.getpid()])
        if self._number == signal.SIGINT and not is_last:
            interrupted = meant - self._interrupted if self._worker else set()
            self._interrupted |= interrupted
            _signal_all(interrupted, signal.SIGINT)
            meant -= self._interrupted
        newcomers = meant - self._asked
        self._asked |= newcomers
        _signal_all(newcomers, signal.SIGTERM)

    def _ranks(self) -> Iterator[int]:
        """The worker, and the processes that it runs where it is a shell."""
        children, waiting = _children(), [self._worker]
        while waiting:
            pid = waiting.pop()
            yield pid
            if _is_shell(pid):
                waiting.extend(children[pid])

    def _pass_on(self, number: int) -> None:
        hearers = list(self._hearers(number)) if self._worker else []
        if not hearers and number in NOTICES:
            self._tell(f"unheard {number}")
        elif not hearers and self._worker:
            hearers = list(self._ranks())
        _signal_all(hearers, number)

    def _hearers(self, number: int) -> Iterator[int]:
        """The worker if it heeds ``number``, else the first ones below it that do, such as the rank of a shell."""
        children, waiting = _children(), [self._worker]
        while waiting:
            pid = waiting.pop()
            if _heeds(pid, number):
                yield pid
            else:
                waiting.extend(children[pid])

    @property
    def _last_seconds(self) -> float:
        return min(LAST_PART * self._grace, LAST_SECONDS)

    def _pause(self) -> float:
        """The time until the next step."""
        patience = self._patience()
        is_before = self._deadline is not None and patience > self._last_seconds
        return patience - self._last_seconds if is_before else patience

    def _patience(self) -> float:
        if self._deadline is None:
            return 3600.0
        return max(0.0, self._deadline - time.monotonic())

    def _gives_up(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline + UNKILLABLE_SECONDS

    def _tell(self, line: str) -> None:
        try:
            os.write(self._report, f"{line}\n".encode())
        except BrokenPipeError:
            self._stop()


def _start(command: list[str]) -> int:
    """Return when ``command`` runs, with its own mask of signals, or has failed to."""
    guard = os.getpid()
    reader, writer = os.pipe()
    worker = os.fork()
    if worker == 0:
        _become(command, guard)
    os.close(writer)
    os.read(reader, 1)  # Bound: execvp() of the worker closes the other end, and so does its end.
    os.close(reader)
    return worker


def _become(command: list[str], guard: int) -> None:
    code = 127
    try:
        os.setpgid(0, 0)
        _die_with_parent(guard, signal.SIGKILL)
        for number in RESTORED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAKING)
        os.execvp(command[0], command)
    except OSError as error:
        hint = "; if it is there, the interpreter in its first line is not" if error.errno == errno.ENOENT else ""
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}{hint}\n")
        sys.stderr.flush()
        code = 127 if isinstance(error, FileNotFoundError) else 126
    finally:
        os._exit(code)


def _die_with_parent(parent: int, number: int) -> None:
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def _signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        # The process may have ended, or may run as another user.
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _descendants() -> Iterator[int]:
    children = _children()
    waiting = list(children[os.getpid()])
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting.extend(children[pid])


def _children() -> defaultdict[int, list[int]]:
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid, parent in _processes():
        children[parent].append(pid)
    return children


def _is_shell(pid: int) -> bool:
    with suppress(OSError):
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) in SHELLS
    return False


def _heeds(pid: int, number: int) -> bool:
    """Whether it has a handler for ``number``, or blocks it, as a thread that calls ``sigwait()`` needs.

    A process that starts another one blocks all signals for a moment, and a shell also while it waits for a child.
    """
    if _is_in(pid, number, b"SigCgt"):
        return True
    if _is_shell(pid) or not _is_in(pid, number, b"SigBlk"):
        return False
    time.sleep(BLOCKED_SECONDS)
    return _is_in(pid, number, b"SigBlk") or _is_in(pid, number, b"SigCgt")


def _is_in(pid: int, number: int, mask: bytes) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        fields = (line.partition(b":") for line in file)
        return any(int(value, 16) & 1 << number - 1 for name, _, value in fields if name == mask)
    return False


def _processes() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            # A process may end between the listing and the reading. Its name, in parentheses, may hold anything.
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                yield int(name), int(file.read().rpartition(b")")[2].split()[1])


def _limit_descriptors(soft: int) -> None:
    """The driver may have raised its own limit; programs that use select() fail above 1,024."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def main() -> int:
    """Guard the command of the command line; the exit status is about the guard, not about the worker."""
    driver, grace, report, limit = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    _limit_descriptors(limit)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, WAKING)
    os.set_inheritable(report, False)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _die_with_parent(driver, signal.SIGTERM)
    return Guard(grace, report, driver).run(sys.argv[5:])


if __name__ == "__main__":
    sys.exit(main())
