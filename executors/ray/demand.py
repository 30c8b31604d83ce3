"""The resources that a job still requests from the autoscaler of the cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import ray
import ray.autoscaler.sdk

from executors.ray.capacity import Cluster, Share, others
from executors.ray.keeper import keep_request
from executors.ray.nodes import cluster_now

__all__ = ["Demand", "bundles"]

logger = logging.getLogger(__name__)

Bundles = list[dict[str, float]]


def bundles(wanted: int, need: Mapping[str, float], cluster: Cluster, shares: Mapping[str, Share]) -> Bundles:
    """What the whole cluster must have room for: ``wanted`` workers, and what others use; nothing if all are there."""
    if sum(share.workers for share in shares.values()) >= wanted:
        return []
    return [*(dict(need) for _ in range(wanted)), *others(cluster, need, shares)]


class Demand:
    """Asks for ``wanted`` workers with ``need`` each while there are fewer. Each cluster has one such request.

    ``labels`` are those that a node must have, as in Ray's label selectors. With the first request comes the actor that
    withdraws it if this process is killed.
    """

    def __init__(
        self,
        wanted: int,
        need: Mapping[str, float],
        labels: Mapping[str, str],
        request: Callable[..., None] = ray.autoscaler.sdk.request_resources,
        cluster: Callable[[], Cluster] = cluster_now,
        keep: Callable[[], Any] = keep_request,
    ) -> None:
        self._wanted = wanted
        self._need = need
        self._labels = dict(labels)
        self._request = request
        self._cluster = cluster
        self._keep = keep
        self._keeper: Any = None
        self._asked: Bundles = []

    def update(self, shares: Mapping[str, Share]) -> None:
        """Request the missing workers, or withdraw the request if none is missing. A failure is logged."""
        try:
            self._ask(bundles(self._wanted, self._need, self._cluster(), shares))
        except Exception as error:  # noqa: BLE001  the autoscaler only helps
            logger.warning("the autoscaler could not be asked for %d workers: %s", self._wanted, error)

    def withdraw(self) -> None:
        """Want nothing any more."""
        try:
            self._ask([])
            if self._keeper is not None:
                ray.kill(self._keeper)
        except Exception as error:  # noqa: BLE001  the cluster may be gone
            logger.warning("the request to the autoscaler could not be withdrawn: %s", error)

    def _ask(self, wanted: Bundles) -> None:
        if wanted == self._asked:
            return
        self._keeper = self._keeper or self._keep()
        if self._labels and wanted:
            # Others than the workers of this job may be on any node.
            selectors = [self._labels] * self._wanted + [{}] * (len(wanted) - self._wanted)
            self._request(bundles=wanted, bundle_label_selectors=selectors)
        else:
            self._request(bundles=wanted)
        self._asked = wanted
