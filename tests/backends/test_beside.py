"""Calls that run on a thread beside the caller's."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from collectives.backends.beside import Beside

SCRIPT = """
import atexit
import sys

sys.path[:0] = {paths!r}
from tests.backends.test_beside import reduce_in_pipeline

atexit.register(reduce_in_pipeline)
"""


def test_calls_run_in_their_order_and_not_on_this_thread():
    seen = []
    with Beside("hvd-test") as thread:
        futures = [thread.submit(lambda n=n: seen.append((n, threading.current_thread().name))) for n in range(3)]
    assert [future.result() for future in futures] == [None] * 3
    assert seen == [(n, "hvd-test") for n in range(3)]


def test_what_a_call_raises_is_raised_by_its_result_and_the_next_call_runs():
    with Beside("hvd-test") as thread:
        failed, fine = thread.submit(lambda: 1 // 0), thread.submit(lambda: None)
        with pytest.raises(ZeroDivisionError):
            failed.result()
        assert fine.result() is None


def reduce_in_pipeline():
    """An allreduce in pieces, among four ranks on two hosts that are threads of this process."""
    import numpy as np

    from collectives.api import DType, ReduceOp
    from tests.backends.members import in_threads
    from tests.backends.test_hierarchical import Hosts

    def body(rank):
        values = np.ones(1 << 16, np.float32)
        hosts.member(rank, pipeline_piece=1 << 16).allreduce_arrays([values], [values], DType.FLOAT32, ReduceOp.SUM)
        return values[-1]

    hosts = Hosts("aabb")
    sys.stdout.write(str(in_threads(4, body)))


def test_a_pipeline_runs_while_the_interpreter_shuts_down():
    """Which is when the engine of a script that has ended runs what is still in flight."""
    here = Path(__file__).parent
    script = SCRIPT.format(paths=[str(here.parents[1]), str(here)])
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.count("4.0") == 4, result.stderr
