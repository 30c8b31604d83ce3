"""Reports about the worlds of a job: they formed, late or early, or failed."""

from membership_job import Job, failed, ready, running, workers, world

from executors.membership import HostFound, Members, WorldFailed, WorldFormed


def test_a_world_that_formed_late_counts():
    """Round 2 was published before round 1 had formed; then only a newcomer of round 1 is left."""
    job = running(2, 1, 3)
    job.on(HostFound("b", 1), ready(2), failed(0))
    assert job.on(WorldFormed(1)) == []
    assert job.membership.formed == Members(1, workers(0, 1, 2))
    assert job.on(failed(1)) == [world(3, 2)]


def test_the_world_of_an_unknown_round_is_no_news():
    job = running(2, 1)
    assert job.on(WorldFormed(5), WorldFormed(0), WorldFormed(-1)) == []
    assert job.membership.formed.round == 0


def test_a_round_that_is_reported_late_is_no_news():
    job = running(2, 1, 3)
    job.on(HostFound("b", 1), ready(2), failed(0))
    assert job.on(WorldFormed(2), WorldFormed(1)) == []
    assert job.membership.formed.round == 2


def test_a_world_that_failed_is_made_again():
    job = Job(2, 1, resets=1)
    job.on(HostFound("a", 2))
    job.form()
    assert job.on(WorldFailed(0, "timed out")) == [world(1, 0, 1)]
    assert job.on(WorldFailed(0, "timed out, too")) == []
    assert job.counts == (1, 0, 0)
    [end] = job.on(WorldFailed(1, "timed out again"))
    assert "limit of 1" in end.error
    assert "world 1: timed out again" in end.error


def test_a_world_that_a_loss_has_broken_does_not_fail_a_second_time():
    """Its ranks report the loss as a failure of their world, while they are too few for the next one."""
    job = running(2, 2)
    assert job.on(failed(0), WorldFailed(0, "connection lost")) == []
    assert job.counts == (1, 0, 0)
