"""The ways through the code of docs/architecture.md: a real run of each passes the files of its list, and no others."""

import re
from functools import cache

import pytest

import hvd_cluster
from collectives.store import memory
from executors.agents.hosts.job import HostsOptions, run_command
from executors.agents.local import guard, supervisor
from executors.agents.local import job as programs
from executors.api import WorkerError
from executors.job import worlds
from executors.membership import Limits
from tests import startup
from tests.traces import ROOT, Trace, common

STEP = re.compile(r"^\d+\. `([\w/]+\.py)`: `(\w+)`", re.MULTILINE)
CALLS, WARM_UP = 40, 60


@cache
def told(title):
    """The files of a way, each with the functions that its steps name."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition(f"### {title}\n")[2].partition("\n##")[0]
    files = {}
    for file, function in STEP.findall(section):
        files.setdefault(file, set()).add(function)
    return files


def check(title, ranks, most):
    """``ranks`` has the files that each rank passed, with the functions there."""
    way, passed = told(title), {}
    for files in ranks:
        for file, functions in files.items():
            passed.setdefault(file, set()).update(functions)
    assert set(passed) == set(way)
    assert len(way) <= most
    assert not {file: functions - passed[file] for file, functions in way.items() if functions - passed[file]}


def on_two_ranks(function, **variables):
    return hvd_cluster.run(function, num_proc=2, env={"PYTHONPATH": startup.PATH, **variables})


def traced_allreduces():
    """Calls in which this thread runs the operation. In others it comes late, and the engine's own thread does."""
    import torch

    import hvd_cluster.torch as hvd

    hvd.init()
    tensor, traces = torch.ones(8), []
    for _ in range(WARM_UP):
        hvd.allreduce(tensor, name="values")
    for _ in range(CALLS):
        with Trace() as trace:
            hvd.allreduce(tensor, name="values")
        traces.append(trace)
    hvd.shutdown()
    return common([trace for trace in traces if "collectives/backends/shm/barrier.py" in trace.functions])


def test_a_synchronous_allreduce():
    pytest.importorskip("torch")
    check("A synchronous allreduce", on_two_ranks(traced_allreduces), 20)


class UpToTheEngine(Trace):
    """What this thread calls before it last hands tensors to the engine, without the calls within the engine."""

    def __init__(self):
        super().__init__()
        self._reached, self._depth = {}, 0

    def _note(self, frame, event, argument):
        file = frame.f_code.co_filename[len(str(ROOT)) + 1 :]
        if file.startswith("collectives/engine/") and event in ("call", "return"):
            self._depth += 1 if event == "call" else -1
            if frame.f_code.co_name in ("submit", "submit_group"):
                self.functions = {file: set(names) for file, names in self._reached.items()}
        elif not self._depth:
            functions, self.functions = self.functions, self._reached
            super()._note(frame, event, argument)
            self.functions = functions


def traced_gradients():
    """Of a small and a large one, in the last of some steps."""
    import torch

    import hvd_cluster.torch as hvd

    hvd.init()
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (5, 40_000, 6)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum)
    for _ in range(5):
        loss = sum(each.sum() for each in parameters)
        with UpToTheEngine() as trace:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    hvd.shutdown()
    return trace.functions


@pytest.mark.parametrize("variables", [{}, {"HOROVOD_CYCLE_TIME": "1"}], ids=["in step()", "during backward"])
def test_a_gradient_from_its_hook_to_the_engine(variables):
    pytest.importorskip("torch")
    check("A gradient, from its hook to the engine", on_two_ranks(traced_gradients, **variables), 7)


class FromItsEnd(Trace):
    """The calls of this thread from the end of a process to the world that the driver then publishes.

    The file ``up`` comes when all ``size`` processes have started, ``over`` with the new world.
    """

    def __init__(self, size, up, over):
        super().__init__()
        self._starting, self._up, self._over = size, up, over
        self._has_begun = self._is_published = False

    def _note(self, frame, event, argument):
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if event == "return" and name == "started" and file == programs.__file__:
            self._starting -= 1
            if not self._starting:
                self._up.touch()
        self._has_begun |= event == "call" and name == "_end_of" and file == supervisor.__file__
        if not self._has_begun or self._is_published:
            return
        super()._note(frame, event, argument)
        if name == "set" and file == memory.__file__ and frame.f_locals["key"].startswith(worlds.WORLDS):
            self._is_published = True
            self._over.touch()


def test_the_death_of_a_worker(tmp_path):
    """The guard, a process of its own, hears of it from the kernel."""
    up, over = tmp_path / "up", tmp_path / "over"
    wait = "until [ -e {} ]; do sleep 0.05; done"
    script = f"{wait.format(up)}; [ $HOROVOD_RANK = 1 ] && kill -KILL $$; {wait.format(over)}"
    limits, options = Limits(3, 2, 3, may_find_hosts=False), HostsOptions(hosts={"localhost": 3})
    killed = pytest.raises(WorkerError, match="rank 1 on localhost was killed by signal 9")
    with killed, FromItsEnd(3, up, over) as trace:
        run_command(["sh", "-c", script], limits, options)
    check("The death of a worker", [trace.functions, {"executors/agents/local/guard.py": {"_reap"}}], 9)
    assert callable(guard.Guard._reap)


def test_a_row_of_a_dataframe(tmp_path):
    """Both processes are this one."""
    pytest.importorskip("pyspark")
    from pyspark.sql.types import DoubleType, LongType

    from tests.hvd_cluster.spark.row_feeds import batch, never, opened, rows_of

    rows = rows_of({"x": DoubleType(), "y": LongType()}, ["y"], shuffle=True)
    batches = [batch(x=[1.0] * 40, y=[1] * 40)] * 3
    with opened(rows, tmp_path) as (feed, shard):
        with Trace() as task:
            feed.feed(iter(batches), never)
        with Trace() as worker:
            assert len([*shard, *shard]) == 60
    check("A row of a DataFrame", [task.functions, worker.functions], 8)
