"""The workers that a job still misses, and asks of the autoscaler of the cluster."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray import ObjectRef

from executors.ray.autoscaler_request import join_request
from executors.ray.capacity import JobDemand, Share

__all__ = ["Demand"]

logger = logging.getLogger(__name__)

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
