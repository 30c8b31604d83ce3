"""The ways through the code of docs/architecture.md: a real run of each passes the files of its list, and no others."""

import re
from functools import cache

import pytest

import hvd_cluster
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
    return hvd_cluster.run(function, num_proc=2, env={"PYTHONPATH": str(ROOT), **variables})


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
