"""Which hosts a job may use: found once, or again and again while the job runs."""

from __future__ import annotations

import logging
import os
import re
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from ipaddress import IPv6Address
from types import TracebackType
from typing import Protocol

from collectives import descriptors
from executors.api import ExecutorError

logger = logging.getLogger(__name__)


NAME = r"(?:\w[\w.-]*@)?\w[\w.-]*"
"""The pattern of a host name, which may have a user before it."""
HOST_AND_SLOTS = re.compile(rf"({NAME}):([1-9]\d{{0,5}})", re.ASCII)
HOST_FILE_LINE = re.compile(rf"({NAME})(?:\s+slots\s*=\s*|:)([1-9]\d{{0,5}})(?:\s.*)?", re.ASCII)
DASH = re.compile(r"-|[^@\s]*@-")
DASH_PROBLEM = "; a host name must not begin with '-': ssh would take it for an option"


def parse_host_list(text: str) -> dict[str, int]:
    """The slots of each host in ``text``, such as ``a:2,b:4``. Raises ValueError."""
    entries = [entry.strip() for entry in text.split(",")]
    return _unique(_parse(entry, HOST_AND_SLOTS, "host:slots") for entry in entries)


def parse_host_file(text: str) -> dict[str, int]:
    """The slots of each host in lines ``host slots=2`` or ``host:2`` of ``text``; ``#`` begins a comment.

    Raises ValueError for another line, for a host that is named twice, and for no host at all.
    """
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    found = _unique(_parse(line, HOST_FILE_LINE, "a line such as node1 slots=4") for line in lines if line)
    if not found:
        raise ValueError("it names no host; write a line such as node1 slots=4 for each")
    return found


def dash_problem(entry: str) -> str:
    """The end of an error about ``entry``, if its host name begins with a dash; else nothing."""
    return DASH_PROBLEM if DASH.match(entry) else ""


def check_names(hosts: Iterable[str]) -> None:
    """Raise ValueError for a host name that ssh would take for an option, such as one of a batch system."""
    for name in hosts:
        if dash_problem(name):
            raise ValueError(f"{name!r} is not the name of a host{DASH_PROBLEM}")


def slots_for(size: int, hosts: Mapping[str, int]) -> dict[str, int]:
    """The slots of ``hosts`` that ``size`` ranks take, from the first one on. Raises ValueError if there are fewer."""
    total = sum(hosts.values())
    if total < size:
        text = ", ".join(f"{name}:{count}" for name, count in hosts.items())
        advice = "start fewer, or name hosts with more slots (-H, hosts)"
        raise ValueError(f"{size} processes need {size} slots, but the hosts have {total} ({text}); {advice}")
    taken: dict[str, int] = {}
    for name, count in hosts.items():
        taken[name] = min(count, size - sum(taken.values()))
    return {name: count for name, count in taken.items() if count}


def _parse(entry: str, pattern: re.Pattern[str], allowed: str) -> tuple[str, int]:
    match = pattern.fullmatch(entry)
    if match is None:
        raise ValueError(f"{entry!r} is not {allowed}{dash_problem(entry)}")
    return match[1], int(match[2])


def _unique(entries: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, count in entries:
        if name in found:
            raise ValueError(f"host {name!r} is named twice; name each host once, with all of its slots")
        found[name] = count
    return found


SCRIPT_SECONDS = 30.0
INTERVAL_SECONDS = 1.0
LEAVE_SECONDS = 5.0
SHOWN_BYTES = 200
READ_BYTES = 1 << 16
MOST_BYTES = 4 << 20
"""The longest output, enough for some 100,000 hosts. An endless script must not fill the memory of the driver."""
LINE = re.compile(rf"(?:(?P<name>{NAME})|\[(?P<address>[^]]+)])(?::(?P<slots>\d{{1,6}}))?", re.ASCII)
FORM = "host:slots, such as node1:4 or [fd00::1]:4"


class DiscoveryError(ExecutorError):
    """The hosts could not be found out."""


class HostDiscovery(Protocol):
    """Finds the hosts that a job may use now."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """How many workers each host may have. Raises DiscoveryError; the hosts then stay as they were."""


class FixedHosts:
    """The same hosts until :meth:`set` gives others."""

    def __init__(self, slots: Mapping[str, int]) -> None:
        self._slots = dict(slots)

    def set(self, slots: Mapping[str, int]) -> None:
        """From now on these hosts, each with its slots; from any thread."""
        self._slots = dict(slots)

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        return self._slots


class HostDiscoveryScript:
    """Runs the program ``script``, which prints a line ``host:slots`` or ``host`` for each host.

    A host without a number has ``slots`` slots. The program has ``seconds`` seconds; then it is killed, with all
    processes of its group. ``script`` may also be a line for the shell.
    """

    def __init__(self, script: str, slots: int | None = None, seconds: float = SCRIPT_SECONDS) -> None:
        self._script = script
        self._slots = slots
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        return parse_hosts(self._output(), self._slots, f"the host discovery script {self._script!r}")

    def close(self) -> None:
        """Kill the program if it runs, now or later; from any thread."""
        self._is_closed = True
        process = self._process
        if process is not None:
            _kill(process)

    def _output(self) -> str:
        try:
            process = self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise self._error(f"cannot be run ({error.strerror})") from error
        if self._is_closed:
            _kill(process)
        with process:
            try:
                output, errors = self._read(process)
            except BaseException:
                _kill(process)
                raise
            finally:
                self._process = None
        if process.returncode:
            said = errors.decode("utf-8", "replace").strip()[-SHOWN_BYTES:]
            raise self._error(f"{_how(process.returncode)}" + (f": {said}" if said else ""))
        return output.decode("utf-8", "replace")

    def _read(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        """All that it prints, and the end of its errors, once it has ended."""
        # Bound: the seconds given; abort: close() kills the script.
        deadline = time.monotonic() + self._seconds
        assert process.stdout is not None
        assert process.stderr is not None
        output, errors = bytearray(), bytearray()
        with selectors.PollSelector() as selector:
            for stream, found in ((process.stdout, output), (process.stderr, errors)):
                selector.register(stream, selectors.EVENT_READ, found)
            while selector.get_map():
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    data = os.read(key.fd, READ_BYTES)
                    key.data.extend(data)
                    if not data:
                        selector.unregister(key.fileobj)
                self._check(len(output), deadline)
                del errors[:-SHOWN_BYTES]
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise self._late() from None
        return bytes(output), bytes(errors)

    def _check(self, size: int, deadline: float) -> None:
        if size > MOST_BYTES:
            raise self._error(f"printed more than {MOST_BYTES >> 20} MiB, and was killed; it shall print {FORM}")
        if time.monotonic() >= deadline:
            raise self._late()

    def _late(self) -> DiscoveryError:
        return self._error(f"did not end within {self._seconds:g} s, and was killed")

    def _command(self) -> list[str]:
        """A file is run as the shell would, so also without a first line that names its interpreter."""
        is_program = os.path.isfile(self._script) and os.access(self._script, os.X_OK)
        limit = f"ulimit -Sn {descriptors.first_limit()}; " if descriptors.is_raised() else ""
        line = '"$0"' if is_program else self._script
        return ["sh", "-c", limit + line, *([os.path.abspath(self._script)] if is_program else [])]

    def _error(self, text: str) -> DiscoveryError:
        return DiscoveryError(f"the host discovery script {self._script!r} {text}; run it by hand to see why")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the group of ``process``, which leads it; processes that it has left behind count, too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _how(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"


def parse_hosts(text: str, slots: int | None, source: str) -> dict[str, int]:
    """The slots of each host in lines of ``text``; ``slots`` for a host without a number.

    An IPv6 address is in brackets. Raises DiscoveryError, which names ``source``, for any other line, and for a host
    that is named twice.
    """
    hosts: dict[str, int] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        host, count = _parse_host(line, slots, source)
        if host in hosts:
            raise DiscoveryError(f"{source} names host {host!r} twice; name each host once, with all of its slots")
        hosts[host] = count
    return hosts


def _parse_host(line: str, slots: int | None, source: str) -> tuple[str, int]:
    match = LINE.fullmatch(line)
    host = "" if match is None else match["name"] or _address(match["address"])
    count = None if match is None or match["slots"] is None else int(match["slots"])
    if not host or count == 0:
        text = f"{source} gave the line {line[:SHOWN_BYTES]!r}; each line must be {FORM}"
        raise DiscoveryError(f"{text}{dash_problem(line)}")
    if count is None and slots is None:
        raise DiscoveryError(f"{source} gave {line!r} without slots; print {line}:4, or set --slots-per-host")
    return host, count or slots or 1


def _address(text: str) -> str:
    """``text`` if it is an IPv6 address, else nothing."""
    try:
        IPv6Address(text)
    except ValueError:
        return ""
    return text


class HostWatch:
    """Finds the hosts again every ``interval`` seconds, or ``rest`` times what that took, if longer: a context manager.

    ``found`` gets them in the loop of the driver, by ``soon``, when they have changed. The first time is when the block
    is entered, and raises DiscoveryError; later errors are logged once, and the hosts stay as they were. Owns the
    daemon thread "hvd-discovery", which ends with the block: a discovery that runs then is closed, if it can be.
    """

    def __init__(
        self,
        discovery: HostDiscovery,
        found: Callable[[Mapping[str, int]], None],
        soon: Callable[[Callable[[], None]], None],
        interval: float = INTERVAL_SECONDS,
        rest: float = 0.0,
    ) -> None:
        self._discovery = discovery
        self._found = found
        self._soon = soon
        self._interval = interval
        self._rest = rest
        self._hosts: Mapping[str, int] = {}
        self._problem = ""
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # Held while `soon` is called, so that no call comes after the block.
        self._thread = threading.Thread(target=self._run, name="hvd-discovery", daemon=True)

    def __enter__(self) -> HostWatch:
        self._hosts = dict(self._discovery.find_available_hosts_and_slots())
        self._found(self._hosts)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._stopped.set()
        # Bound: LEAVE_SECONDS; a discovery of the user that runs longer is left behind.
        if isinstance(self._discovery, HostDiscoveryScript):
            self._discovery.close()
        self._thread.join(LEAVE_SECONDS)

    def _run(self) -> None:
        took = 0.0
        while not self._stopped.wait(max(self._interval, self._rest * took)):
            began = time.monotonic()
            try:
                hosts = dict(self._discovery.find_available_hosts_and_slots())
            except Exception as error:  # noqa: BLE001  a discovery of the user may raise anything
                if not self._stopped.is_set():
                    self._warn(str(error))
                continue
            finally:
                took = time.monotonic() - began
            self._problem = ""
            self._tell(hosts)

    def _warn(self, problem: str) -> None:
        if problem != self._problem:
            logger.warning("%s; the job keeps the hosts that it has", problem)
        self._problem = problem

    def _tell(self, hosts: Mapping[str, int]) -> None:
        if hosts == self._hosts:
            return
        self._hosts = hosts
        with self._lock:
            if not self._stopped.is_set():
                self._soon(lambda: self._found(hosts))
