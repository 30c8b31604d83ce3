"""The request to the autoscaler: a cluster has one, which each call replaces, so one actor makes it for all jobs.

Ray keeps a request for ever. The actor is detached, needs no CPU, takes back what a killed job wanted, and ends itself
when there is no job any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
import ray.autoscaler.sdk
from ray import ObjectRef
from ray.exceptions import RayError

from collectives.version import VERSION
from executors.ray.capacity import Cluster, JobDemand, total_demand
from executors.ray.nodes import cluster_now

__all__ = ["AutoscalerRequest", "join_request"]

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
