"""Ranks that the others have left behind."""

from membership_job import failed, ready, running, start, world

from executors.membership import HostFound, WorkerBehind


def test_a_rank_that_the_others_have_left_behind_is_no_failure_and_its_slot_is_filled_at_once():
    job = running(3, 2, resets=0, resizes=0)
    assert job.on(WorkerBehind("worker-1")) == [start(3, "a"), world(1, 0, 2)]
    assert job.on(failed(1), WorkerBehind("worker-1")) == []
    assert job.counts == (0, 0, 0)


def test_a_newcomer_that_the_others_have_left_behind_is_no_failure_of_its_host():
    job = running(2, 1, 3)
    job.on(HostFound("b", 1), ready(2))
    assert job.on(WorkerBehind("worker-2")) == [start(3, "b"), world(2, 0, 1)]
    assert job.form() == []
    assert job.on(ready(3)) == [world(3, 0, 1, 3, planned=True)]
    assert job.counts == (0, 2, 0)


def test_a_job_that_is_too_small_without_the_one_that_is_behind_waits_for_another():
    job = running(2, 2, may_find_hosts=False)
    assert job.on(WorkerBehind("worker-1")) == [start(2, "a")]
    assert job.on(ready(2)) == [world(1, 0, 2)]
