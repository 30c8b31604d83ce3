"""Ranks that are threads of one process, for parts of hvd_cluster that ask for the engine of their process."""

import threading

from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet
from tests.collectives.engine.job import running


class Rank(threading.local):
    """The engine of the rank that the calling thread plays, and its set of all ranks."""

    engine = process_set = None

    @property
    def number(self):
        return self.engine.topology.rank


class AllRanks(ProcessSet):
    """The global set of one rank of a job in this process."""

    def included(self):
        return True


def player(monkeypatch):
    """A function ``on_ranks(size, body, patient=False)``: the results of ``body(rank)`` on each rank of a new job."""
    rank = Rank()
    monkeypatch.setattr(basics, "engine", lambda: rank.engine)
    monkeypatch.setattr(basics, "rank", lambda: rank.number)
    monkeypatch.setattr(basics, "size", lambda: rank.engine.topology.size)

    def on_ranks(size, body, patient=False):
        def played(engine):
            rank.engine, rank.process_set = engine, AllRanks(range(size))
            rank.process_set._register(0, tuple(range(size)), rank.number)
            return body(rank)

        with running(size, local_size=size if patient else 1) as job:
            return job.run(played)

    return on_ranks
