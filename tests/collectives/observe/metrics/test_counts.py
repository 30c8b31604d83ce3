"""What an engine counts, on one rank and on several."""

import json
import threading

import numpy as np
import pytest

from collectives.api import MEBIBYTE, MismatchError, Operation
from collectives.engine.counters import NO_COUNTS, Counts, SetCounts
from tests.collectives.engine.job import Caller, ones, run, running, submit, until, wait

ITEM = 8
PAUSE_SECONDS = 0.03


def test_counts_add_up():
    first = Counts({0: SetCounts({"allreduce": 2}, 24, 1, late_seconds=0.5)}, 3, 4)
    second = Counts(
        {0: SetCounts({"allreduce": 1, "barrier": 1}, 8, 2, failures=1), 2: SetCounts({"broadcast": 1})}, 1, 1
    )
    both = first + second
    assert both.sets[0] == SetCounts({"allreduce": 3, "barrier": 1}, 32, 3, late_seconds=0.5, failures=1)
    assert both.sets[2] == SetCounts({"broadcast": 1})
    assert (both.messages_sent, both.messages_received) == (4, 5)
    assert first + NO_COUNTS == NO_COUNTS + first == first


def test_shares_of_nothing_are_none():
    counts = SetCounts()
    assert (counts.tensors, counts.tensors_per_batch, counts.fusion_fill, counts.cache_hits) == (0, 0.0, 0.0, 0)


def test_numbers_that_follow_from_others():
    counts = SetCounts({"allreduce": 8, "allgather": 2}, 400, 4, 1600, 0.25, 0.5, 1.0, 2, 3, 1)
    assert (counts.tensors, counts.tensors_per_batch, counts.fusion_fill) == (10, 2.5, 0.25)
    assert (counts.waiting_seconds, counts.cache_hits) == (0.75, 7)
    shown = counts.as_dict()
    assert json.loads(json.dumps(shown)) == shown
    assert (shown["fusion_fill"], shown["operations"]) == (0.25, {"allreduce": 8, "allgather": 2})


@pytest.fixture(params=[False, True], ids=["threads", "shared memory"])
def job(request):
    with running(2, shared_memory=request.param) as job:
        yield job


def test_operations_bytes_and_batches(job):
    def body(engine):
        for _ in range(5):
            run(engine, ones(engine), "x")
        run(engine, ones(engine, 10), "y", Operation.ALLGATHER)
        engine.barrier()
        return engine.counts()

    for counts in job.run(body):
        assert counts.sets.keys() == {0}
        own = counts.sets[0]
        assert own.operations == {"allreduce": 5, "allgather": 1, "barrier": 1}
        assert (own.bytes, own.batches, own.failures) == (5 * 3 * ITEM + 10 * ITEM, 7, 0)
        assert own.capacity == 6 * 128 * MEBIBYTE
        assert own.backend_seconds > 0
        assert (own.introduced, own.cache_hits) == (3, 4)
        assert counts.messages_sent
        assert counts.messages_received


def test_tensors_that_travel_together(job):
    def body(engine):
        works = [submit(engine, ones(engine), f"tensor {place}") for place in range(4)]
        for work in works:
            wait(engine, work)
        return engine.counts().sets[0]

    for counts in job.run(body):
        assert counts.tensors == 4
        assert 1 <= counts.batches <= 4
        assert counts.tensors_per_batch == 4 / counts.batches


def test_time_is_counted_once(job):
    """Waits and the time in the backend are parts of the time that has passed."""

    def body(engine):
        for _ in range(20):
            run(engine, np.ones(300_000), "x")
        return engine.counts().sets[0]

    counts = job.run(body)
    assert all(each.late_seconds >= 0 and each.inside_seconds >= 0 and each.backend_seconds > 0 for each in counts)


def test_process_sets_are_counted_apart():
    with running(3, sets=[(0, 2)]) as job:

        def body(engine):
            run(engine, ones(engine), "all")
            if engine.topology.rank != 1:
                for _ in range(3):
                    run(engine, ones(engine), "some", process_set=1)
            return {id: counts.tensors for id, counts in engine.counts().sets.items()}

        assert job.run(body) == [{0: 1, 1: 3}, {0: 1}, {0: 1, 1: 3}]


def test_the_rank_that_waits_counts_it_and_the_late_one_does_not(job):
    pause = threading.Event()
    for name in ("first", "again", "again"):
        early = Caller(job.engines[0], name)
        until(lambda: job.engines[0]._works)
        pause.wait(PAUSE_SECONDS)
        assert run(job.engines[1], ones(job.engines[1]), name)[0] == 3.0
        assert early.result()[0] == 3.0
    first, second = [engine.counts().sets[0] for engine in job.engines]
    assert first.batches == second.batches == 3
    assert first.late_seconds >= PAUSE_SECONDS
    assert first.waits
    assert second.late_seconds < first.late_seconds


def test_a_tensor_that_the_ranks_disagree_about_is_a_failure():
    with running(2) as job:

        def body(engine):
            with pytest.raises(MismatchError):
                run(engine, ones(engine, 3 + engine.topology.rank), "x")
            return engine.counts().sets[0]

        assert [(counts.failures, counts.batches) for counts in job.run(body)] == [(1, 0)] * 2
