"""The actor that holds one rank."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray._private.ray_constants import LOG_PREFIX_ACTOR_NAME

from executors.agents.ray.metrics import export_metrics
from executors.agents.ray.placement.request import RayRequest, actor_options
from executors.agents.ray.worker_log import configure
from executors.api import Slot
from executors.driver.outcome import capture
from executors.job.call import Call
from executors.job.environment import gpu_variables, interface_variables

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Location:
    """The location that Ray gave to a worker; ``node`` is a long id, and messages show only its beginning."""

    node: str
    address: str
    hostname: str
    pid: int
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.hostname} ({self.address}, node {self.node[:8]})"


def here() -> Location:
    """The location of this process, which runs a task or an actor."""
    context = ray.get_runtime_context()
    return Location(
        node=context.get_node_id(),
        address=ray.util.get_node_ip_address(),
        hostname=socket.gethostname(),
        pid=os.getpid(),
        gpus=tuple(context.get_accelerator_ids().get("GPU", ())),
    )


def variables_of(locations: Sequence[Location], nics: Sequence[str]) -> list[dict[str, str]]:
    """The variables that depend on the hosts, for each of ``locations``, which are in the order of the ranks."""
    gpus: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for location in locations:
        gpus[location.node].append(location.gpus)
    return [gpu_variables(gpus[location.node]) | interface_variables(nics) for location in locations]


def server_host(locations: Iterable[Location]) -> str:
    """The address at which the workers at ``locations`` reach a server of this process."""
    own: str = ray.util.get_node_ip_address()
    return LOOPBACK if all(location.address == own for location in locations) else own


class HorovodWorker:
    """One rank: its environment, its executable, and the functions of the user, all in the process's main thread.

    Calls arrive as ``[ObjectRef]``, so that they are unpickled inside of :func:`capture`, in an environment that is
    complete.
    """

    def __init__(self) -> None:
        self._slot: Slot | None = None
        self._host_name = ""
        self._executable: Any = None

    def location(self) -> Location:
        """The location of this worker."""
        return here()

    def prepare(self, slot: Slot, environment: Mapping[str, str]) -> bytes:
        """Take a rank and its environment; comes before any function of the user."""
        self._slot, self._host_name = slot, str(self.location())
        configure(environment)
        if environment.get("HOROVOD_ELASTIC") == "1":
            _forget_handler()
        _name_output(environment.get("HOROVOD_WORKER_ID") or f"rank {slot.rank}")
        return self._capture(lambda: self._enter(environment))

    def _enter(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        export_metrics()

    def build(self, call: list[ObjectRef[Call]]) -> bytes:
        """Make the executable."""
        return self._capture(lambda: self._build(call))

    def run(self, call: list[ObjectRef[Call]]) -> bytes:
        """The outcome of the call."""
        return self._capture(lambda: _run(call))

    def execute(self, call: list[ObjectRef[Call]]) -> bytes:
        """The outcome of the call, which gets the executable as its first argument."""
        return self._capture(lambda: _run(call, self._executable))

    def run_plain(self, call: list[ObjectRef[Call]]) -> Any:
        """The value of the call, for a driver that gets it from Ray itself."""
        return _run(call)

    def _build(self, call: list[ObjectRef[Call]]) -> None:
        self._executable = _run(call)

    def _capture(self, fn: Callable[[], object]) -> bytes:
        if self._slot is None:
            raise RuntimeError("the worker has no rank; prepare() comes first")
        return capture(fn, self._slot.rank, self._slot.host, self._host_name, ray.cloudpickle.dumps)


def actor_class(request: RayRequest) -> Any:
    """HorovodWorker as Ray's class of actors, each with what a worker of ``request`` gets."""
    options = actor_options(request.worker)
    if request.runtime_env is not None:
        options["runtime_env"] = dict(request.runtime_env)
    return ray.remote(**options)(HorovodWorker)


def _run(call: list[ObjectRef[Call]], *first: object) -> Any:
    [reference] = call
    return ray.get(reference)(*first)


def _forget_handler() -> None:
    """Let SIGTERM end this process, as any worker before it can hand over; Ray's handler is not one of the user.

    The actor is for one job, so nothing puts it back.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _name_output(name: str) -> None:
    """Let Ray print ``name`` in front of each line of this process, instead of the name of the actor's class."""
    for stream in (sys.stdout, sys.stderr):
        stream.write(f"{LOG_PREFIX_ACTOR_NAME}{name}\n")
        stream.flush()
