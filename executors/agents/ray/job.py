"""One running job: its placement group, its actors and its rendezvous server."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ray import ObjectRef
from ray.actor import ActorHandle

from executors.agents.ray.call_on_ranks import TICK_S, CallOnRanks, Send
from executors.agents.ray.connection import WorkerLife
from executors.agents.ray.group import JobActor, dismiss, kill, launch
from executors.agents.ray.placement.request import RayRequest
from executors.agents.ray.placement.reservation import reserve
from executors.agents.ray.settings import MiniSettings
from executors.agents.ray.worker import HorovodWorker, server_host, variables_of
from executors.agents.ray.worker_log import Callback, listen
from executors.api import PlacementError, counted
from executors.dashboard.dashboard import Dashboard
from executors.job.call import Call
from executors.job.environment import Course
from executors.job.job import Job

LOG_TICK_S = 0.2


class RayJob:
    """Actors with ranks and an environment, in the order of their ranks; the constructor starts them.

    It raises PlacementError when they do not fit, StartTimeoutError when they do not come up in time, WorkerError when
    one of them dies, and ExecutorError when they cannot start; then nothing is left behind.
    """

    def __init__(
        self,
        request: RayRequest,
        settings: MiniSettings,
        use_current_group: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._life = WorkerLife(self._release)
        self._members: list[JobActor] = []
        with ExitStack() as stack:
            self._resources = stack
            course = self._start(request, settings, use_current_group)
            self._server = stack.enter_context(
                Job(request.size, server_host(member.location for member in self._members), course=course)
            )
            self._dashboard = stack.enter_context(Dashboard(self._server, settings.dashboard, "hvd_cluster"))
            self._prepare(settings, variables or {})
            self._resources = stack.pop_all()

    @property
    def actors(self) -> list[ActorHandle[HorovodWorker]]:
        """Those of the workers, by rank."""
        return [member.actor for member in self._members]

    def call(
        self, method: str, call: ObjectRef[Call], ranks: int | None = None, callbacks: Sequence[Callback] = ()
    ) -> list[object]:
        """The values of ``method`` ("run", "execute" or "build") for ``call``, on the first ``ranks`` ranks.

        ``callbacks`` get what the workers log meanwhile. Raises the exception of a worker as itself, and WorkerError
        when a worker died. When a worker died, did not return soon after another one raised, or the wait was
        interrupted, all workers are killed, and :meth:`check` raises from then on.
        """
        return self._gather(self._members[:ranks], lambda member, _: _call(member, method, call), callbacks)

    def submit(self, call: ObjectRef[Call]) -> list[ObjectRef[Any]]:
        """References to the values of ``call`` by rank."""
        return [_call(member, "run_plain", call) for member in self._members]

    def check(self) -> None:
        """Raise ExecutorError if the workers have ended; call this before sending anything to them."""
        self._life.check()

    def close(self) -> None:
        """End the workers, first by a request, then by a kill, and release all resources. May be called twice."""
        if not self._life.is_over:
            self._life.if_connected(dismiss, self.actors)
        self._life.end("they were shut down")

    def _release(self) -> None:
        self._resources.close()

    def _start(self, request: RayRequest, settings: MiniSettings, use_current_group: bool) -> Course:
        requested = time.time()
        reservation = reserve(request, settings.placement_group_timeout_s, use_current_group)
        self._resources.callback(self._life.if_connected, reservation.release)
        placed = time.time()
        self._members = launch(reservation, settings.timeout_s)
        self._resources.callback(self._life.if_connected, kill, self.actors)
        _check_spread(request, self._members)
        reservation.await_reaper(settings.timeout_s)
        return Course(requested, placed)

    def _prepare(self, settings: MiniSettings, variables: Mapping[str, str]) -> None:
        given = {**self._dashboard.variables(), **variables}
        placed = variables_of([member.location for member in self._members], settings.nics)

        def send(member: JobActor, place: Mapping[str, str]) -> ObjectRef[bytes]:
            own = {**placed[member.slot.rank], **place, **given}
            reference: ObjectRef[bytes] = member.actor.prepare.remote(member.slot, own)
            return reference

        self._gather(self._members, send, timeout=settings.timeout_s)

    def _gather(
        self, members: Sequence[JobActor], send: Send, callbacks: Sequence[Callback] = (), timeout: float = math.inf
    ) -> list[object]:
        gathering = CallOnRanks(members, send, self._server, timeout)
        stop = listen(self._server, gathering.soon, callbacks)
        try:
            gathering.wait(LOG_TICK_S if callbacks else TICK_S)
        except BaseException as error:
            self._life.end(f"{type(error).__name__} interrupted the wait for its workers")
            raise
        finally:
            stop()
        if not gathering.complete:
            self._life.end(gathering.summary)
        return gathering.values()


def _call(member: JobActor, method: str, call: ObjectRef[Call]) -> ObjectRef[Any]:
    reference: ObjectRef[Any] = getattr(member.actor, method).remote([call])
    return reference


def _check_spread(request: RayRequest, members: Sequence[JobActor]) -> None:
    counts = Counter(member.location.node for member in members)
    names = {member.location.node: member.location for member in members}
    if request.num_hosts and set(counts.values()) != {request.num_workers_per_host}:
        found = ", ".join(f"{count} on {names[node]}" for node, count in counts.items())
        hosts, workers = counted(request.num_hosts, "host"), counted(request.num_workers_per_host or 1, "worker")
        raise PlacementError(
            f"{hosts} with {workers} each were asked for, but the current placement group put {found}; make a group "
            "with one bundle per host and the strategy STRICT_SPREAD, or set use_current_placement_group=False"
        )
