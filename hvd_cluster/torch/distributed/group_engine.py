"""The engine of a group of torch.distributed, whose ranks find one another by the store of torch."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from collectives import (
    Engine,
    ProcessExit,
    Settings,
    World,
    start,
    world_from_environment,
)
from executors import Farewell, Joined, Place, StoreRendezvous, bootstrap


class GroupEngine:
    """The engine of one group: it connects at once, and ends with :meth:`close`, or with the process.

    ``name`` is that of the group, ``seconds`` its timeout. A rank that waits for others so long ends the group, as a
    stall does elsewhere, unless HOROVOD_STALL_CHECK_DISABLE is set. Raises what :func:`hvd_cluster.torch.init` raises.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str, seconds: float) -> None:
        self._farewell = Farewell()
        place = Place("torch.distributed", "WORLD_SIZE", rank, size, name, StoreRendezvous(store))
        self._joined = Joined({"HOROVOD_SIZE": "1"}) if size == 1 else bootstrap.join(place, seconds, self._farewell)
        try:
            self.engine: Engine = start.connect(*_world_of({**os.environ, **self._joined.environment}, size, seconds))
        except BaseException:
            self._end()
            raise
        _open.add(self)

    def close(self) -> None:
        """End the engine on all ranks. Idempotent."""
        if self in _open:
            _open.discard(self)
            self.engine.shutdown()
            self._end()

    def close_at_exit(self, exit: ProcessExit) -> None:
        """End it while the process ends."""
        self.engine.shut_down_at_exit(exit)
        self._end()

    def disown(self) -> None:
        """In a forked child: all of it is the parent's."""
        self.engine.disown()
        self._farewell.disown()
        self._joined.disown()

    def _end(self) -> None:
        self._farewell.end()
        self._joined.close()


def _world_of(environment: Mapping[str, str], size: int, seconds: float) -> tuple[World, Settings]:
    """The launcher may have variables about another world than that of the group."""
    world = World() if size == 1 else world_from_environment(environment)
    settings = Settings.from_environment(environment, world.topology)
    if settings.stall_warning is not None:
        longest = min(seconds, settings.stall_shutdown or seconds)
        settings = replace(settings, stall_warning=min(settings.stall_warning, longest / 2), stall_shutdown=longest)
    return world, settings


_open: set[GroupEngine] = set()


def _close_at_exit() -> None:
    for each in list(_open):
        exit = ProcessExit()
        exit.begin()
        each.close_at_exit(exit)
    _open.clear()


def _disown() -> None:
    """In a forked child: the groups are the parent's."""
    for each in _open:
        each.disown()
    _open.clear()


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_disown)
