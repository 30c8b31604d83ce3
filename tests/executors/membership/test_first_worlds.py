"""The first world of a job, or the reason why there is none."""

from membership_job import Job, start, workers, world

from executors.membership import End, HostDraining, HostFound, HostLost, HostUnusable, Tick, WorkerDone


def test_the_first_world_has_the_first_workers():
    job = Job(3)
    assert job.on(HostFound("a", 2)) == []
    assert job.on(HostFound("b", 2)) == [start(0, "a"), start(1, "a"), start(2, "b"), world(0, 0, 1, 2)]
    assert job.form() == []
    assert job.on(*[WorkerDone(worker) for worker in workers(2, 0)]) == [world(1, 0, 1), world(2, 1)]
    assert job.on(WorkerDone("worker-1")) == [End()]
    assert job.on(HostFound("c", 9), Tick()) == []
    assert job.counts == (0, 0, 0)


def test_the_first_world_has_as_many_workers_as_there_are_slots_up_to_the_largest_number():
    assert Job(2, 1, 4).on(HostFound("a", 8))[-1] == world(0, 0, 1, 2, 3)


def test_a_job_starts_with_fewer_workers_after_the_timeout():
    job = Job(4, 2, timeout=30.0)
    job.on(HostFound("a", 3))
    assert job.membership.deadline == 130.0
    assert job.after(29.0) == []
    assert job.after(1.0)[-1] == world(0, 0, 1, 2)
    assert job.membership.deadline is None


def test_a_job_that_cannot_start_says_what_is_missing():
    job = Job(4, 3, timeout=30.0)
    job.on(HostFound("a", 2), HostFound("b", 1), HostDraining("b"), HostFound("c", 1), HostLost("c", "link cut"))
    [end] = job.after(30.0)
    assert end.error == (
        "the job has 0 of at least 3 workers (hosts: a: 2 slots, b: draining, c: gone) within the "
        "elastic timeout of 30 s; add slots, lower the least number of workers, or raise the timeout"
    )


def test_a_job_that_cannot_start_names_the_hosts_that_cannot_be_used():
    job = Job(1, timeout=30.0)
    job.on(*(HostUnusable(host, f"no route to {host}") for host in "abcdefg"))
    job.on(HostFound("a", 1), HostLost("a", "link cut"), HostUnusable("c", None), HostUnusable("d", "asleep"))
    [end] = job.after(30.0)
    assert end.error.partition("link cut. ")[2] == (
        "Host b cannot be used: no route to b. Host e cannot be used: no route to e. "
        "Host f cannot be used: no route to f. 2 other hosts cannot be used either"
    )
