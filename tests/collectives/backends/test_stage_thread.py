"""Calls that run on a thread beside the caller's."""

import subprocess
import sys
import threading
import weakref
from contextlib import closing
from pathlib import Path

import pytest

from collectives.backends.base import ignore_waits
from collectives.backends.hierarchical.thread import StageThread
from collectives.kernels.reduction import reduction

SCRIPT = """
import atexit
import sys

sys.path[:0] = {paths!r}
from tests.collectives.backends.test_stage_thread import reduce_in_pipeline

atexit.register(reduce_in_pipeline)
"""


@pytest.fixture
def beside():
    with closing(StageThread("hvd-test")) as thread:
        yield thread


def test_calls_run_in_their_order_and_on_one_thread_in_all_blocks(beside):
    seen = []
    for block in range(2):
        with beside as thread:
            for n in "ab":
                thread.submit(lambda n=(block, n): seen.append((n, threading.current_thread())))
        assert len(seen) == 2 * (block + 1)
    assert [n for n, _ in seen] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert {thread.name for _, thread in seen} == {"hvd-test"}
    assert len({thread for _, thread in seen}) == 1


def test_what_a_call_raises_is_raised_by_its_result_and_the_next_call_runs(beside):
    with beside as thread:
        failed, fine = thread.submit(lambda: 1 // 0), thread.submit(lambda: None)
        with pytest.raises(ZeroDivisionError):
            thread.finish(failed, ignore_waits)
        thread.finish(fine, ignore_waits)


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
        thread = StageThread("hvd-test")
        if is_used:
            with thread:
                pass
        thread.close()
        thread.close()
    assert "hvd-test" not in {each.name for each in threading.enumerate()}


def test_close_ends_a_thread_whose_start_was_interrupted(beside, monkeypatch):
    """The interrupt comes while the caller waits for the thread, which the system starts late."""
    gate, started = threading.Event(), beside._thread._started
    mark = started.set
    monkeypatch.setattr(started, "set", lambda: (gate.wait(20), mark()))
    monkeypatch.setattr(started, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt), beside:
        pytest.fail("the block begins")
    beside.close()
    gate.set()
    monkeypatch.undo()
    assert started.wait(20)
    beside._thread.join(20)
    assert not beside._thread.is_alive()


def interrupt():
    raise KeyboardInterrupt


HAMMER = """
import random, signal, sys
from collectives.backends.base import ignore_waits
from collectives.backends.hierarchical.thread import StageThread

def interrupt(*_):
    if armed:
        armed.clear()
        raise KeyboardInterrupt

armed, beside, interrupts = [], StageThread("hvd-test"), 0
signal.signal(signal.SIGALRM, interrupt)
while interrupts < 300:
    try:
        armed.append(True)
        signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-6, 1e-4))
        with beside as thread:
            for outcome in [thread.submit(lambda: None) for _ in range(3)]:
                thread.finish(outcome, ignore_waits)
        armed.clear()
    except KeyboardInterrupt:
        interrupts += 1
signal.setitimer(signal.ITIMER_REAL, 0)
beside.close()
"""


def test_a_block_ends_after_an_interrupt_at_any_time():
    result = subprocess.run([sys.executable, "-c", HAMMER], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("line", range(1, 9))
def test_an_interrupt_at_any_line_of_the_start_leaves_a_thread_that_runs(line):
    """There are fewer lines, so the last ones interrupt nothing."""
    lines = iter(range(1, line + 1))

    def trace(frame, event, argument):
        if frame.f_code.co_filename != StageThread.__enter__.__code__.co_filename:
            return None
        if event == "line" and next(lines, line) == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    beside, done = StageThread("hvd-test"), []
    try:
        sys.settrace(trace)
        with beside:
            sys.settrace(None)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    with beside as thread:
        outcome = thread.submit(lambda: done.append(1))
        assert outcome.get(timeout=10) is None
    beside.close()
    assert done == [1]


class Memory:
    """Something that a call refers to."""


def test_the_thread_lets_go_of_a_call_before_the_end_of_its_block(beside):
    for _ in range(300):
        memory = Memory()
        gone = weakref.ref(memory)
        with beside as thread:
            thread.finish(thread.submit(lambda memory=memory: None), ignore_waits)
        del memory
        assert gone() is None


def reduce_in_pipeline():
    """An allreduce in pieces, among four ranks on two hosts that are threads of this process."""
    import numpy as np

    from collectives.api import DType, ReduceOp
    from tests.collectives.backends.members import in_threads
    from tests.collectives.backends.test_hierarchical import Hosts

    def body(rank):
        values = np.ones(1 << 16, np.float32)
        with closing(hosts.member(rank, pipeline_piece=1 << 16)) as backend:
            backend.allreduce_arrays([values], [values], reduction(DType.FLOAT32, ReduceOp.SUM))
        return values[-1]

    hosts = Hosts("aabb")
    sys.stdout.write(str(in_threads(4, body)))


def test_a_pipeline_runs_while_the_interpreter_shuts_down():
    """Which is when the engine of a script that has ended runs what is still in flight."""
    here = Path(__file__).parent
    script = SCRIPT.format(paths=[str(here.parents[2]), str(here)])
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.count("4.0") == 4, result.stderr
