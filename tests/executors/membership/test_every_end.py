"""Every short life of a small job, event by event: it ends with success only if nobody's loss stayed unrepaired."""

from collections import deque
from dataclasses import is_dataclass

import pytest

from executors.membership import (
    Cooldown,
    End,
    HostDraining,
    HostFound,
    HostLost,
    Limits,
    Membership,
    Publish,
    Start,
    StopWorker,
    Tick,
    WorkerBehind,
    WorkerDone,
    WorkerDraining,
    WorkerFailed,
    WorkerLeaves,
    WorkerReady,
    WorldFormed,
)
from executors.membership.deaths import Losses
from executors.membership.hosts import Hosts


class Life:
    """A job as its events tell it. Its end is worked out here from the worlds alone, not from its counts."""

    def __init__(self, limits, hosts):
        self.membership = Membership(limits, lambda: 0.0)
        self.now = 0.0
        self.alive = {}  # the host of each worker whose process runs
        self.ready = set()
        self.leaving = set()  # they have told that they leave
        self.draining = set()
        self.worlds = {}
        self.formed = []  # their rounds, in the order of the reports
        self.done = set()  # as members of the newest world, or of one that formed
        self.lost = {}  # of each that was lost: whether no world had formed before
        self.unexplained = set()
        self.unborn = set()  # they could not be started
        self.end = None
        for host, slots in hosts.items():
            self.tell(HostFound(host, slots))

    def tell(self, event):
        actions = self.membership.handle(event, self.now)
        assert not (self.end and actions)
        for action in actions:
            if isinstance(action, Start):
                self.alive[action.worker] = action.host
            elif isinstance(action, StopWorker):
                del self.alive[action.worker]
            elif isinstance(action, Publish):
                self.worlds[action.members.round] = action.members.workers
            elif isinstance(action, End):
                self.end = action

    # What may happen.

    def events(self):
        """The names and arguments of the methods below that make sense now."""
        for worker in self.alive:
            yield from self._events_of(worker)
        for worker in sorted(self.unexplained):
            yield "explain", worker, True
            yield "explain", worker, False
        for round in self.worlds:
            if round > max(self.formed, default=-1) and self.unborn.isdisjoint(self.worlds[round]):
                yield "form", round
        for host in sorted(set(self.alive.values())):
            yield "lose_host", host
            if host not in self.draining:
                yield "drain_host", host
        if self.membership.deadline is not None:
            yield ("wait",)

    def _events_of(self, worker):
        yield "fail", worker, True
        yield "finish", worker
        if not self._own_rounds(worker):
            yield "fail_to_begin", worker
        if worker in self._present():
            yield "fail", worker, False
            yield "leave" if worker in self.leaving else "fall_behind", worker
            if worker not in self.draining:
                yield "drain", worker
            if any(worker not in members for members in self._later_worlds(worker)):
                yield "leave", worker
        elif worker not in self.ready:
            yield "get_ready", worker

    def fail(self, worker, is_explained):
        self._lose(worker)
        if not is_explained:
            self.unexplained.add(worker)
        self.tell(WorkerFailed(worker, "killed", is_explained))

    def fail_to_begin(self, worker):
        del self.alive[worker]
        self.unborn.add(worker)
        self.tell(WorkerFailed(worker, "could not be started", has_begun=False))

    def explain(self, worker, is_done):
        self.unexplained.remove(worker)
        if is_done and self.lost.pop(worker, None) is not None:
            self.done.add(worker)
        self.tell(WorkerDone(worker) if is_done else WorkerFailed(worker, "killed"))

    def finish(self, worker):
        del self.alive[worker]
        if worker in self._newest() and worker not in self.leaving:
            self.done.add(worker)
        self.tell(WorkerDone(worker))

    def leave(self, worker):
        self.leaving.add(worker)
        self.tell(WorkerLeaves(worker))

    def fall_behind(self, worker):
        del self.alive[worker]
        self.tell(WorkerBehind(worker))

    def get_ready(self, worker):
        self.ready.add(worker)
        self.tell(WorkerReady(worker))

    def drain(self, worker):
        self.draining.add(worker)
        self.tell(WorkerDraining(worker))

    def drain_host(self, host):
        self.draining.add(host)
        self.tell(HostDraining(host))

    def lose_host(self, host):
        for worker in [worker for worker, place in self.alive.items() if place == host]:
            self._lose(worker)
        self.unexplained = {worker for worker in self.unexplained if self._host_of_lost(worker) != host}
        self.tell(HostLost(host, "gone"))

    def form(self, round):
        self.formed.append(round)
        self.tell(WorldFormed(round))

    def wait(self):
        self.now = self.membership.deadline
        self.tell(Tick())

    # What it means.

    def _newest(self):
        return self.worlds[max(self.worlds)] if self.worlds else ()

    def _current(self):
        """The worlds that ranks may be in."""
        last = max(self.formed, default=-1)
        return {round: members for round, members in self.worlds.items() if round >= last}

    def _present(self):
        return {worker for members in self._current().values() for worker in members}

    def _later_worlds(self, worker):
        own = [round for round, members in self._current().items() if worker in members]
        return [members for round, members in self.worlds.items() if own and round > min(own)]

    def _host_of_lost(self, worker):
        return self.membership._failed[worker].host

    def _lose(self, worker):
        if worker in self._present() and worker not in self.leaving:
            self.lost[worker] = not self.formed
        del self.alive[worker]

    def unrepaired(self):
        """Those to blame: with none after them, or else all."""
        had_part = [worker for worker, was_first in self.lost.items() if was_first or self._own_rounds(worker)]
        successors = {worker: self._successors(worker) for worker in had_part}
        found = [worker for worker, later in successors.items() if not self.done & later]
        return {worker for worker in found if not successors[worker]} or set(found)

    def _own_rounds(self, worker):
        return [round for round in self.formed if worker in self.worlds[round]]

    def _successors(self, worker):
        """The workers of later worlds without it, which have formed."""
        own = max(self._own_rounds(worker), default=-1)
        return {member for round in self.formed if round > own for member in self.worlds[round]}

    def check(self):
        if self.end is None:
            assert self.alive or self.unexplained or not self.done, "the job waits for nobody"
            return
        unrepaired = self.unrepaired()
        if self.end.error is None:
            assert self.done
            assert not unrepaired
            assert not self.unexplained & self.lost.keys()
        else:
            assert set(self.end.unrepaired) in (set(), unrepaired)
            is_excused = self.end.unrepaired or not self.done or "elastic timeout" in self.end.error
            assert is_excused, "a job whose losses are all repaired has failed"

    def key(self):
        """What its future depends on."""
        return _plain(self)


def _plain(value):
    """``value`` as tuples: its future depends on nothing else."""
    if isinstance(value, dict):
        return tuple((name, _plain(each)) for name, each in value.items())
    if isinstance(value, set):
        return tuple(sorted(value))
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return tuple(_plain(getattr(value, name)) for name in _names(value)) if _has_parts(value) else value


def _copied(value):
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    if isinstance(value, set | list):
        return value.copy()
    if not _has_parts(value):
        return value
    copy = object.__new__(type(value))
    for name in _names(value):
        setattr(copy, name, _copied(getattr(value, name)))
    return copy


def _has_parts(value):
    """Whether it is an object that changes."""
    return isinstance(value, PLAIN_CLASSES) or (is_dataclass(value) and not value.__dataclass_params__.frozen)


def _names(value):
    return getattr(type(value), "__slots__", None) or vars(value)


PLAIN_CLASSES = Life, Membership, Hosts, Losses
JOBS = {
    "two hosts": (Limits(2, 1, 2, may_find_hosts=False), {"a": 1, "b": 1}, 5),
    "newcomers": (Limits(2, 1, 2, cooldown=Cooldown(1.0, 1.0), timeout=50.0), {"a": 2}, 4),
    "three ranks": (Limits(3, 1, 3, may_find_hosts=False), {"a": 2, "b": 1}, 3),
    "at least two": (Limits(3, 2, 3, timeout=50.0), {"a": 2, "b": 2}, 3),
}


@pytest.mark.parametrize("name", JOBS)
def test_no_loss_that_nobody_repaired_ends_as_success_and_no_repaired_one_as_failure(name):
    limits, hosts, depth = JOBS[name]
    first = Life(limits, hosts)
    queue, seen = deque([(first, 0, ())]), {first.key()}
    ends = set()
    while queue:
        life, length, story = queue.popleft()
        for event in list(life.events()):
            follower = _copied(life)
            getattr(follower, event[0])(*event[1:])
            try:
                follower.check()
            except AssertionError as error:
                raise AssertionError(f"{error} after {[*story, event]}: {follower.end}") from error
            if follower.end is not None:
                ends.add(follower.end.error is None)
            elif length + 1 < depth and (key := follower.key()) not in seen:
                seen.add(key)
                queue.append((follower, length + 1, (*story, event)))
    assert ends == {True, False}
