"""The metrics of a process, from one engine to the next."""

from __future__ import annotations

import threading

from collectives.api import NotInitializedError
from collectives.engine.counters import NO_COUNTS
from collectives.engine.engine import Engine
from collectives.observe.metrics.values import Metrics


class Meter:
    """Adds up the counts of the engines that it follows. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        # Owned by the meter, held while numbers are added. Reentrant, because a signal handler may call shutdown().
        self._lock = threading.RLock()
        self._engine: Engine | None = None
        self._before = NO_COUNTS
        self._place: tuple[int, int, int] | None = None
        self._rounds = self._lost = self._samples = self._steps = 0

    def follow(self, engine: Engine, round: int, is_alone: bool = False) -> None:
        """``engine`` runs in the world of this ``round``, or ``is_alone``: its process is in no world yet."""
        self.leave()
        with self._lock:
            self._engine, self._rounds = engine, self._rounds + (not is_alone)
            self._place = engine.topology.rank, engine.topology.size, round

    def leave(self) -> None:
        """The engine has ended."""
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                self._before += engine.counts()

    def lose(self, steps: int) -> None:
        """The ranks repeat so many ``steps``."""
        with self._lock:
            self._lost += steps

    def count(self, samples: int) -> None:
        """The script has used so many more ``samples``."""
        with self._lock:
            self._samples += samples

    def count_step(self) -> None:
        """An optimizer takes one more step."""
        with self._lock:
            self._steps += 1

    @property
    def has_begun(self) -> bool:
        """Whether there was an engine."""
        return self._place is not None

    def read(self) -> Metrics:
        """The metrics now; NotInitializedError before the first engine."""
        with self._lock:
            engine = self._engine
            if self._place is None:
                raise NotInitializedError
            counts = self._before if engine is None else self._before + engine.counts()
            rank, size, round = self._place
            return Metrics(
                rank,
                size,
                round,
                self._rounds,
                self._lost,
                counts.messages_sent,
                counts.messages_received,
                counts.sets,
                () if engine is None else engine.stragglers,
                self._samples,
                self._steps,
                None if engine is None else engine.last_batch,
                0.0 if engine is None else engine.waiting(),
            )

    def disown(self) -> None:
        """In a forked child: begin again. Takes no lock, because the thread that held it may not exist here."""
        self._begin()


process_meter = Meter()
"""The meter of this process."""
