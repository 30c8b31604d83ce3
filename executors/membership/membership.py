"""The state machine of the members of a job."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import singledispatchmethod

from executors.api import counted, worker_id
from executors.membership.deaths import Losses
from executors.membership.events import (
    Action,
    End,
    Event,
    HostDraining,
    HostFound,
    HostLost,
    HostUnusable,
    Members,
    Overdue,
    Publish,
    Start,
    StopWorker,
    WorkerBehind,
    WorkerDone,
    WorkerDraining,
    WorkerFailed,
    WorkerLeaves,
    WorkerRaised,
    WorkerReady,
    WorldFailed,
    WorldFormed,
)
from executors.membership.hosts import Hosts, spread
from executors.membership.limits import ElasticCounts, Limits

GATHER_SECONDS = 0.5
"""A newcomer that is ready waits this long for others that still start, so that they come in by one change."""

SHORTAGE_ADVICE = "add slots, lower the least number of workers, or raise the timeout"
NOBODY = Members(-1, ())


@dataclass(slots=True)
class _Worker:
    host: str
    ready_at: float | None = None
    is_newcomer: bool = True
    """Whether no published world had it yet."""
    is_draining: bool = False
    has_state: bool = False
    """Whether it is in the last world that formed. A worker that left it may be about to end."""
    leaves: bool = False
    """Whether it ends by itself. Its place stays taken until its process has ended."""


def excess(failures: int, resizes: int, limits: Limits) -> str | None:
    """Which of the ``limits`` is exceeded, as a sentence; None if none is."""
    resets = failures + resizes
    for count, limit, name in (
        (resets, limits.resets, "resets"),
        (failures, limits.failures, "failures"),
        (resizes, limits.resizes, "resizes"),
    ):
        if limit is not None and count > limit:
            return (
                f"the number of {name} exceeded its limit of {limit} ({counted(failures, 'failure')}, "
                f"{counted(resizes, 'resize')}); raise the limit, or look for the cause of the failures"
            )
    return None


class Membership:
    """Call :meth:`handle` with each event and the time, and execute the actions that it returns.

    Also call it with a Tick at :attr:`deadline`. ``jitter`` returns numbers from 0 to 1. After End it ignores events.

    The first world has the first workers. If one of them is lost, the others go on at once in the next world, if they
    are enough. Newcomers come in when they are ready, and workers of a draining host leave, by a planned change. Just
    before the host is gone, the others go on without those that have come to no commit since. The workers with the
    state of the training keep their order and come before the others.
    """

    def __init__(self, limits: Limits, jitter: Callable[[], float]) -> None:
        self.limits = limits
        self.counts = ElasticCounts()
        self.published = NOBODY
        self.formed = NOBODY
        self._unformed: dict[int, Members] = {}
        self.deadline: float | None = None
        self._jitter = jitter
        self._hosts = Hosts(limits.cooldown)
        self._workers: dict[str, _Worker] = {}
        self._failed: dict[str, _Worker] = {}
        self._losses = Losses()
        self._started = 0
        self._now = 0.0
        self._short_since: float | None = None
        self._last_failure = ""
        self._is_broken = False
        self._is_finishing = False
        self._is_waiting = False  # for the reason of a loss, which decides how the job ends
        self._all_stay = False  # the workers of the published world, when _next_workers() last looked
        self._is_over = False
        self._actions: list[Action] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        """The actions that follow from ``event`` at the time ``now``, in seconds of a clock that never goes back."""
        self._now, self._actions = now, []
        if not self._is_over:
            self._note(event)
            is_due = self.deadline is not None and now >= self.deadline  # the tick may come after the event
            self._decide(is_ready=isinstance(event, WorkerReady) and not is_due)
        return self._actions

    def host_of(self, worker: str) -> str:
        """The host of a worker that is alive; KeyError for any other."""
        return self._workers[worker].host

    def has(self, worker: str) -> bool:
        """Whether ``worker`` is alive."""
        return worker in self._workers

    def is_on_trial(self, worker: str) -> bool:
        """Whether an exception of ``worker`` is a failure of its host: others have trained, and it never has."""
        known = self._workers.get(worker) or self._failed.get(worker)
        return known is not None and self.formed is not NOBODY and not known.has_state

    def alone_have_state(self, workers: Collection[str]) -> bool:
        """Whether no other worker than ``workers`` has the state of the training, and one of them does."""
        trained = self._trained()
        return bool(trained) and set(trained) <= {*workers}

    def has_left(self, worker: str) -> bool:
        """Whether ``worker`` is in no world any more, as far as that is known, so that its end changes nothing."""
        return worker not in self._workers or self._workers[worker].leaves or not self._is_present(worker)

    # Events.

    @singledispatchmethod
    def _note(self, event: Event) -> None:
        """Only the time has changed."""

    @_note.register
    def _note_found(self, event: HostFound) -> None:
        self._hosts.found(event.host, event.slots)

    @_note.register
    def _note_draining(self, event: HostDraining) -> None:
        if self._hosts.drain(event.host, event.until, self._now) and self._on(event.host):
            self.counts.preemptions += 1

    @_note.register
    def _note_lost(self, event: HostLost) -> None:
        workers = self._on(event.host)
        if not all(self._is_leaving(worker) for worker in workers):
            self._count_failure(event.host, f"host {event.host}: {event.text}")
        for worker in workers:
            self._lose(worker)
        for worker in [worker for worker, lost in self._failed.items() if lost.host == event.host]:
            self._losses.explain(worker)
        self._hosts.lost(event.host)

    @_note.register
    def _note_unusable(self, event: HostUnusable) -> None:
        self._hosts.unusable(event.host, event.text)

    @_note.register
    def _note_ready(self, event: WorkerReady) -> None:
        if event.worker in self._workers:
            self._workers[event.worker].ready_at = self._now

    @_note.register
    def _note_worker_draining(self, event: WorkerDraining) -> None:
        if event.worker in self._workers and not self._is_leaving(event.worker):
            self._workers[event.worker].is_draining = True
            self._hosts.close_slot(self.host_of(event.worker))
            self.counts.preemptions += 1

    @_note.register
    def _note_behind(self, event: WorkerBehind) -> None:
        if event.worker in self._workers:
            self._remove(event.worker)

    @_note.register
    def _note_leaves(self, event: WorkerLeaves) -> None:
        """If the newest world has this worker, that world cannot form."""
        worker = self._workers.get(event.worker) or self._failed.get(event.worker)
        if worker is not None:
            worker.leaves, worker.has_state = True, False
        if event.worker in self._workers:
            self._is_broken = self._is_broken or event.worker in self.published.workers

    @_note.register
    def _note_failed(self, event: WorkerFailed) -> None:
        if event.worker in self._workers:
            host = self.host_of(event.worker)
            if not self._is_leaving(event.worker):
                self._count_failure(host, f"{event.worker} on host {host}: {event.text}")
            self._lose(event.worker, event.is_explained, event.has_begun)
        else:
            self._losses.explain(event.worker)

    @_note.register
    def _note_raised(self, event: WorkerRaised) -> None:
        """It may have been reported as failed before."""
        known = self._workers.get(event.worker) or self._failed.get(event.worker)
        if known is not None:
            self._end(f"{event.worker} on host {known.host} raised an exception: {event.text}")

    @_note.register
    def _note_done(self, event: WorkerDone) -> None:
        if event.worker in self._workers:
            if event.worker in self._alive(self.published.workers):
                self._is_finishing = self._is_broken = True
                self._losses.done(event.worker)
            del self._workers[event.worker]
        elif self._losses.has(event.worker):  # the others noticed its end first, and took it for a loss
            self._is_finishing = True
            self._losses.done(event.worker)

    @_note.register
    def _note_world_failed(self, event: WorldFailed) -> None:
        if event.round == self.published.round and not self._is_broken:
            self._last_failure = f"world {event.round}: {event.text}"
            self.counts.failures += 1
            self._is_broken = True

    @_note.register
    def _note_formed(self, event: WorldFormed) -> None:
        formed = self._unformed.get(event.round)
        if formed is not None:
            self.formed = formed
            self._unformed = {round: members for round, members in self._unformed.items() if round > event.round}
            for name, worker in self._workers.items():
                worker.has_state = name in formed.workers and not worker.leaves
            self._losses.formed(formed.workers)

    # Decisions.

    def _decide(self, is_ready: bool) -> None:
        """If only a newcomer ``is_ready``, nobody starts or ends because of that: hundreds may come at once."""
        self._is_waiting = False
        self._all_stay = self._all_stay and is_ready
        starts = () if is_ready else (self._stop, self._start, self._leave_overdue)
        for step in (self._check_limits, self._check_end, *starts, self._publish, self._check_shortage):
            if not self._is_over and not self._is_waiting:
                step()
        self.deadline = None if self._is_over else self._next_moment()

    def _check_limits(self) -> None:
        exceeded = excess(self.counts.failures, self.counts.resizes, self.limits)
        if exceeded is not None:
            self._end(f"{exceeded}. The last failure: {self._last_failure}")

    def _check_end(self) -> None:
        """End a job without a worker that could go on. A lost one that was done after all decides how."""
        is_left = self._is_anybody_left()
        self._is_waiting = not is_left and self._losses.is_open
        if is_left or self._is_waiting:
            return
        unrepaired = self._losses.unrepaired()
        if not self._is_finishing:
            self._end(". ".join(["every worker with the state of the training is lost", *self._cause()]))
        elif unrepaired:
            self._end(f"no worker is left that could go on without {', '.join(unrepaired)}", unrepaired)
        else:
            self._end()

    def _is_anybody_left(self) -> bool:
        """Once a world has formed, a job needs a worker that was in one, and that others have not left behind."""
        if self.formed is not NOBODY:
            return any(worker.has_state for worker in self._workers.values())
        return not self._is_finishing or bool(self._alive(self.published.workers))

    def _stop(self) -> None:
        """End newcomers that no world will have."""
        newcomers = self._newcomers()
        staying = self._staying() if newcomers else set()
        members = staying.intersection(self.published.workers)
        room = 0 if self._is_finishing else self.limits.most - len(members)
        for worker in newcomers:
            room -= worker in staying
            if room < 0 or worker not in staying:
                self._actions.append(StopWorker(worker))
                del self._workers[worker]

    def _start(self) -> None:
        """Start workers where slots are free; the first ones when they are enough for the first world."""
        places = [] if self._is_finishing else self._free_places()
        if not places or not self._may_start(len(places)):
            return
        for host in places:
            worker = worker_id(self._started)
            self._started += 1
            self._workers[worker] = _Worker(host)
            self._actions.append(Start(worker, host))

    def _may_start(self, places: int) -> bool:
        if self.published is not NOBODY:
            return self._is_short() or self._may_resize()
        has_waited = self._short_since is not None and self._now >= self._short_since + self.limits.timeout
        return places >= (self.limits.least if has_waited else self.limits.size)

    def _leave_overdue(self) -> None:
        """Break the world of workers whose host is about to go, if the others are enough without them."""
        for host, until in self._hosts.overdue(self._now):
            present = {*self.formed.workers, *self.published.workers}
            late = tuple(worker for worker in self._on(host) if worker in present)
            others = self._next_workers()
            go_on = len(others) >= self._needed() and not set(others) & set(late)
            self._is_broken = self._is_broken or (bool(late) and go_on)
            for worker in late if go_on else ():
                self._workers[worker].has_state = False  # so the next world is without it
            self._actions += [Overdue(host, late, until, go_on)] if late else []

    def _publish(self) -> None:
        planned = not self._is_short()
        if planned and not (self._may_plan() and self._may_change()):
            return
        workers = self._next_workers()
        if len(workers) < self._needed() or (planned and not self._is_time_for(workers)):
            return
        if planned:
            self._count_resize(workers)
        self.published = Members(self.published.round + 1, workers)
        self._unformed[self.published.round] = self.published
        for worker in workers:
            self._workers[worker].is_newcomer = False
        self._is_broken = self._all_stay = False
        self._actions.append(Publish(self.published, planned))

    def _check_shortage(self) -> None:
        """End a job that waits in vain, or too long, for workers."""
        if not self._is_short():
            self._short_since = None
            return
        if self._short_since is None:
            self._short_since = self._now
        if self._is_hopeless():
            self._end(self._shortage(", and no host can start another one"))
        elif self._now >= self._short_since + self.limits.timeout:
            self._end(self._shortage(f" within the elastic timeout of {self.limits.timeout:g} s; {SHORTAGE_ADVICE}"))

    # Parts of decisions.

    def _next_workers(self) -> tuple[str, ...]:
        """The workers of the next world, in order."""
        if self.published is NOBODY:
            return tuple(self._workers)
        members = self._alive(self.published.workers)
        stay = set(members) if self._is_finishing else self._staying()
        staying = [worker for worker in members if worker in stay]
        self._all_stay = len(staying) == len(self.published.workers)
        staying = self._with_state(staying)
        ready = self._ready_newcomers()
        if len(staying) + len(ready) < self._needed():
            staying = self._with_state(members)
        if self._is_broken and len(staying) + len(ready) < self._needed():
            staying = self._with_all_trained(staying)
        return tuple([*staying, *ready[: max(0, self.limits.most - len(staying))]])

    def _with_state(self, workers: list[str]) -> list[str]:
        """``workers``, and others, which leave later, if none of them could give newcomers the state.

        One is enough, unless a world is broken: then any of them may have left before it heard of that.
        """
        trained = self._trained()
        if set(trained) & set(workers):
            return workers
        return self._with_all_trained(workers) if self._is_broken else [*trained[:1], *workers]

    def _with_all_trained(self, workers: list[str]) -> list[str]:
        """``workers``, and others with the state, up to the largest number. Those with the state come first."""
        trained = self._trained()
        others = [worker for worker in trained if worker not in workers]
        chosen = {*workers, *others[: max(1, self.limits.most - len(workers))]}
        return [worker for worker in trained if worker in chosen] + [each for each in workers if each not in trained]

    def _trained(self) -> list[str]:
        """The workers that have the state, in their order."""
        return [name for name in self._alive(self.formed.workers) if self._workers[name].has_state]

    def _newcomers(self) -> list[str]:
        """The workers that no published world had yet."""
        return [name for name, worker in self._workers.items() if worker.is_newcomer]

    def _ready_newcomers(self) -> list[str]:
        return [worker for worker in self._newcomers() if self._workers[worker].ready_at is not None]

    def _needed(self) -> int:
        return 1 if self._is_finishing else self.limits.least

    def _is_short(self) -> bool:
        """Whether the job waits for workers: the last published world is broken, or there is none."""
        return self._is_broken or self.published is NOBODY

    def _is_hopeless(self) -> bool:
        """Whether no host can ever start another worker."""
        if self.limits.may_find_hosts or self.published is NOBODY:
            return False
        return not self._newcomers() and min(self._hosts.openings(), default=math.inf) == math.inf

    def _may_plan(self) -> bool:
        """Whether to plan a change: one at a time, because the ranks might take different ones."""
        return self.published.round not in self._unformed

    def _is_time_for(self, workers: Sequence[str]) -> bool:
        """Whether to change to ``workers`` now: not if nothing changes, if the job may not grow any more, or if further
        newcomers may come soon.
        """
        if not set(self.published.workers) <= set(workers):
            return True
        if workers == self.published.workers or not self._may_resize():
            return False
        return self._have_newcomers_come()

    def _may_change(self) -> bool:
        """Whether to look at all workers, of which there may be thousands, because one newcomer is ready."""
        return not self._all_stay or self._have_newcomers_come()

    def _have_newcomers_come(self) -> bool:
        """Whether all of them are ready, or one has waited long enough for others."""
        newcomers = [self._workers[worker].ready_at for worker in self._newcomers()]
        ready = [moment for moment in newcomers if moment is not None]
        return len(ready) == len(newcomers) or self._now >= min(ready, default=math.inf) + GATHER_SECONDS

    def _may_resize(self) -> bool:
        """Whether one more resize stays within the limits."""
        return excess(self.counts.failures, self.counts.resizes + 1, self.limits) is None

    def _count_resize(self, workers: Sequence[str]) -> None:
        gone = set(self.published.workers) - set(workers)
        if not any(self._drains(worker) for worker in gone):
            self.counts.resizes += 1

    def _free_places(self) -> list[str]:
        """The host of each worker that could be started now.

        The first ones fill the hosts in order, as users expect; later ones are spread.
        """
        taken = Counter(worker.host for worker in self._workers.values())
        free = {host: self._hosts.room(host) - taken[host] for host in self._hosts.open(self._now)}
        staying = self._staying()
        number = max(0, self.limits.most - len(staying))
        if self.published is NOBODY:
            return [host for host, count in free.items() for _ in range(count)][:number]
        return spread(number, free, Counter(self.host_of(worker) for worker in staying))

    def _on(self, host: str) -> list[str]:
        """The workers of a host, in the order of :meth:`_in_order`."""
        return [worker for worker in self._in_order() if self._workers[worker].host == host]

    def _in_order(self) -> list[str]:
        """All workers; those of the present world first, in its order."""
        return list(dict.fromkeys([*self._alive(self.published.workers), *self._workers]))

    def _staying(self) -> set[str]:
        """The workers that their hosts have room for, and that do not leave by themselves."""
        room = {host: self._hosts.room(host) for host in {worker.host for worker in self._workers.values()}}
        found = set()
        for name in self._in_order():
            worker = self._workers[name]
            if not (worker.is_draining or worker.leaves) and room[worker.host]:
                room[worker.host] -= 1
                found.add(name)
        return found

    def _drains(self, worker: str) -> bool:
        """Whether the worker or its host will leave."""
        return self._workers[worker].is_draining or self._hosts.is_draining(self.host_of(worker))

    def _is_leaving(self, worker: str) -> bool:
        """Whether it or its host drains, or the next world is without it."""
        has_left = not self._workers[worker].is_newcomer and worker not in self.published.workers
        return has_left or self._workers[worker].leaves or self._drains(worker)

    def _alive(self, workers: Sequence[str]) -> list[str]:
        """Those of ``workers`` that go on."""
        return [worker for worker in workers if worker in self._workers and not self._workers[worker].leaves]

    # Changes.

    def _count_failure(self, host: str, text: str) -> None:
        self._last_failure = text
        self.counts.failures += 1
        self._hosts.failed(host, self._now, self._jitter())

    def _lose(self, worker: str, is_explained: bool = True, has_begun: bool = True) -> None:
        """``worker`` has ended without success; that of one that has left changes nothing."""
        if not self.has_left(worker):
            # While no world has formed, all have a part in the work: the job may use no elastic state.
            had_part = has_begun and (self.formed is NOBODY or worker in self.formed.workers)
            self._losses.add(worker, is_explained, had_part)
        self._failed[worker] = self._workers[worker]
        self._remove(worker)

    def _remove(self, worker: str) -> None:
        """Forget a lost worker. That breaks the present world if it has the worker, and so the way to the next one."""
        self._is_broken = self._is_broken or self._is_present(worker)
        del self._workers[worker]

    def _is_present(self, worker: str) -> bool:
        """Whether a world that ranks may be in has ``worker``."""
        return any(worker in members.workers for members in (self.formed, *self._unformed.values()))

    def _end(self, error: str | None = None, unrepaired: tuple[str, ...] = ()) -> None:
        self._is_over = True
        self._actions.append(End(error, unrepaired))

    def _shortage(self, circumstances: str) -> str:
        alive = self._alive(self.published.workers)
        has = f"the job has {len(alive)} of at least {self._needed()} workers (hosts: {self._hosts}){circumstances}"
        return ". ".join([has, *self._cause(), *self._hosts.problems()])

    def _cause(self) -> list[str]:
        """A sentence about the last failure; the loss of a worker of a host that leaves is none."""
        return [f"The last failure: {self._last_failure}"] if self._last_failure else []

    def _next_moment(self) -> float | None:
        times = (*self._hosts.openings(), *self._hosts.departures())
        moments = [moment for moment in times if self._now < moment < math.inf]
        if self._short_since is not None:
            moments.append(self._short_since + self.limits.timeout)
        ready = [self._workers[name].ready_at for name in self._newcomers()]
        moments += [moment + GATHER_SECONDS for moment in ready if moment is not None]
        return min((moment for moment in moments if moment > self._now), default=None)
