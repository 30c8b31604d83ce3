"""Hosts and workers that will be gone, with time to leave."""

from membership_job import Job, failed, ready, running, start, world

from executors.membership import (
    HostDraining,
    HostFound,
    HostLost,
    StopWorker,
    Tick,
    WorkerDone,
    WorkerDraining,
    WorkerReady,
)


def test_a_worker_that_has_left_cannot_give_the_state_any_more():
    job = running(4, 2, hosts={"a": 2, "b": 2})
    job.on(HostDraining("a"))
    assert job.form() == []
    assert job.on(failed(2)) == []
    [end] = job.on(failed(3))
    assert end.error.startswith("every worker with the state")


def test_workers_of_a_draining_host_leave_by_a_planned_change():
    job = running(4, 2, hosts={"a": 2, "b": 2})
    assert job.on(HostDraining("a")) == [world(1, 2, 3, planned=True)]
    assert job.on(HostDraining("a")) == []
    assert job.form() == []
    assert job.on(WorkerDone("worker-0"), WorkerDone("worker-1"), HostLost("a", "gone")) == []
    assert job.counts == (0, 0, 1)


def test_workers_of_a_draining_host_wait_for_their_replacement_where_the_job_would_be_too_small():
    job = running(2, 2, hosts={"a": 2})
    assert job.on(HostDraining("a")) == []
    assert job.on(HostFound("b", 2)) == [start(2, "b"), start(3, "b")]
    assert job.on(ready(3)) == [world(1, 0, 3, planned=True)]
    assert job.form() == []
    assert job.on(ready(2)) == [world(2, 3, 2, planned=True)]
    assert job.counts == (0, 0, 1)


def test_a_draining_host_that_is_lost_early_is_no_failure():
    job = running(4, 2, hosts={"a": 2, "b": 2})
    assert job.on(HostDraining("a")) == [world(1, 2, 3, planned=True)]
    assert job.on(HostLost("a", "preempted")) == [world(2, 2, 3)]
    assert job.counts == (0, 0, 1)


def test_a_worker_that_fails_when_it_has_left_is_no_failure():
    job = running(4, 2, hosts={"a": 2, "b": 2})
    job.on(HostDraining("a"))
    job.form()
    assert job.on(failed(0), failed(1)) == []
    assert job.counts == (0, 0, 1)


def test_a_draining_host_without_workers_is_no_preemption():
    job = running(2, 1)
    job.on(HostFound("b", 1), HostDraining("b"))
    assert job.counts == (0, 0, 0)


def test_a_host_that_stays_after_all_keeps_its_workers():
    job = running(2, 2, 2, hosts={"a": 2})
    job.on(HostDraining("a"), HostFound("b", 2))
    assert job.on(HostFound("a", 2)) == [StopWorker("worker-2"), StopWorker("worker-3")]
    assert job.on(Tick()) == []


def test_a_worker_that_will_leave_is_left_out_and_its_slot_stays_empty():
    job = Job(3, 1)
    job.on(HostFound("a", 3))
    job.form()
    assert job.on(WorkerDraining("worker-1")) == [world(1, 0, 2, planned=True)]
    job.form()
    assert job.on(WorkerDone("worker-1")) == []
    assert job.counts == (0, 0, 1)
    assert job.on(WorkerDraining("worker-1"), WorkerDraining("worker-9")) == []
    assert job.on(HostFound("a", 3)) == [start(3, "a")]


def test_a_worker_that_will_leave_stays_while_there_are_too_few():
    job = Job(2, 2)
    job.on(HostFound("a", 2))
    job.form()
    assert job.on(WorkerDraining("worker-0")) == []
    assert job.on(HostFound("b", 1)) == [start(2, "b")]
    assert job.on(WorkerReady("worker-2")) == [world(1, 1, 2, planned=True)]
