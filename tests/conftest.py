"""After every test nothing that it started or opened is left."""

import contextlib
import gc
import glob
import os
import sys
import threading
import time
from functools import partial
from multiprocessing import forkserver, process, resource_tracker, synchronize

import psutil
import pytest
from hypothesis import HealthCheck, settings

from hvd_cluster import horovod
from tests import shared_memory, startup
from tests.startup import sitecustomize  # for this process, before it imports a framework

# For the processes that tests start.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(startup.FOLDER), os.environ.get("PYTHONPATH")]))
# gRPC, which TensorFlow brings, makes a new descriptor at each fork while one of its threads is at work.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Or torch.compile would start processes that stay as long as a rank. torch reads it when it imports its compiler.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

PATIENCE_SECONDS = 20.0

settings.register_profile("any machine", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_finish():
    """The collections of garbage after tests skip what the imports have made: a million objects of the frameworks."""
    gc.set_threshold(*sitecustomize.USUAL)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """Fail a test that leaves something of a kind in LOOK. All of them may take a moment to end.

    ``@pytest.mark.leaves("threads", ...)`` names the kinds that a library keeps on purpose.
    """
    process.current_process()._config["semprefix"] = SEMAPHORES  # a library may have set its own,
    synchronize.SemLock._make_name = staticmethod(NAME_OF_SEMAPHORE)  # and its own function
    kept = {kind for marker in request.node.iter_markers("leaves") for kind in marker.args}
    assert kept <= set(LOOK), f"leaves({', '.join(kept)}): the kinds are {', '.join(LOOK)}"
    kinds = [kind for kind in LOOK if kind not in kept]
    before = {kind: LOOK[kind]() for kind in kinds}
    yield
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := {kind: found for kind in kinds if (found := LOOK[kind]() - before[kind])}:
        if time.monotonic() > deadline:
            pytest.fail(f"the test left behind: {left}")
        gc.collect()
        time.sleep(0.01)
    changed = before.get("environment", set()) - LOOK["environment"]()
    assert not changed, f"the test removed or changed variables: {changed}"


@pytest.fixture
def alias_undone(monkeypatch):
    """The installation of the alias for Horovod that the test makes is undone at its end."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]


@pytest.fixture
def horovod_alias(alias_undone):
    """``import horovod`` gives hvd_cluster, in this process."""
    horovod.install()


def _threads():
    return {thread for thread in threading.enumerate() if not thread.daemon or thread.name.startswith("hvd-")}


def _processes():
    # Multiprocessing keeps these for as long as this process lives.
    own = (resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid)
    found, waiting = set(), _children_of(os.getpid())
    while waiting:
        child = _of(partial(psutil.Process, waiting.pop()))
        found |= {child} - {None}
        # A cluster of Ray that later tests use starts and ends processes whenever it likes.
        waiting += _children_of(child.pid) if child and _of(child.name) != "raylet" else []
    return {child for child in found if child.pid not in own}


def _children_of(pid):
    """Their ids, which the system knows for each thread: to look at all processes of the machine takes milliseconds."""
    found = []
    for path in glob.iglob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError), open(path) as file:
            found += map(int, file.read().split())
    return found


def _of(question):
    try:
        return question()
    except psutil.Error:  # it has ended
        return None


def _descriptors():
    own = (resource_tracker._resource_tracker._fd, forkserver._forkserver._forkserver_alive_fd)
    found = {(int(name), _target(name)) for name in os.listdir("/proc/self/fd")}
    return {(descriptor, target) for descriptor, target in found if target and descriptor not in own}


def _target(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # it was the descriptor of the listing
        return None


# Semaphores of multiprocessing have random names, also those of other jobs on this machine. So this process, and the
# children that multiprocessing starts, which inherit it, get a prefix of their own.
SEMAPHORES = f"/mp-{os.getpid()}"
NAME_OF_SEMAPHORE = synchronize.SemLock._make_name


def _shared_memory():
    """The files, except for those of other jobs."""
    own = f"sem.{SEMAPHORES.removeprefix('/')}-"
    return {name for name in shared_memory.names() if name.startswith(own) or not name.startswith("sem.")}


def _environment():
    return {(key, value) for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}


LOOK = {
    "threads": _threads,
    "processes": _processes,
    "descriptors": _descriptors,
    "shared_memory": _shared_memory,
    "environment": _environment,
}
