"""The ways through the code of docs/architecture.md: a real run of each passes the files of its list, and no others."""

import re
from functools import cache

import pytest

import hvd_cluster
from tests.traces import ROOT, Trace, common

STEP = re.compile(r"^\d+\. `([\w/]+\.py)`: `([\w.]+)`", re.MULTILINE)
CALLS, WARM_UP = 20, 60


@cache
def told(title):
    """The files of a way, each with the functions that its steps name."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition(f"### {title}\n")[2].partition("\n##")[0]
    files = {}
    for file, function in STEP.findall(section):
        files.setdefault(file, set()).add(function)
    return files


def check(title, passed, most):
    """``passed`` are the files of each rank."""
    way, union = told(title), {}
    for files in passed:
        for file, functions in files.items():
            union.setdefault(file, set()).update(functions)
    assert set(union) == set(way)
    assert len(way) <= most
    called = {file: {name.rpartition(".")[2] for name in names} for file, names in union.items()}
    assert not {file: functions - called[file] for file, functions in way.items() if functions - called[file]}


def on_two_ranks(function, **variables):
    return hvd_cluster.run(function, num_proc=2, env={"PYTHONPATH": str(ROOT), **variables})


def traced_allreduce():
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
    return common(traces)


def test_a_synchronous_allreduce():
    pytest.importorskip("torch")
    check("A synchronous allreduce", on_two_ranks(traced_allreduce), 20)
