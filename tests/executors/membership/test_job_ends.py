"""Workers that end the job, and those that cannot."""

from membership_job import failed, ready, running, world

from executors.membership import End, HostDraining, HostFound, HostLost, Stop, WorkerDone, WorkerRaised


def test_an_exception_of_the_user_ends_the_job():
    job = running()
    assert job.on(WorkerRaised("worker-1", "ValueError: boom")) == [
        End("worker-1 on host a raised an exception: ValueError: boom")
    ]
    assert job.on(failed(0)) == []


def test_a_worker_that_is_done_ends_growth_but_not_the_job_of_the_others():
    job = running(2, 2, 4)
    job.on(HostFound("b", 2), ready(2))
    assert job.on(WorkerDone("worker-0")) == [Stop("worker-2"), Stop("worker-3"), world(1, 1)]
    assert job.on(HostFound("c", 2)) == []
    assert job.on(failed(1)) == [End()]


def test_events_of_strangers_are_ignored():
    job = running(2, 1)
    assert job.on(failed(7), ready(7), WorkerDone("worker-7"), WorkerRaised("worker-7", "")) == []
    assert job.on(HostDraining("x"), HostLost("x", "")) == []
    assert job.counts == (0, 0, 0)
