"""Calls that run on a thread beside the caller's."""

import subprocess
import sys
import threading
from contextlib import closing
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


@pytest.fixture
def beside():
    with closing(Beside("hvd-test")) as thread:
        yield thread


def test_calls_run_in_their_order_and_on_one_thread_in_all_blocks(beside):
    seen = []
    for block in range(2):
        with beside as thread:
            futures = [thread.submit(lambda n=(block, n): seen.append((n, threading.current_thread()))) for n in "ab"]
        assert all(future.done() for future in futures)
    assert [n for n, _ in seen] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert {thread.name for _, thread in seen} == {"hvd-test"}
    assert len({thread for _, thread in seen}) == 1


def test_what_a_call_raises_is_raised_by_its_result_and_the_next_call_runs(beside):
    with beside as thread:
        failed, fine = thread.submit(lambda: 1 // 0), thread.submit(lambda: None)
        with pytest.raises(ZeroDivisionError):
            failed.result()
        assert fine.result() is None


def test_the_end_of_a_block_waits_for_its_calls_also_after_an_error(beside):
    def call():
        assert begun.wait(20)
        seen.append("call")

    def leave():
        with beside as thread:
            thread.submit(call)
            try:
                raise ValueError("outside")
            finally:
                begun.set()

    seen, begun = [], threading.Event()
    with pytest.raises(ValueError, match="outside"):
        leave()
    assert seen == ["call"]


def test_close_ends_the_thread_and_a_thread_that_never_started():
    for is_used in (False, True):
        thread = Beside("hvd-test")
        if is_used:
            with thread:
                pass
        thread.close()
        thread.close()
    assert "hvd-test" not in {each.name for each in threading.enumerate()}


def reduce_in_pipeline():
    """An allreduce in pieces, among four ranks on two hosts that are threads of this process."""
    import numpy as np

    from collectives.api import DType, ReduceOp
    from tests.backends.members import in_threads
    from tests.backends.test_hierarchical import Hosts

    def body(rank):
        values = np.ones(1 << 16, np.float32)
        with closing(hosts.member(rank, pipeline_piece=1 << 16)) as backend:
            backend.allreduce_arrays([values], [values], DType.FLOAT32, ReduceOp.SUM)
        return values[-1]

    hosts = Hosts("aabb")
    sys.stdout.write(str(in_threads(4, body)))


def test_a_pipeline_runs_while_the_interpreter_shuts_down():
    """Which is when the engine of a script that has ended runs what is still in flight."""
    here = Path(__file__).parent
    script = SCRIPT.format(paths=[str(here.parents[1]), str(here)])
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.count("4.0") == 4, result.stderr
