"""Traps at named points: a process that comes by one is hit there, by itself, without a delay.

A trap is a file in ``FOLDER/traps``, whose name begins with that of the point. The process that can rename it is hit.
So the product knows nothing of traps: they wrap its functions where a job of a campaign starts.
"""

import functools
import importlib
import json
import os
import resource
import signal
import threading
import time

import psutil

from tests.faults.points import AFTER, BEFORE

FOLDER = "traps"


class InjectedError(RuntimeError):
    """An exception of the user's code."""


class Traps:
    """Those in the way of the process ``name``, which tells in the file ``folder/name`` that it was hit.

    ``round`` returns that of its world.
    """

    def __init__(self, folder, name, round=lambda: -1):
        self._folder, self._name, self._round = folder / FOLDER, name, round
        self._notes = folder / name

    def pass_by(self, point):
        """Be hit if a trap for this process is at ``point``."""
        for path in self._at(point):
            order = self._spring(path)
            if order:
                self._note(hit=order["kind"], point=point)
                HITS[order["kind"]](order)

    def _note(self, **fields):
        note = {**fields, "time": time.monotonic(), "round": self._round(), "pid": os.getpid()}
        with self._notes.open("ab", buffering=0) as file:
            file.write(f"{json.dumps(note)}\n".encode())

    def _at(self, point):
        try:
            return [self._folder / name for name in os.listdir(self._folder) if name.startswith(f"{point}.")]
        except OSError:  # this process has no descriptor left
            return []

    def _spring(self, path):
        """The order of the trap, if it is for this process; two processes never get one."""
        try:
            order = json.loads(path.read_text())
            if self._name in order["spared"]:
                return None
            path.rename(self._folder.parent / f"sprung {path.name}")
        except OSError:  # another process was faster, or this one has no descriptor left
            return None
        return order


def place(folder, point, number, order):
    """Lay a trap at ``point``; the file appears whole."""
    path = folder / FOLDER / f"{point}.{number}"
    path.parent.with_name("next trap").write_text(json.dumps(order))
    path.parent.with_name("next trap").rename(path)


def remove(folder):
    """Remove all traps that have hit nobody; how many they were."""
    left = [*(folder / FOLDER).iterdir()]
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)


def install(traps, points):
    """Let this process pass by ``traps`` at ``points``."""
    for name, point in points.items():
        module, _, attribute = point.place.partition(":")
        *owner, last = attribute.split(".")
        home = functools.reduce(getattr, owner, importlib.import_module(module))
        setattr(home, last, _between(traps, name, getattr(home, last)))


def _between(traps, name, function):
    @functools.wraps(function)
    def wrapped(*arguments, **options):
        traps.pass_by(f"{BEFORE}{name}")
        try:
            return function(*arguments, **options)
        finally:
            traps.pass_by(f"{AFTER}{name}")

    return wrapped


def _signal(number):
    return lambda order: os.kill(os.getpid(), number)


def _raise(error):
    def act(order):
        raise error(f"a trap of the campaign: {order['kind']}")

    return act


def _exhaust(order):
    few = psutil.Process().num_fds()
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _starve(order):
    size = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _step_clock(order):
    """The time of day of this process, but not its monotonic one, is another one from now on."""
    real, real_ns, shift = time.time, time.time_ns, order["shift"]
    time.time, time.time_ns = lambda: real() + shift, lambda: real_ns() + int(shift * 1e9)


HITS = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "drain": _signal(signal.SIGTERM),
    "guard": lambda order: os.kill(os.getppid(), signal.SIGKILL),
    "memory": _raise(MemoryError),
    "error": _raise(InjectedError),
    "exhaust": _exhaust,
    "starve": _starve,
    "clock": _step_clock,
}

_lock = threading.Lock()  # held for a few instructions: an actor of Ray may run two functions
_installed = []


def install_once(traps, points):
    """As :func:`install`, unless this process has traps already."""
    with _lock:
        if not _installed:
            _installed.append(traps)
            install(traps, points)
