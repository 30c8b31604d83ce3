"""Which workers a job takes back when Ray could not place one: another job or task was faster."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from typing import Protocol

logger = logging.getLogger(__name__)

# Jobs that take back all their workers at the same time try again at different times.
MOST_PAUSE_S = 10.0

JITTER = random.Random()


class RunningWorkers(Protocol):
    """The workers of the job that have not ended."""

    def has_no_room(self, name: str) -> bool:
        """Whether Ray has not started ``name``, and its node has nothing free for it."""

    def names(self) -> list[str]:
        """All of them."""

    def located(self) -> list[str]:
        """Those that run."""


class Discovery(Protocol):
    """Finds places for new workers."""

    def close(self, seconds: float) -> None:
        """Find none for so long."""


class Withdrawal:
    """Decides for a job that needs ``least`` workers, each of which had ``seconds`` to come up."""

    def __init__(
        self,
        workers: RunningWorkers,
        discovery: Discovery,
        least: int,
        seconds: float,
        jitter: Callable[[], float] = JITTER.random,
    ) -> None:
        self._workers = workers
        self._discovery = discovery
        self._least = least
        self._seconds = seconds
        self._jitter = jitter

    def of(self, worker: str, has_state: bool) -> Mapping[str, str]:
        """The workers to take back because ``worker`` is late, each with the reason: none if it has its room.

        A job that ``has_state`` keeps the others. One that has not begun gives up all if they are too few to begin:
        two jobs that each hold a part of what they need would wait for each other.
        """
        if not self._workers.has_no_room(worker):
            return {}
        text = f"was withdrawn: Ray had no room for it within {self._seconds:g} s"
        if has_state or len(self._workers.located()) >= self._least:
            self._warn(f"{worker} {text}, and others use its node. The job asks again when there is room")
            return {worker: text}
        pause = self._jitter() * MOST_PAUSE_S
        self._discovery.close(pause)
        names = self._workers.names()
        self._warn(
            f"{worker} {text}. The job has {len(self._workers.located())} of at least {self._least} workers, and gives "
            f"up their room for others; it begins when there is room for {self._least}, not before {pause:.0f} s"
        )
        return {
            name: text if name == worker or self._workers.has_no_room(name) else "was given up for other jobs"
            for name in names
        }

    def _warn(self, text: str) -> None:
        logger.warning("%s (raise timeout_s if workers are slow to start)", text)
