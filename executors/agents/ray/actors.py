"""The actors of an elastic job: each is one worker, on the node that the membership chose."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle
import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError

from executors.agents.ray.group import dismiss, kill
from executors.agents.ray.placement.capacity import Share
from executors.agents.ray.placement.nodes import how, is_placed
from executors.agents.ray.placement.request import RayRequest
from executors.agents.ray.placement.room import Room
from executors.agents.ray.worker import HorovodWorker, Location, actor_class
from executors.api import Slot
from executors.driver.outcome import Outcome
from executors.failures import Failure, FailureKind
from executors.job.call import Call
from executors.job.environment import gpu_variables

# Ray tells for so long after a change what was free before it.
SETTLE_S = 1.0


class Events(Protocol):
    """What happens to the workers."""

    def up(self, worker: str) -> None:
        """Its process runs."""

    def returned(self, worker: str, outcome: Outcome) -> None:
        """Its function returned; the last event, as are the others below."""

    def raised(self, worker: str, outcome: Outcome) -> None:
        """Its function, or what comes before it, raised."""

    def lost(self, worker: str, node: str, failure: Failure) -> None:
        """Its process, or its ``node``, is gone."""


@dataclass(frozen=True, slots=True)
class ActorWork:
    """The calls that each worker makes: the value of ``main`` counts; of the others only that they do not fail.

    ``build`` makes the executable; ``main`` then gets it as its first argument, if it ``executes``.
    """

    main: ObjectRef[Call]
    executes: bool = False
    before: Sequence[ObjectRef[Call]] = ()
    build: ObjectRef[Call] | None = None
    after: Sequence[ObjectRef[Call]] = ()

    def steps(self) -> list[tuple[str, ObjectRef[Call]]]:
        """The methods of the actor, with their arguments."""
        main = ("execute" if self.executes else "run", self.main)
        build = [("build", self.build)] if self.build is not None else []
        return [*(("run", call) for call in self.before), *build, main, *(("run", call) for call in self.after)]


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    node: str
    bundle: int
    actor: ActorHandle[HorovodWorker]
    environment: Mapping[str, str]
    steps: deque[tuple[str, ObjectRef[Call]]]
    location: Location | None = None
    is_prepared: bool = False
    outcome: Outcome | None = None
    pending: Any = field(default=None)  # the reference whose value comes next; it must not be dropped


class Actors:
    """Starts, watches and ends actors, each a worker of ``shape`` in ``room``, in the loop that ``soon`` belongs to."""

    def __init__(
        self, shape: RayRequest, room: Room, work: ActorWork, events: Events, soon: Callable[[Callable[[], None]], None]
    ) -> None:
        self._class = actor_class(shape)
        self._room = room
        self._work = work
        self._events = events
        self._soon = soon
        self._workers: dict[str, _Worker] = {}
        self._done: list[ActorHandle[HorovodWorker]] = []
        self._changed: dict[str, float] = {}

    @property
    def running(self) -> int:
        """How many workers have not ended."""
        return len(self._workers)

    def shares(self) -> Mapping[str, Share]:
        """The workers of each node; from any thread."""
        workers = list(self._workers.values())
        settled = time.monotonic() - SETTLE_S
        changed = dict(self._changed)
        return {
            node: Share(
                sum(worker.node == node for worker in workers),
                at < settled and all(worker.location for worker in workers if worker.node == node),
            )
            for node, at in changed.items()
        }

    def start(self, name: str, node: str, environment: Mapping[str, str]) -> None:
        """Start an actor on ``node``; the worker gets ``environment`` before any call."""
        place = self._room.place(node, [worker.bundle for worker in self._workers.values()])
        actor = self._class.options(scheduling_strategy=place.strategy).remote()
        worker = _Worker(name, node, place.bundle, actor, environment, deque(self._work.steps()))
        self._workers[name] = worker
        self._note_change(node)
        self._watch(worker, actor.location.remote(), self._located)

    def has_no_room(self, name: str) -> bool:
        """Whether Ray has not started the actor, and its node has nothing free for it: others took that."""
        worker = self._workers.get(name)
        if worker is None or worker.location is not None:
            return False
        return not is_placed(worker.actor) and not self._room.has_free(worker.node)

    def names(self) -> list[str]:
        """The workers that have not ended."""
        return list(self._workers)

    def located(self) -> list[str]:
        """Those of them whose process runs."""
        return [name for name, worker in self._workers.items() if worker.location is not None]

    def count(self, node: str) -> int:
        """How many workers of ``node`` have not ended."""
        return sum(worker.node == node for worker in self._workers.values())

    def node_of(self, name: str) -> str:
        """The node for which a worker that has not ended was started."""
        return self._workers[name].node

    def kill(self, name: str) -> None:
        """End a worker at once; it reports nothing more."""
        worker = self._workers.get(name)
        if worker is not None:
            self._forget(worker)
            with suppress(RayError):
                ray.kill(worker.actor)

    def lose(self, node: str) -> None:
        """``node`` is gone with its workers; they report nothing more."""
        for name in [worker.name for worker in self._workers.values() if worker.node == node]:
            self.kill(name)

    def end(self) -> None:
        """End all workers at once."""
        for name in list(self._workers):
            self.kill(name)

    def close(self) -> None:
        """End all, also those that are done, and wait for a moment until they are gone."""
        busy = [worker.actor for worker in self._workers.values()]
        self._workers.clear()
        dismiss(self._done)
        kill([*busy, *self._done])

    # The calls of a worker, one after the other.

    def _watch(self, worker: _Worker, reference: Any, answer: Callable[[_Worker, Any], None]) -> None:
        worker.pending = reference
        # Ray calls this in a thread of its own, as soon as there is a value, or the actor is gone.
        reference.future().add_done_callback(lambda done: self._soon(lambda: self._take(worker, done, answer)))

    def _take(self, worker: _Worker, done: Any, answer: Callable[[_Worker, Any], None]) -> None:
        if self._workers.get(worker.name) is not worker:
            return
        error = done.exception()
        if error is None:
            answer(worker, done.result())
            return
        self.kill(worker.name)  # it may only be out of reach
        self._events.lost(worker.name, worker.node, Failure(FailureKind.EXIT, how(error)))

    def _located(self, worker: _Worker, location: Location) -> None:
        worker.location = location
        self._note_change(worker.node)
        self._events.up(worker.name)
        self._prepare(worker.node)

    def _prepare(self, node: str) -> None:
        """Let the workers of ``node`` begin, when all have told their GPUs: each sees the GPUs of all."""
        workers = [worker for worker in self._workers.values() if worker.node == node]
        if all(worker.location for worker in workers):
            for worker in workers:
                if not worker.is_prepared:
                    self._begin(worker, [other for other in workers if other is not worker])

    def _begin(self, worker: _Worker, others: Sequence[_Worker]) -> None:
        worker.is_prepared = True
        slot = Slot.of(worker.environment)
        gpus = [other.location.gpus for other in others if other.location]
        gpus.insert(slot.local_rank, worker.location.gpus if worker.location else ())
        environment = {**gpu_variables(gpus), **worker.environment}
        self._watch(worker, worker.actor.prepare.remote(slot, environment), self._stepped)

    def _stepped(self, worker: _Worker, data: bytes) -> None:
        outcome: Outcome = cloudpickle.loads(data)
        if outcome.failed:
            self._end(worker)
            self._events.raised(worker.name, outcome)
            return
        if len(worker.steps) == len(self._work.after):
            worker.outcome = outcome
        if worker.steps:
            method, call = worker.steps.popleft()
            self._watch(worker, getattr(worker.actor, method).remote([call]), self._stepped)
        elif worker.outcome is not None:
            self._end(worker)
            self._events.returned(worker.name, worker.outcome)

    def _end(self, worker: _Worker) -> None:
        """Its function has ended, and so its process may."""
        self._forget(worker)
        self._done.append(worker.actor)
        worker.actor.__ray_terminate__.remote()

    def _forget(self, worker: _Worker) -> None:
        self._workers.pop(worker.name, None)
        self._note_change(worker.node)
        self._prepare(worker.node)

    def _note_change(self, node: str) -> None:
        self._changed[node] = time.monotonic()
