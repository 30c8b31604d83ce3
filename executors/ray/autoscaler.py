"""Whether an autoscaler may add nodes to the cluster."""

from __future__ import annotations

import json
import logging
import re

from ray.experimental.internal_kv import _internal_kv_get

__all__ = ["may_grow", "mirrors"]

logger = logging.getLogger(__name__)

# Ray has no public function for this. Its first autoscaler reports here, the second one does not.
STATUS_KEY = "__autoscaling_status"
# What the autoscaler calls the type of a node that it has not started: without a configuration it starts none.
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
