"""Removes the placement group of a job whose owner, an actor or a task, was killed.

Ray keeps a placement group until the driver of the cluster job ends, even if its creator was an actor or a task that
has ended. The workers cannot remove it, because Ray kills them with their owner. A detached actor, which needs no CPU,
outlives the owner and learns of its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup

__all__ = ["GroupKeeper", "keep_group"]

# From the creation of the keeper until its owner's first call; only an owner that died meanwhile takes longer.
FIRST_CALL_S = 60.0


class GroupKeeper:
    """The actor that removes ``group``, and then ends itself, when its owner is gone."""

    def __init__(self, group: PlacementGroup) -> None:
        self._group = group
        # Owner: this actor. Bound: FIRST_CALL_S. Abort: watch() cancels it.
        self._unwatched = threading.Timer(FIRST_CALL_S, self._end)
        self._unwatched.daemon = True
        self._unwatched.start()

    async def never(self) -> None:
        """Never return. The reference to the value belongs to the owner, and fails with it."""
        await asyncio.Event().wait()

    async def watch(self, value: list[ObjectRef[None]]) -> None:
        """Wait until the owner of ``value``, the reference that :meth:`never` gave it, is gone."""
        self._unwatched.cancel()
        with contextlib.suppress(RayError):
            await value[0]
        self._end()

    async def ready(self) -> None:
        """Return when :meth:`watch` has begun, if it was called before: Ray keeps the order of the owner's calls."""

    def _end(self) -> None:
        with contextlib.suppress(RayError):
            remove_placement_group(self._group)
        ray.kill(ray.get_runtime_context().current_actor)


def keep_group(group: PlacementGroup) -> Any:
    """Start a keeper of ``group`` and return its handle; None in a driver, whose groups end with it.

    ``ray.kill`` ends the keeper without removing the group.
    """
    if ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
        return None
    actor_class: Any = ray.remote(num_cpus=0)(GroupKeeper)
    keeper = actor_class.options(lifetime="detached", scheduling_strategy="DEFAULT").remote(group)
    keeper.watch.remote([keeper.never.remote()])
    return keeper
