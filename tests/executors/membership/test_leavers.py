"""Workers that a planned world leaves out."""

from membership_job import failed, running, start, world

from executors.membership import Cooldown, HostFound, WorkerDone, WorkerLeaves, WorldFormed


def test_a_host_with_fewer_slots_keeps_the_first_workers():
    job = running(3, 1)
    assert job.on(HostFound("a", 1)) == [world(1, 0, planned=True)]
    assert job.counts == (0, 1, 0)


def shrunk():
    """A job whose planned world has the first of three workers, because the host has fewer slots."""
    job = running(3, least=1, cooldown=Cooldown(1.0, 1.0))
    assert job.on(HostFound("a", 1)) == [world(1, 0, planned=True)]
    return job


def test_a_loss_breaks_a_planned_world_and_all_that_should_leave_it_may_go_on():
    """Some of them may have left already."""
    assert shrunk().on(failed(0)) == [world(2, 1, 2)]


def test_one_that_leaves_does_not_end_the_job_of_the_others():
    job = shrunk()
    assert job.on(failed(0), WorkerLeaves("worker-1")) == [world(2, 1, 2), world(3, 2)]
    assert job.on(WorkerDone("worker-1")) == []
    job.form()
    assert job.on(HostFound("a", 2)) == []
    assert job.after(3.0) == [start(3, "a")]


def test_one_that_leaves_may_be_taken_for_lost_before_its_end_is_known():
    job = shrunk()
    assert job.on(WorkerLeaves("worker-1"), failed(1)) == [world(2, 0)]
    job.form()
    assert job.on(WorkerDone("worker-1"), WorkerDone("worker-2"), HostFound("a", 2)) == [start(3, "a")]
    assert job.counts == (0, 1, 0)


def test_a_job_whose_last_workers_leave_is_not_done():
    job = shrunk()
    [end] = job.on(failed(0), WorkerLeaves("worker-1"), WorkerLeaves("worker-2"))[-1:]
    assert "every worker with the state of the training is lost" in end.error


def test_one_that_leaves_does_not_count_where_its_world_is_reported_late():
    """The reports of two workers may overtake each other."""
    job = shrunk()
    assert job.on(failed(0), WorkerLeaves("worker-1"), WorldFormed(2)) == [world(2, 1, 2), world(3, 2)]
    [end] = job.on(failed(2))[-1:]
    assert "every worker with the state of the training is lost" in end.error


def test_one_that_leaves_keeps_its_place_until_its_process_has_ended():
    job = running(2, least=1, most=4)
    assert job.on(HostFound("a", 1)) == [world(1, 0, planned=True)]
    assert job.on(WorkerLeaves("worker-1"), HostFound("a", 2)) == []
    assert job.on(WorkerDone("worker-1")) == [start(2, "a")]


def test_ranks_that_should_leave_go_on_if_the_others_are_too_few():
    job = running(3, least=2, cooldown=Cooldown(1.0, 1.0))
    assert job.on(HostFound("a", 2)) == [world(1, 0, 1, planned=True)]
    assert job.on(failed(1)) == [world(2, 0, 2)]
