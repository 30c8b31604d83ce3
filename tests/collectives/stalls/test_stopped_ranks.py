"""A rank that does not act inside an operation: the others say so, and name it. Ranks are threads of one process."""

import contextlib
import threading

import pytest

from collectives.api import CollectiveTimeoutError, Timeouts
from tests.collectives.engine.job import PATIENCE, Caller, ones, outcome, run, running, until

pytestmark = pytest.mark.usefixtures("transport")

TIMEOUTS = Timeouts(connect=10.0, collective=2.5)
GLOO_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"


@contextlib.contextmanager
def stopped(job, rank):
    """The next operation of ``rank`` does not begin, and its thread does nothing, until the end of the block."""
    resumed, inside = threading.Event(), threading.Event()
    [backend] = job.backends[rank][0].by_device.values()
    operation = backend.allreduce

    def wait(*arguments):
        inside.set()
        resumed.wait(PATIENCE)
        return operation(*arguments)

    backend.allreduce = wait
    try:
        yield inside
    finally:
        resumed.set()


def lines(caplog, rank):
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(f"rank {rank} waits")]


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_the_other_ranks_report_and_name_a_rank_that_stops_inside_an_operation(caplog, victim):
    with running(4, shared_memory=True, stall_warning=0.3, timeouts=TIMEOUTS) as job:
        with stopped(job, victim):
            callers = [Caller(engine, "x") for engine in job.engines]
            errors = [caller.result() for caller in callers if caller.rank != victim]
        callers[victim].result()
    for error in errors:
        assert isinstance(error, CollectiveTimeoutError)
        assert error.ranks == (victim,)
        assert (error.tensors, error.batch) == (("x",), 0)
        assert f"rank {victim} on host 'host-{victim}': no answer for" in str(error)
        assert GLOO_TIMEOUT not in str(error)
    for rank in {0, 1, 2, 3} - {victim}:
        found = lines(caplog, rank)
        assert any("inside the operation on 'x'" in line for line in found)
        inside = [each for each in caplog.records if each.getMessage().startswith(f"rank {rank} waits inside")]
        assert {(each.tensors, each.batch) for each in inside} == {(("x",), 0)}
        assert any(f"rank {victim} on host 'host-{victim}': no answer" in line for line in found)


def test_a_rank_that_resumes_in_time_ends_the_wait(caplog):
    with running(3, shared_memory=True, stall_warning=0.1) as job:
        with stopped(job, 1):
            callers = [Caller(engine, "x") for engine in job.engines]
            until(lambda: any("no answer" in line for line in lines(caplog, 2)))
        assert [caller.result()[0] for caller in callers] == [6.0] * 3
        assert [found[0] for found in job.run(lambda engine: run(engine, ones(engine), "y"))] == [6.0] * 3


def test_messages_that_come_during_an_operation_are_acted_on_after_it():
    """A tensor that the others submit meanwhile, and the answer of rank 0 to it."""
    with running(3, shared_memory=True, stall_warning=0.1) as job:
        with stopped(job, 1) as inside:
            callers = [Caller(engine, "x") for engine in job.engines]
            assert inside.wait(PATIENCE)
            later = [Caller(engine, "y") for engine in job.engines]
        assert [caller.result()[0] for caller in [*callers, *later]] == [6.0] * 6


def test_an_error_of_ranks_that_all_run_names_the_variable_that_bounds_the_wait():
    """A rank comes to a barrier that no other rank comes to: its backend alone has the operation."""
    with running(2, shared_memory=True, timeouts=Timeouts(connect=10.0, collective=2.0)) as job:
        [backend] = job.backends[1][0].by_device.values()
        job.run(lambda engine: run(engine, ones(engine), "x"))
        backend.allreduce = lambda *_: backend._barrier.cross() or backend._barrier.cross()
        error = outcome(lambda: job.run(lambda engine: run(engine, ones(engine), "y")))
    assert isinstance(error, CollectiveTimeoutError)
    assert "Every rank runs" in str(error)
    assert f"Raise {GLOO_TIMEOUT} if" in str(error)
