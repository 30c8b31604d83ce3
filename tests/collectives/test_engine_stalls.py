"""What an engine says about tensors that wait for ranks that do not come, and when it gives up."""

import pytest

from collectives.api import CollectiveTimeoutError
from tests.collectives.job import Caller, ones, outcome, run, running, submit, until

pytestmark = pytest.mark.usefixtures("transport")


@pytest.mark.parametrize("asleep", [False, True])
def test_what_waits_is_reported_again_and_again_and_still_runs(caplog, asleep):
    with running(3, stall_warning=0.05) as job:
        if asleep:
            submit(job.engines[2], ones(job.engines[2]), "x")
        callers = [] if asleep else [Caller(job.engines[rank], "x") for rank in (0, 2)]
        until(lambda: len(caplog.records) >= 2)
        for record in caplog.records:
            assert "missing rank" in record.getMessage()
            assert "'x'" in record.getMessage()
        if asleep:
            callers = [Caller(job.engines[0], "x")]
        assert run(job.engines[1], ones(job.engines[1]), "x")[0] == 6.0
        assert [caller.result()[0] for caller in callers] == [6.0] * len(callers)


def test_after_the_shutdown_time_all_ranks_end_with_the_report():
    def body(engine):
        if engine.topology.rank:
            return outcome(lambda: run(engine, ones(engine), "x"))
        return outcome(lambda: run(engine, ones(engine), "y"))

    with running(3, stall_warning=0.05, stall_shutdown=0.2) as job:
        errors = job.run(body)
    for error in errors:
        assert isinstance(error, CollectiveTimeoutError)
        assert "missing rank 0: 'x'" in str(error)
        assert "missing ranks 1, 2: 'y'" in str(error)
        assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS (0.2)" in str(error)


def test_nothing_is_said_about_who_waits_to_be_joined(caplog):
    with running(2, stall_warning=0.02) as job:
        joined = Caller(job.engines[0], body=lambda engine: engine.join())
        until(lambda: job.engines[0]._exchange._link._lookout.deadline is not None)
        planned = job.engines[0]._exchange._link._lookout.deadline
        until(lambda: job.engines[0]._exchange._link._lookout.deadline != planned)
        job.engines[1].join()
        joined.result()
    assert not caplog.records
