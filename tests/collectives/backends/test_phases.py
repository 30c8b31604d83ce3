"""The phases that backends report, and that nothing is timed unless an observer listens."""

import sys
from contextlib import ExitStack, closing

import numpy as np
import pytest

from collectives.api import ReduceOp
from collectives.backends.gloo import GlooBootstrap
from collectives.backends.phases import Receiver, phase, phases_in, time_phases
from collectives.backends.shm import ShmBootstrap
from collectives.buffers import as_buffer
from collectives.store.memory import MemoryStore
from tests.collectives.backends.members import group_of, in_threads
from tests.collectives.backends.offers import meet
from tests.collectives.backends.test_hierarchical import Hosts

TIMEOUT = 20.0
LARGE = 3 << 18
"""Elements of float64: several buffers of shared memory, and pieces of a pipeline."""


class Base:
    @phase("work")
    def work(self, number):
        """For a subclass."""


class Worker(Base):
    def __init__(self):
        self.done = []

    def work(self, number):
        self.done.append(number)
        return number

    @phases_in(first="begin", second="end")
    def both(self, first, second, number):
        return first(number), second(number)

    @staticmethod
    @phase("static")
    def fixed(number):
        return number


def test_marked_methods_are_replaced_as_long_as_they_are_timed():
    worker, seen = Worker(), []
    plain = dict(vars(worker))
    time_phases(worker, Receiver(seen.append))
    assert (worker.work(3), worker.both(worker.work, abs, number=-4), worker.fixed(5)) == (3, (-4, 4), 5)
    assert [name for name, _, _ in seen] == ["work", "work", "begin", "end", "static"]
    assert all(begin <= end for _, begin, end in seen)
    time_phases(worker, None)
    assert vars(worker) == plain
    assert worker.work(6) == 6
    assert worker.done == [3, -4, 6]
    assert len(seen) == 5


def test_a_second_observer_replaces_the_first():
    worker, first, second = Worker(), [], []
    time_phases(worker, Receiver(first.append))
    time_phases(worker, Receiver(second.append))
    worker.work(1)
    assert (len(first), len(second)) == (0, 1)


def test_a_call_that_fails_is_a_phase_too():
    worker, seen = Worker(), []
    time_phases(worker, Receiver(seen.append))
    with pytest.raises(TypeError):
        worker.both(abs, len, 3)
    assert [name for name, _, _ in seen] == ["begin", "end"]


def calls(backend, count):
    """Each operation, by name; the arrays have ``count`` elements of float64 a member."""
    size = backend.group.size
    one, all_of_them = np.ones(count), np.empty(count * size)
    counts = [one.nbytes] * size
    return {
        "allreduce": lambda: backend.allreduce([as_buffer(one)], [as_buffer(np.empty(count))], ReduceOp.SUM),
        "reducescatter": lambda: backend.reducescatter(
            [as_buffer(np.ones(count * size))], [as_buffer(one)], [count] * size, ReduceOp.SUM
        ),
        "allgather": lambda: backend.allgather([as_buffer(one)], [as_buffer(all_of_them)], counts),
        "broadcast": lambda: backend.broadcast(as_buffer(one), as_buffer(np.empty(count)), 0),
        "alltoall": lambda: backend.alltoall(
            as_buffer(np.ones(count * size)), as_buffer(np.empty(count * size)), counts, counts
        ),
        "barrier": backend.barrier,
    }


def phases_of(backend, count):
    """For each operation the names of its phases, after the same operations without an observer."""
    found = {}
    for name, call in calls(backend, count).items():
        seen = []
        call()
        backend.observe(seen.append)
        call()
        backend.observe(None)
        call()
        assert all(begin <= end for _, begin, end in seen)
        found[name] = {phase for phase, _, _ in seen}
    return found


def shm(group, timeout):
    return ShmBootstrap(group, timeout, crowded=True)


def connect(bootstrap, size, body):
    def member(rank):
        backend = meet(bootstrap(group_of(size, rank), TIMEOUT), store, TIMEOUT)
        stack.callback(backend.close)  # in the end: it may end the operations of others
        return body(backend)

    store = MemoryStore()
    with ExitStack() as stack:
        return in_threads(size, member)


MOVED = {"copy in", "wait for ranks", "copy out"}


def test_shared_memory():
    for found in connect(shm, 2, lambda backend: phases_of(backend, LARGE)):
        assert found == {
            "allreduce": MOVED | {"combine"},
            "reducescatter": MOVED,
            "allgather": MOVED,
            "broadcast": {"wait for ranks"},
            "alltoall": MOVED,
            "barrier": {"wait for ranks"},
        }


def test_small_operations_in_shared_memory():
    for found in connect(shm, 2, lambda backend: phases_of(backend, 8)):
        assert all("wait for ranks" in phases for phases in found.values())


@pytest.mark.parametrize("count", [8, LARGE])
def test_gloo(count):
    for found in connect(GlooBootstrap, 2, lambda backend: phases_of(backend, count)):
        assert all("exchange" in phases for phases in found.values())
        assert "combine" in found["reducescatter"]


def test_a_reduction_that_gloo_does_not_compute_itself():
    def body(backend):
        seen = []
        backend.observe(lambda span: seen.append(span[0]))
        for count in (8, LARGE):
            array = np.ones(count, np.float16)
            backend.allreduce([as_buffer(array)], [as_buffer(array)], ReduceOp.SUM)
        return seen

    expected = ["copy in", "exchange", "combine", "exchange", "combine", "exchange"]
    assert connect(GlooBootstrap, 2, body) == [expected] * 2


def test_stages():
    def body(rank):
        with closing(hosts.member(rank)) as backend:
            return phases_of(backend, LARGE)

    hosts = Hosts("aabb")
    for found in in_threads(4, body):
        assert found["allreduce"] == {"reduce on the host", "exchange between hosts", "hand out on the host"}
        assert found["allgather"] == {"gather between hosts"}
        assert "broadcast on the host" in found["broadcast"]


def test_without_an_observer_an_operation_makes_the_calls_that_it_made_before_the_first():
    def body(backend):
        call = calls(backend, 8)["allreduce"]
        call()
        before = made_by(call)
        backend.observe(lambda span: None)
        watched = made_by(call)
        backend.observe(None)
        return before, watched, made_by(call)

    for before, watched, after in connect(shm, 2, body):
        assert after == before
        assert watched > before


def made_by(call):
    """The number of Python calls in ``call``, but for those of the barrier, which depend on the other member."""
    made, of_barrier = [], ("/barrier.py", "/base.py")

    def note(frame, event, _):
        if event == "call" and not frame.f_code.co_filename.endswith(of_barrier):
            made.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(made)
