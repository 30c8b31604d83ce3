"""Takes back what Ray keeps for a job whose owner was killed: its placement group, its request to the autoscaler.

Ray keeps a placement group until the driver of the cluster job ends, even if its creator was an actor or a task that
has ended, and a request to the autoscaler for ever. The workers cannot take them back, because Ray kills them with
their owner. A detached actor, which needs no CPU, outlives the owner and learns of its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import ray
import ray.autoscaler.sdk
from ray import ObjectRef
from ray.exceptions import RayError
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup

__all__ = ["GroupKeeper", "RequestKeeper", "keep_group", "keep_request"]

# From the creation of the keeper until its owner's first call; only an owner that died meanwhile takes longer.
FIRST_CALL_S = 60.0


class Keeper:
    """The actor that takes something back, and then ends itself, when its owner is gone."""

    def __init__(self) -> None:
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
            self._take_back()
        ray.kill(ray.get_runtime_context().current_actor)

    def _take_back(self) -> None:
        raise NotImplementedError


class GroupKeeper(Keeper):
    """Removes ``group``."""

    def __init__(self, group: PlacementGroup) -> None:
        self._group = group
        super().__init__()

    def _take_back(self) -> None:
        remove_placement_group(self._group)


class RequestKeeper(Keeper):
    """Withdraws the request to the autoscaler."""

    def _take_back(self) -> None:
        ray.autoscaler.sdk.request_resources(bundles=[])


def keep_group(group: PlacementGroup) -> Any:
    """Start a keeper of ``group`` and return its handle; None in a driver, whose groups end with it.

    ``ray.kill`` ends the keeper without removing the group.
    """
    if ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
        return None
    return _start(GroupKeeper, group)


def keep_request() -> Any:
    """Start a keeper of the request of this process, and return its handle.

    ``ray.kill`` ends the keeper without withdrawing the request.
    """
    return _start(RequestKeeper)


def _start(kind: type[Keeper], *arguments: object) -> Any:
    actor_class: Any = ray.remote(num_cpus=0)(kind)
    keeper = actor_class.options(lifetime="detached", scheduling_strategy="DEFAULT").remote(*arguments)
    keeper.watch.remote([keeper.never.remote()])
    return keeper
