"""The tensors of an engine that stall now, from its events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from collectives.events import Event, EventStream, Failed, Finished, Heard, Stalled
from collectives.observe.live.snapshot import Stall

KEPT_STALLS = 20
ENDS = (Heard, Finished, Failed)
"""Rank 0 hears of the missing ranks of a tensor that is negotiated; one that bypasses it ends on all of its ranks."""

Key = tuple[int, str]


class Stalls:
    """Follows ``events`` until :meth:`close`. A stall is over after ``patience`` seconds without another report, too.

    For any thread. Where nothing stalls, events are built for the reports only.
    """

    def __init__(self, events: EventStream, patience: float) -> None:
        self._events = events
        self._patience = patience
        # Owned by the stalls, held for a few instructions. Reentrant, because a signal handler may publish an event.
        self._changing = threading.RLock()
        self._reported: dict[Key, Stalled] = {}
        self._unfollow: Callable[[], None] | None = None
        self._unsubscribe = events.subscribe(self._hear, (Stalled,))

    def close(self) -> None:
        """Follow no more."""
        self._unsubscribe()
        with self._changing:
            self._keep({})

    def shown(self, now: float) -> list[Stall]:
        """Those of the time ``now``, in monotonic seconds, in the order of their first reports."""
        with self._changing:
            self._keep({key: each for key, each in self._reported.items() if now - each.time < self._patience})
            return [_stall(each, now) for each in self._reported.values()]

    def _hear(self, event: Event) -> None:
        if isinstance(event, Stalled):
            with self._changing:
                known = {**self._reported, (event.process_set, event.name): event}
                self._keep(dict(list(known.items())[-KEPT_STALLS:]))

    def _follow(self, event: Event) -> None:
        with self._changing:
            if isinstance(event, Heard):
                self._arrive((event.process_set, event.name), event.ranks)
            elif isinstance(event, Finished):
                self._forget({(event.process_set, name) for name in event.names})
            elif isinstance(event, Failed):
                self._forget({(event.process_set, event.name)})

    def _arrive(self, key: Key, ranks: tuple[int, ...]) -> None:
        """``ranks`` have submitted the tensor ``key``: it does not wait for them."""
        event = self._reported.get(key)
        missing = () if event is None else tuple(rank for rank in event.missing if rank not in ranks)
        if event is not None and missing:
            self._reported[key] = replace(event, missing=missing)
        elif event is not None and event.missing:
            self._forget({key})

    def _forget(self, keys: set[Key]) -> None:
        self._keep({key: each for key, each in self._reported.items() if key not in keys})

    def _keep(self, reported: dict[Key, Stalled]) -> None:
        self._reported, unfollow = reported, self._unfollow
        if reported and unfollow is None:
            self._unfollow = self._events.subscribe(self._follow, ENDS)
        elif not reported and unfollow is not None:
            self._unfollow = None
            unfollow()


def _stall(event: Stalled, now: float) -> Stall:
    return Stall(event.name, event.missing, event.seconds, now - event.time, event.process_set)
