"""Jobs in the bypass: how they get there, and how far each rank is."""

import functools

import numpy as np

from collectives.api import (
    Operation,
    ReduceOp,
    Request,
)
from collectives.buffers import as_buffer, empty
from collectives.engine.work import Work
from collectives.events import Decided, Finished, Started, Submitted
from tests.collectives.engine.job import Watched, ones, run, submit, wait


class Counting(Watched):
    """A channel that counts what is sent."""

    def __init__(self, inner):
        super().__init__(inner)
        self.sent = 0
        self.send = self._count

    def _count(self, rank, data):
        self.sent += 1
        self._inner.send(rank, data)


class OneByOne(Watched):
    """A channel that brings one message at a time."""

    def __init__(self, inner):
        super().__init__(inner)
        self._here = []
        self.receive, self.peek = self._receive_one, lambda: bool(self._here) or inner.peek()

    def _receive_one(self):
        self._here += self._inner.receive()
        messages, self._here = self._here[:1], self._here[1:]
        return messages

    def _sleep(self, timeout):
        super()._sleep(0.0 if self._here else timeout)


NOTHING = np.zeros(0)


def warm_up(engine, name="x"):
    """Bring the engine into the bypass."""
    for _ in range(4):
        run(engine, ones(engine), name)


def warm_up_without_rows(engine, name):
    """Bring the engine into the bypass, with an operation that exchanges nothing."""
    for _ in range(4):
        run(engine, NOTHING, name, Operation.ALLGATHER)


def bypass_of(engine):
    """The rounds that the engine counts."""
    return engine._loop._bypass


def round_of(engine):
    """The number of the last round of the engine."""
    return bypass_of(engine)._round


def worker_of(engine):
    """The tensors that the engine has in flight."""
    return engine._loop._worker


def all_bypass(job):
    """Whether all ranks are."""
    return all(bypass_of(engine).on for engine in job.engines)


def group_of(engine, name, arrays, kinds=None, in_place=False, **fields):
    """Put ``arrays`` in flight, as a group that a caller waits for from the start; returns the works."""
    works = []
    for place, array in enumerate(arrays):
        source = as_buffer(array)
        chosen = {"operation": Operation.ALLREDUCE, "op": ReduceOp.SUM} | fields | (kinds[place] if kinds else {})
        request = Request(
            f"{name}[{place}]",
            dtype=source.dtype,
            shape=source.shape,
            group=name,
            group_size=len(arrays),
            **chosen,
        )
        fresh = functools.partial(empty, source.dtype)
        works.append(Work(request, source, source if in_place else fresh))
        works[-1].urged = True  # or the communication thread may take up the group before a caller waits
    engine.submit_group(works)
    return works


def submit_at_once(engine, names, factor=1.0, urged=False):
    """Put tensors in flight that are no group, but that the coordinator hears of in one message of this rank."""
    source = as_buffer(factor * ones(engine))
    fresh = functools.partial(empty, source.dtype)
    requests = [Request(name, Operation.ALLREDUCE, source.dtype, source.shape, op=ReduceOp.SUM) for name in names]
    works = [Work(request, source, fresh) for request in requests]
    works[-1].urged = urged
    engine._works.enter(works, unnamed=False)
    engine._queue.notify()
    return works


def stories(seen):
    """The events of the calls, and those of their batches, in the order in which a rank told them.

    The caller publishes the ones, and the thread that drives the others.
    """
    submitted = [event for event in seen if isinstance(event, Submitted)]
    return submitted, [event for event in seen if isinstance(event, Decided | Started | Finished)]


def results_of(engine, works):
    """The results of ``works``, as lists."""
    return [wait(engine, work).tolist() for work in works]


HALVES = (("a", "b"), ("c", "d", "e"))
NAMES = [name for half in HALVES for name in half]


def together(engine, names, factor=1.0):
    """Submit all tensors, then wait for them; returns the first element of each result, of which all are equal."""
    return first_elements(engine, [submit(engine, factor * ones(engine), name) for name in names])


def first_elements(engine, works):
    """The first element of each result, of which all are equal."""
    results = [wait(engine, work) for work in works]
    assert all((result == result[0]).all() for result in results)
    return [result[0] for result in results]


def in_halves(engine, factor=1.0):
    return [result for half in HALVES for result in together(engine, half, factor)]


def whole(engine, factor=1.0):
    return together(engine, NAMES, factor)
