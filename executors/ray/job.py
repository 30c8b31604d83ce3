"""One running job: its placement group, its actors and its rendezvous server."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import ray
from ray import ObjectRef

from executors.api import ExecutorError, PlacementError
from executors.call import Call
from executors.environment import gpu_variables, interface_variables
from executors.job import Job
from executors.ray.connection import connection
from executors.ray.group import Member, dismiss, kill, launch
from executors.ray.placement_group import reserve
from executors.ray.request import Request
from executors.ray.settings import MiniSettings
from executors.ray.shortage import counted
from executors.ray.waiting import Gathering

__all__ = ["RayJob"]

LOOPBACK = "127.0.0.1"


class RayJob:
    """Actors with ranks and an environment, in the order of their ranks; the constructor starts them.

    It raises PlacementError when they do not fit, StartTimeoutError when they do not come up in time, WorkerError when
    one of them dies, and ExecutorError when they cannot start; then nothing is left behind.
    """

    def __init__(
        self,
        request: Request,
        settings: MiniSettings,
        use_current_group: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._broken: str | None = None
        self._connection = connection()
        self._members: list[Member] = []
        with ExitStack() as stack:
            self._resources = stack
            self._start(request, settings, use_current_group)
            server = stack.enter_context(Job(request.size, _server_host(self._members)))
            self._prepare(server, settings, variables or {})
            self._resources = stack.pop_all()

    def call(self, method: str, call: ObjectRef[Call], ranks: int | None = None) -> list[object]:
        """The values of ``method`` ("run", "execute" or "build") for ``call``, on the first ``ranks`` ranks.

        Raises the exception of a worker as itself, and WorkerError when a worker died. When a worker died, did not
        return soon after another one raised, or the wait was interrupted, all workers are killed, and :meth:`check`
        raises from then on.
        """
        return self._gather(Gathering(self._send(method, call, ranks)))

    def submit(self, call: ObjectRef[Call]) -> list[ObjectRef[Any]]:
        """References to the values of ``call`` by rank."""
        return list(self._send("run_plain", call))

    def check(self) -> None:
        """Raise ExecutorError if the workers have ended; call this before sending anything to them."""
        if self._connection != connection():
            self._end("ray.shutdown() was called meanwhile")
        if self._broken is not None:
            raise ExecutorError(f"the workers have ended: {self._broken}; call shutdown() and start() again")

    def close(self) -> None:
        """End the workers, first by a request, then by a kill, and release all resources. May be called twice."""
        if self._broken is None:
            self._if_connected(dismiss, [member.actor for member in self._members])
        self._end("they were shut down")

    def _start(self, request: Request, settings: MiniSettings, use_current_group: bool) -> None:
        reservation = reserve(request, settings.placement_group_timeout_s, use_current_group)
        self._resources.callback(self._if_connected, reservation.release)
        self._members = launch(reservation, settings.timeout_s)
        self._resources.callback(self._if_connected, kill, [member.actor for member in self._members])
        _check_spread(request, self._members)
        reservation.await_keeper(settings.timeout_s)

    def _prepare(self, server: Job, settings: MiniSettings, variables: Mapping[str, str]) -> None:
        gpus: dict[str, list[tuple[str, ...]]] = defaultdict(list)
        for member in self._members:
            gpus[member.location.node].append(member.location.gpus)
        calls: dict[ObjectRef[Any], Member] = {}
        for member in self._members:
            placed = gpu_variables(gpus[member.location.node]) | interface_variables(settings.nics)
            environment = {**placed, **server.environment(member.slot), **variables}
            calls[member.actor.prepare.remote(member.slot, environment)] = member
        self._gather(Gathering(calls, settings.timeout_s))

    def _send(self, method: str, call: ObjectRef[Call], ranks: int | None = None) -> dict[ObjectRef[Any], Member]:
        return {getattr(member.actor, method).remote([call]): member for member in self._members[:ranks]}

    def _gather(self, gathering: Gathering) -> list[object]:
        try:
            gathering.wait()
        except BaseException as error:
            self._end(f"{type(error).__name__} interrupted the wait for its workers")
            raise
        if not gathering.complete:
            self._end(gathering.summary)
        return gathering.values()

    def _end(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._resources.close()

    def _if_connected(self, action: Callable[..., None], *args: object) -> None:
        # Actors and placement groups end with their connection, and no other connection knows them.
        if self._connection == connection():
            action(*args)


def _check_spread(request: Request, members: Sequence[Member]) -> None:
    counts = Counter(member.location.node for member in members)
    names = {member.location.node: member.location for member in members}
    if request.num_hosts and set(counts.values()) != {request.num_workers_per_host}:
        found = ", ".join(f"{count} on {names[node]}" for node, count in counts.items())
        hosts, workers = counted(request.num_hosts, "host"), counted(request.num_workers_per_host or 1, "worker")
        raise PlacementError(
            f"{hosts} with {workers} each were asked for, but the current placement group put {found}; make a group "
            "with one bundle per host and the strategy STRICT_SPREAD, or set use_current_placement_group=False"
        )


def _server_host(members: Sequence[Member]) -> str:
    own: str = ray.util.get_node_ip_address()
    return LOOPBACK if all(member.location.address == own for member in members) else own
