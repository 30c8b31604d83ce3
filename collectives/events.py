"""What happened in the engine, as values. Timeline, metrics and the like subscribe; the engine knows none of them.

``time`` is ``time.monotonic()`` in seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Event", "EventStream", "Failed", "Finished", "Negotiated", "Started", "Submitted"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A tensor was submitted on this rank."""

    name: str
    process_set: int
    nbytes: int
    time: float


@dataclass(frozen=True, slots=True)
class Negotiated:
    """Every member rank has the tensor; it may run."""

    name: str
    process_set: int
    time: float


@dataclass(frozen=True, slots=True)
class Started:
    """A batch of fused tensors begins on this rank, on the backend called ``backend``."""

    names: tuple[str, ...]
    process_set: int
    operation: str
    nbytes: int
    backend: str
    time: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The batch is done on this rank."""

    names: tuple[str, ...]
    process_set: int
    time: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A tensor ended with ``error`` on this rank."""

    name: str
    process_set: int
    error: Exception
    time: float


Event: TypeAlias = Submitted | Negotiated | Started | Finished | Failed


class EventStream:
    """Hands each event to the subscribers, on the thread where it happened.

    A subscriber that raises is logged and removed: an observer never harms the job.
    """

    def __init__(self) -> None:
        self._subscribers: tuple[Callable[[Event], None], ...] = ()

    @property
    def active(self) -> bool:
        """Whether anybody listens; when not, no event needs to be built."""
        return bool(self._subscribers)

    def subscribe(self, subscriber: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``subscriber`` for every event from now on; the returned function ends that."""
        self._subscribers = (*self._subscribers, subscriber)
        return lambda: self._remove(subscriber)

    def publish(self, event: Event) -> None:
        """Hand ``event`` to everybody."""
        for subscriber in self._subscribers:
            try:
                subscriber(event)
            except Exception:
                logger.exception("event subscriber %r failed and is removed", subscriber)
                self._remove(subscriber)

    def _remove(self, subscriber: Callable[[Event], None]) -> None:
        self._subscribers = tuple(other for other in self._subscribers if other is not subscriber)
