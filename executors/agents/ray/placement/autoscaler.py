"""The autoscaler of the cluster: whether there is one, and the request for the workers that jobs miss.

Ray keeps a request for ever. The actor is detached, needs no CPU, takes back what a killed job wanted, and ends itself
when there is no job any more.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ray
import ray.autoscaler.sdk
from ray import ObjectRef
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get

from collectives import VERSION
from executors.agents.ray.placement.capacity import Cluster, JobDemand, Share, total_demand
from executors.agents.ray.placement.nodes import cluster_now

logger = logging.getLogger(__name__)


# Ray has no public function for this. Its first autoscaler reports here, the second one does not.
STATUS_KEY = "__autoscaling_status"
# The type that the autoscaler names for a node that it has not started. Without a configuration it starts none.
MIRRORED = re.compile(r"node_[0-9a-f]{56}")


def may_grow() -> bool:
    """False where it is sure that no autoscaler adds nodes; True also where Ray does not tell."""
    try:
        return not mirrors(_internal_kv_get(STATUS_KEY))
    except Exception as error:  # noqa: BLE001  a job must not fail because of an unknown report
        logger.debug("the report of the autoscaler could not be read: %r", error)
        return True


def mirrors(status: bytes | None) -> bool:
    """Whether ``status``, the report of the autoscaler, shows that it only mirrors nodes that others start."""
    report = json.loads(status or b"{}").get("autoscaler_report") or {}
    nodes = report.get("active_nodes") or {}
    return bool(nodes) and all(MIRRORED.fullmatch(name) for name in nodes)


# Jobs of another version may describe what they want in another way.
NAME = f"autoscaler-request-{VERSION}"
NAMESPACE = "hvd_cluster"
# From the creation of the actor until its first job; only a job that was killed meanwhile takes longer.
FIRST_CALL_S = 60.0


class AutoscalerRequest:
    """The actor. A job calls :meth:`present` and :meth:`watch`, and then :meth:`want` again and again."""

    def __init__(
        self,
        request: Callable[..., None] = ray.autoscaler.sdk.request_resources,
        cluster: Callable[[], Cluster] = cluster_now,
    ) -> None:
        self._request = request
        self._cluster = cluster
        self._demands: dict[str, JobDemand] = {}
        self._jobs: dict[str, asyncio.Event] = {}
        self._asked: list[tuple[dict[str, float], dict[str, str]]] = []
        # Owner: this actor. Bound: FIRST_CALL_S. Abort: present() cancels it.
        self._unused = threading.Timer(FIRST_CALL_S, self._end)
        self._unused.daemon = True
        self._unused.start()

    async def present(self, job: str) -> None:
        """Return when ``job`` leaves. The reference to the value belongs to its driver, and fails with it."""
        self._unused.cancel()
        await self._jobs.setdefault(job, asyncio.Event()).wait()

    async def watch(self, job: str, value: list[ObjectRef[None]]) -> None:
        """Forget ``job`` when ``value``, the reference that :meth:`present` gave to it, has a value or fails."""
        try:
            with suppress(RayError):
                await value[0]
        finally:
            self._forget(job)

    async def want(self, job: str, demand: JobDemand | None) -> None:
        """From now on ``job`` wants this, or nothing. Raises the errors of Ray."""
        if demand is None:
            self._ask_without(job)
        else:
            self._demands[job] = demand
            self._ask()

    async def leave(self, job: str) -> None:
        """``job`` is over. Raises the errors of Ray."""
        if job in self._jobs:
            self._jobs[job].set()
        self._ask_without(job)

    def _forget(self, job: str) -> None:
        self._jobs.pop(job, None)
        try:
            self._ask_without(job)
        finally:
            if not self._jobs:
                self._end()

    def _ask_without(self, job: str) -> None:
        self._demands.pop(job, None)
        self._ask()

    def _ask(self) -> None:
        demands = list(self._demands.values())
        wanted = total_demand(demands, self._cluster()) if demands else []
        if wanted == self._asked:
            return
        selectors = [labels for _, labels in wanted]
        more = {"bundle_label_selectors": selectors} if any(selectors) else {}
        self._request(bundles=[bundle for bundle, _ in wanted], **more)
        self._asked = wanted

    def _end(self) -> None:
        ray.kill(ray.get_runtime_context().current_actor)


def join_request(job: str) -> Any:
    """The handle of the actor of the cluster, which knows ``job`` then."""
    actor_class: Any = ray.remote(num_cpus=0)(AutoscalerRequest)
    actor = actor_class.options(
        name=NAME, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, scheduling_strategy="DEFAULT"
    ).remote()
    actor.watch.remote(job, [actor.present.remote(job)])
    return actor


LEAVE_S = 5.0


class Demand:
    """Asks for ``wanted`` workers with ``need`` each while there are fewer.

    ``labels`` are those that a node must have, as in Ray's label selectors. ``join`` returns the actor that asks for
    all jobs of the cluster. It forgets the job when this process ends.
    """

    def __init__(
        self,
        wanted: int,
        need: Mapping[str, float],
        labels: Mapping[str, str],
        join: Callable[[str], Any] = join_request,
    ) -> None:
        self._wanted = wanted
        self._need = dict(need)
        self._labels = dict(labels)
        self._join = join
        self._job = uuid.uuid4().hex
        self._actor: Any = None
        self._last: ObjectRef[None] | None = None
        self._is_asking = False
        self._problem = ""

    def update(self, shares: Mapping[str, Share]) -> None:
        """Ask for the missing workers, or for none. A failure is logged, and tried again at the next call."""
        workers = {node: share.workers for node, share in shares.items() if share.workers}
        is_missing = sum(workers.values()) < self._wanted
        try:
            self._check_last()
            if is_missing or self._is_asking:
                self._actor = self._actor or self._join(self._job)
                demand = JobDemand(self._wanted, self._need, self._labels, workers) if is_missing else None
                self._last = self._actor.want.remote(self._job, demand)
            self._is_asking = is_missing
        except Exception as error:  # noqa: BLE001  the autoscaler only helps
            self._actor = self._last = None
            self._warn(f"the autoscaler could not be asked for {self._wanted} workers: {error}")

    def withdraw(self) -> None:
        """Want nothing any more. A failure is logged."""
        if self._actor is None:
            return
        try:
            # Bound: LEAVE_S; abort: the end of the cluster.
            ray.get(self._actor.leave.remote(self._job), timeout=LEAVE_S)
        except Exception as error:  # noqa: BLE001  the cluster may be gone
            self._warn(f"the request to the autoscaler could not be withdrawn: {error}")
        self._actor = self._last = None

    def _check_last(self) -> None:
        """Raise the error of the last call, if it is over."""
        if self._last is not None and ray.wait([self._last], timeout=0)[0]:
            ray.get(self._last)

    def _warn(self, problem: str) -> None:
        if problem != self._problem:
            logger.warning("%s", problem)
        self._problem = problem
