"""Ranks as real processes that stay up between tests: one launch per number of ranks, not per test."""

import contextlib
import gc
import os
import time
from multiprocessing.connection import Connection, wait

import cloudpickle
import pytest

from executors.driver.outcome import capture
from executors.job.job import Job
from executors.job.worlds import assign_ranks
from tests.collectives.backends.members import forking_context
from tests.namespaces import stay_inside

ANSWER_SECONDS = 100  # pytest ends a test soon after


def fixtures(kind, sizes):
    """The fixtures ``pools``, ``ranks`` and ``fresh_pool`` of a binding, for its conftest; ranks are of ``kind``."""

    @pytest.fixture(scope="session")
    def pools():
        """See :func:`pools_of`."""
        with pools_of(kind) as get:
            yield get

    @pytest.fixture(scope="session", params=sizes)
    def ranks(request, pools):
        """A pool of each size, or of the sizes a test gives by indirect parameters; all ranks on one host."""
        return pools(request.param)

    @pytest.fixture
    def fresh_pool():
        """``fresh_pool(size, ...)``: ranks for one test, for those that kill ranks or end engines."""
        made = []
        try:
            yield lambda *args, **kwargs: made.append(kind(*args, **kwargs)) or made[-1]
        finally:
            for pool in made:
                pool.close()

    return pools, ranks, fresh_pool


@pytest.fixture(autouse=True, scope="module")
def by_value(request):
    """Functions of the test module travel by value: ranks need not import the tests."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@contextlib.contextmanager
def pools_of(kind):
    """``pools(size)`` or ``pools(size, hosts)``: ranks of ``kind`` in a world of their own, used again."""
    made = {}

    def get(size, hosts=None):
        key = (size, tuple(hosts or ()))
        if key not in made:
            made[key] = kind(size, hosts)
            made[key].run(_initialize)
        return made[key]

    try:
        yield get
    finally:
        for pool in made.values():
            pool.close()


def _initialize():
    from hvd_cluster.core import basics

    basics.init()


class Pool:
    """``size`` processes in a job of their own; ``hosts`` says which of them believe to share a host.

    In a ``network`` of namespaces they do share one, and the first is that of the job. A subclass says how a process
    prepares itself for its framework: a function of a module, which ranks can import.
    """

    prepare = None
    context = staticmethod(forking_context)

    def __init__(self, size, hosts=None, environment=None, network=None):
        self.size = size
        self._job = Job(size, network.address if network else "127.0.0.1")
        inside = network.inside if network else lambda host: contextlib.nullcontext()
        with inside(hosts[0] if hosts else None):
            self._job.__enter__()
        context = self.context()
        self._links, self.processes = [], []
        for slot in assign_ranks(hosts or ["here"] * size):
            link, far_link = context.Pipe()
            variables = {**os.environ, **self._job.environment(slot), **(environment or {})}
            namespace = network.path(slot.host) if network else None
            arguments = (far_link, slot.rank, variables, namespace, self.prepare)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            far_link.close()
            self._links.append(link)
            self.processes.append(process)

    def run(self, function, *args):
        """``function(*args)`` on every rank; values, or the exception of a rank, by rank."""
        return [outcome.unwrap() for outcome in self.outcomes(function, *args)]

    def outcomes(self, function, *args, ranks=None, then=lambda: None):
        """The outcomes by rank, of ``ranks`` only if given; None for a rank whose process has ended.

        ``then`` is called when all ranks have got the function. The exception of a rank outside ``ranks`` is raised,
        if it comes while another rank is waited for.
        """
        task = cloudpickle.dumps((function, args))
        for link in self._links:
            link.send_bytes(task)
        then()
        awaited = [self._links[rank] for rank in ranks or range(self.size)]
        others = [link for link in self._links if link not in awaited]
        return [_answer(link, others) for link in awaited]

    def close(self):
        """End the processes."""
        for link in self._links:
            link.close()
        for process in self.processes:
            process.join(10)
            process.kill()
            process.join()
            process.close()
        self._job.__exit__(None, None, None)


def _answer(link, others):
    deadline = time.monotonic() + ANSWER_SECONDS
    while not link.poll():
        ready = wait([link, *others], deadline - time.monotonic())
        assert ready, f"no answer from a rank within {ANSWER_SECONDS} s"
        for other in set(others).intersection(ready):
            others.remove(other)
            _raise_error(_received(other))
    return _received(link)


def _raise_error(outcome):
    if outcome is not None:
        outcome.unwrap()


def _received(link):
    try:
        return cloudpickle.loads(link.recv_bytes())
    except (EOFError, ConnectionResetError):
        return None


def _serve(link: Connection, rank, variables, namespace, prepare):
    if namespace:
        stay_inside(namespace)
    os.environ.clear()
    os.environ.update(variables, OMP_NUM_THREADS="1")
    prepare()
    gc.freeze()  # or each collection looks at all of the framework
    from hvd_cluster.core import basics

    while True:
        wait([link])
        try:
            function, args = cloudpickle.loads(link.recv_bytes())
        except EOFError:
            basics.shutdown()
            return
        link.send_bytes(capture(lambda: function(*args), rank, "here"))  # noqa: B023 - called at once
