"""Tunes the parameters of the engine on rank 0: measures, searches, and proposes, until the search is over."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Protocol, TypeAlias

from collectives.api import Changes, Parameters, Topology
from collectives.controller.process_sets import GLOBAL
from collectives.engine.engine import Engine
from collectives.events import Event, Started
from collectives.observe.autotune.journal import Journal
from collectives.observe.autotune.plan import Choice, Search, plan
from collectives.observe.autotune.scores import Scores
from collectives.observe.autotune.search import ProcessSearch, SearchError, is_available
from collectives.observe.autotune.space import Space
from collectives.settings import Autotuning, Settings

logger = logging.getLogger(__name__)

SAMPLES = 5
CLOSE_SECONDS = 5.0


class EndableSearch(Search, Protocol):
    """A search in a process of its own."""

    def kill(self) -> None:
        """Let a call that waits raise SearchError; from any thread."""

    def close(self) -> None:
        """Release its resources."""

    def disown(self) -> None:
        """In a forked child: close copies of descriptors; takes no lock."""


class Autotuner:
    """The tuning of a process, from one engine to the next. For one thread at a time."""

    def __init__(self, make_search: Callable[[int, float], EndableSearch] = ProcessSearch) -> None:
        self._make_search = make_search
        self._tuning: _Tuning | None = None
        self._choices: dict[_Shape, Changes] = {}
        self._logs: set[str] = set()
        self._has_failed = False

    def follow(self, engine: Engine, settings: Settings) -> None:
        """Tune ``engine``, if ``settings`` say so and it has several ranks; only rank 0 acts.

        A choice that was made for as many ranks and hosts holds again, but not over what the user has set. A search
        that the end of the world before has cut off begins anew. The log of a lost rank 0 goes on, if it is here.
        """
        if settings.autotune is None or self._has_failed:
            return
        if engine.topology.size == 1:
            logger.info("autotuning has nothing to do: there is only one rank")
            return
        if engine.topology.rank != 0:
            self._logs.add(settings.autotune.log)
            return
        chosen = self._choices.get(_shape(engine.topology))
        if chosen is not None:
            engine.propose(**{name: value for name, value in chosen.items() if name not in settings.autotune.fixed})
        elif self._is_possible():
            journal = Journal(settings.autotune.log, goes_on=settings.autotune.log in self._logs)
            self._logs.add(settings.autotune.log)
            self._tuning = _Tuning(engine, settings.autotune, self._make_search, journal)

    def _is_possible(self) -> bool:
        if self._make_search is ProcessSearch and not is_available():
            self._has_failed = True
            logger.warning(
                "HOROVOD_AUTOTUNE needs the package bayesian-optimization: pip install 'hvd-cluster[autotune]'; "
                "training goes on with the parameters as they are"
            )
        return not self._has_failed

    @property
    def is_searching(self) -> bool:
        """Whether the search goes on."""
        return self._tuning is not None and self._tuning.is_searching

    def leave(self) -> None:
        """The engine has ended."""
        tuning, self._tuning = self._tuning, None
        if tuning is not None:
            tuning.close()
            self._has_failed = tuning.has_failed
            if tuning.choice is not None:
                self._choices[_shape(tuning.topology)] = tuning.choice

    def disown(self) -> None:
        """In a forked child: the tuning is the parent's. Takes no lock."""
        tuning, self._tuning = self._tuning, None
        if tuning is not None:
            tuning.disown()


_Shape: TypeAlias = tuple[int, ...]


def _shape(topology: Topology) -> _Shape:
    return topology.size, topology.local_size, topology.cross_size


class _Closed(Exception):
    """The engine has ended before the search."""


class _Tuning:
    """``choice`` has the changes of parameters once the search is over; None until then, and if it ``has_failed``."""

    def __init__(
        self,
        engine: Engine,
        settings: Autotuning,
        make_search: Callable[[int, float], EndableSearch],
        journal: Journal,
    ) -> None:
        self.choice: Changes | None = None
        self.has_failed = False
        self.topology = engine.topology
        self._engine = engine
        self._space = Space.of(engine.parameters, engine.topology, settings.fixed)
        self._settings = settings
        self._search = make_search(len(self._space.knobs), settings.noise)
        self._journal = journal
        self._trials = 0
        self._scores = Scores(settings.steps, SAMPLES)
        self._first: Changes = {name: getattr(engine.parameters, name) for name in self._space.names}
        self._wanted: Changes = {}
        self._is_closed = False
        self._is_measuring = False
        self._seen: Parameters | None = None
        self._holds = False
        # The score of the trial, or an error, from the thread that drives; None when the engine ends, from close().
        self._results: SimpleQueue[float | Exception | None] = SimpleQueue()
        self._detach = engine.events.subscribe(self._hear, [Started])
        # Owned by the tuning; aborted and joined by close(), for CLOSE_SECONDS at most.
        self._thread = threading.Thread(target=self._run, name="hvd-autotune", daemon=True)
        self._thread.start()

    @property
    def is_searching(self) -> bool:
        """Whether the thread still tries parameters."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the search, if it is not over."""
        self._is_closed = True
        self._detach()
        self._results.put(None)
        self._search.kill()
        self._thread.join(CLOSE_SECONDS)

    def disown(self) -> None:
        self._search.disown()
        self._journal.disown()

    # On the thread that drives.

    def _hear(self, event: Event) -> None:
        try:
            self._measure_start(event)
        except Exception as error:
            self._is_measuring = False
            self._results.put(error)
            raise

    def _measure_start(self, event: Event) -> None:
        if not self._is_measuring or not isinstance(event, Started) or event.process_set != GLOBAL:
            return
        if self._is_in_force():
            score = self._scores.start(event.names, event.nbytes, event.time)
            if score is not None:
                self._is_measuring = False
                self._results.put(score)

    def _is_in_force(self) -> bool:
        """Whether this batch runs under the parameters of the trial."""
        present = self._engine.parameters
        if present is not self._seen:
            self._seen = present
            self._holds = all(getattr(present, name) == value for name, value in self._wanted.items())
            self._scores.restart()
        return self._holds

    # On the thread of the tuning.

    def _run(self) -> None:
        try:
            self._end(self._choose())
        except _Closed:
            self._tell_closed()
        except SearchError as error:
            self._give_up(str(error))
        except Exception:
            logger.exception("autotuning failed")
            self._give_up("autotuning failed")
        finally:
            self._detach()
            self._search.close()
            self._journal.close()

    def _choose(self) -> Choice:
        trials = plan(self._first, self._space, self._search, self._settings.warmup, self._settings.most)
        changes = next(trials)
        try:
            while True:
                changes = trials.send(self._measure(changes))
        except StopIteration as end:
            choice: Choice = end.value
            return choice

    def _measure(self, changes: Changes) -> float:
        self._scores.restart()
        self._wanted, self._seen = changes, None
        self._engine.propose(**changes)
        self._is_measuring = True
        score = self._results.get()
        if score is None:
            raise _Closed
        if isinstance(score, Exception):
            raise score
        self._trials += 1
        self._journal.add(replace(self._engine.parameters, **changes), score)
        return score

    def _end(self, choice: Choice) -> None:
        self._engine.propose(**choice.changes)
        self._journal.add(replace(self._engine.parameters, **choice.changes), choice.score, is_choice=True)
        self.choice = {name: value for name, value in choice.changes.items() if value != self._first[name]}
        if self.choice:
            logger.warning("autotuning is over: %s; %.2f times as fast as before", _text(self.choice), choice.gain)
        else:
            logger.warning("autotuning is over: the parameters stay as they are, no others are faster")

    def _tell_closed(self) -> None:
        logger.warning("the world ended before autotuning was over, after %d trials", self._trials)

    def _give_up(self, reason: str) -> None:
        if self._is_closed:
            self._tell_closed()
            return
        self.has_failed = True
        self._engine.propose(**self._first)
        logger.warning("%s; training goes on with the parameters as they were", reason)


def _text(changes: Changes) -> str:
    """With units: times in milliseconds, sizes in bytes."""
    times = ("cycle_time", "patience")
    return ", ".join(
        [f"{name} {value * 1e3:g} ms" if name in times else f"{name} {value}" for name, value in changes.items()]
    )
