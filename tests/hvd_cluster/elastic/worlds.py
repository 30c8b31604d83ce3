"""Elastic jobs whose workers are threads of one process: the real ``run``, states and engines, with a fake driver.

The worlds of a job are known beforehand, each as the numbers of its workers in the order of their ranks.
"""

import threading

from collectives.api import HostsUpdatedInterrupt, NotInitializedError, PeerLostError
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import global_process_set
from hvd_cluster.elastic import sampler, session
from hvd_cluster.elastic.sampler import Samplers
from tests.collectives.backends.members import in_threads
from tests.collectives.engine.job import Job, outcome

PATIENCE_SECONDS = 60.0


class SamplersOfWorker(threading.local, Samplers):
    """Those of the worker that the calling thread plays."""


class Lost(Exception):
    """The end of a worker that is killed."""


class Worker(threading.local):
    """The worker that the calling thread plays: the interface of ``Worlds``, its engine and its numbers."""

    play = engine = place = None
    is_over = is_abandoned = False

    def begin(self, play, number):
        self.play, self.number = play, number
        self.call, self.leaves = 0, False
        self.round = next(index for index, world in enumerate(play.worlds) if number in world)
        self.is_alone = self.round > 0
        if self.is_alone:  # a newcomer counts on the numbers of a world that never comes
            self.engine, self.place = play.alone.engines[0], (len(play.worlds[0]), len(play.worlds[0]) + 1)
        else:
            self.go_to(self.round)

    def go_to(self, round):
        self.round, self.is_alone, self.place = round, False, None
        self.engine = self.play.jobs[round].engines[self.play.worlds[round].index(self.number)]

    def numbers(self):
        if self.engine is None:
            raise NotInitializedError("not a worker")
        return self.place or (self.engine.topology.rank, self.engine.topology.size)

    # What a training asks for.

    def end_world(self):
        """The next commit of this worker leaves the world; all ranks call it at the same step."""
        self.leaves = True

    def die(self):
        """This worker is lost, and its world ends."""
        for engine in self.play.jobs[self.round].engines:
            engine.abort(PeerLostError(f"worker {self.number} is gone"))
        raise Lost

    # What the session asks for.

    def begin_call(self):
        self.call += 1
        return False

    def check(self, engine):
        if self.leaves:
            self.leaves = False
            present, coming = self.play.worlds[self.round : self.round + 2]
            raise HostsUpdatedInterrupt(skip_sync=set(coming) <= set(present))

    def join(self, layout):
        return self.round

    def planned(self):
        return self._next()

    def after(self, error):
        return self._next()

    def _next(self):
        if self.number not in self.play.worlds[self.round + 1]:
            raise session.RemovedError("the next world is without this worker")
        return self.round + 1

    def came_together(self, before):
        return before not in self.play.ends_by_loss and set(self.play.worlds[self.round]) <= set(
            self.play.worlds[before]
        )

    def ignore(self, *_, **__):
        return

    report_later = await_reports = tell_returned = tell_behind = tell_leaving = tell_exception = ignore
    forget_exception = formed = ignore


me = Worker()


class Play:
    """``ends_by_loss``: the indices of the worlds that end by a loss, not by plan."""

    def __init__(self, worlds, ends_by_loss=()):
        self.worlds, self.ends_by_loss = worlds, ends_by_loss
        self.alone = Job(1)
        self.jobs = [Job(len(world), local_size=len(world)) for world in worlds]

    def run(self, script):
        """What ``script(me)`` returns on each worker, by its number; None for one that was lost or has left."""
        numbers = sorted({number for world in self.worlds for number in world})
        try:
            found = in_threads(len(numbers), lambda index: self._live(numbers[index], script), PATIENCE_SECONDS)
        finally:
            for job in (self.alone, *self.jobs):
                outcome(job.shutdown)
        return dict(zip(numbers, found, strict=True))

    def _live(self, number, script):
        me.begin(self, number)
        try:
            return script(me)
        except (Lost, SystemExit):
            return None


def fake_driver(monkeypatch, *modules):
    """Let ``basics`` answer for the worker of the calling thread. ``modules`` know the samplers of this process."""
    own = SamplersOfWorker()
    for module in (session, sampler, *modules):
        monkeypatch.setattr(module, "samplers", own)
    monkeypatch.setattr(basics, "worlds", lambda: me)
    monkeypatch.setattr(basics, "engine", lambda: me.engine)
    monkeypatch.setattr(basics, "rank", lambda: me.numbers()[0])
    monkeypatch.setattr(basics, "size", lambda: me.numbers()[1])
    monkeypatch.setattr(basics, "wanted_sets", list)
    monkeypatch.setattr(basics, "shutdown", lambda: None)
    monkeypatch.setattr(basics, "change_world", me.go_to)
    monkeypatch.setattr(session, "tell_of_uncaught", lambda _: None)
    monkeypatch.setattr(type(global_process_set), "included", lambda _: True)
    monkeypatch.setattr(global_process_set, "process_set_id", 0)
