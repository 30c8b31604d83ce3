"""The actor that holds one rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef

from executors.api import Slot
from executors.call import Call
from executors.outcome import capture

__all__ = ["HorovodWorker", "Location"]


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
        context = ray.get_runtime_context()
        return Location(
            node=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            gpus=tuple(context.get_accelerator_ids().get("GPU", ())),
        )

    def prepare(self, slot: Slot, environment: Mapping[str, str]) -> bytes:
        """Take a rank and its environment; comes before any function of the user."""
        self._slot, self._host_name = slot, str(self.location())
        return self._capture(lambda: os.environ.update(environment))

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


def _run(call: list[ObjectRef[Call]], *first: object) -> Any:
    [reference] = call
    return ray.get(reference)(*first)
