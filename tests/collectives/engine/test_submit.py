"""The requests that an engine accepts: names, in flight once, and calls that it refuses."""

import numpy as np
import pytest

from collectives.api import (
    DuplicateNameError,
    InvalidRequestError,
)
from tests.collectives.engine.job import (
    ones,
    run,
    running,
    submit,
    total,
    wait,
)

pytestmark = pytest.mark.usefixtures("transport")


# Order, names and handles.


def test_a_name_in_flight_is_refused_to_the_caller_only():
    with running(2) as job:
        engine, other = job.engines
        work = submit(engine, ones(engine), "x")
        with pytest.raises(DuplicateNameError, match="tensor 'x' is still in flight on rank 0"):
            submit(engine, ones(engine), "x")
        assert not work.done
        assert wait(other, submit(other, ones(other), "x"))[0] == 3.0
        np.testing.assert_array_equal(wait(engine, work), total(2))
        job.run(lambda engine: run(engine, ones(engine), "x"))


def test_more_unnamed_tensors_than_there_are_names_wait_their_turn():
    count = 600

    def body(engine):
        works = [submit(engine, ones(engine) + number) for number in range(count)]
        return [wait(engine, work)[0] for work in works]

    with running(2) as job:
        for results in job.run(body):
            assert results == [3.0 + 2 * number for number in range(count)]


def test_unnamed_tensors_of_a_process_set_do_not_shift_the_names_of_others():
    def body(engine):
        if engine.topology.rank < 2:
            run(engine, ones(engine), process_set=1)
            engine.barrier(process_set=1)
        engine.barrier()
        return run(engine, ones(engine))[0]

    with running(3, sets=[(0, 1)]) as job:
        assert job.run(body) == [6.0] * 3


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"process_set": 1}, "Rank 1 is not a member"),
        ({"process_set": 9}, "process set 9 does not exist"),
    ],
)
def test_a_call_that_no_other_rank_waits_for_is_refused_at_once_and_nothing_is_submitted(fields, says):
    with running(2, sets=[(0,)]) as job:
        for call in (submit, run):
            with pytest.raises(InvalidRequestError, match=says):
                call(job.engines[1], np.ones(3), "x", **fields)
        job.run(lambda engine: run(engine, ones(engine), "x"))
