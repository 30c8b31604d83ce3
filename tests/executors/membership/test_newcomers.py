"""Workers that join a job which runs."""

from membership_job import failed, ready, running, start, world

from executors.membership import Cooldown, HostDraining, HostFound


def test_newcomers_come_in_together():
    job = running(2, 1, 5)
    assert job.on(HostFound("b", 3)) == [start(number, "b") for number in (2, 3, 4)]
    assert job.on(ready(3)) == []
    assert job.membership.deadline == job.now + 0.5
    job.now += 0.3
    assert job.on(ready(2)) == []
    assert job.after(0.2) == [world(1, 0, 1, 2, 3, planned=True)]
    assert job.form() == []
    assert job.on(ready(4)) == [world(2, 0, 1, 2, 3, 4, planned=True)]
    assert job.counts == (0, 2, 0)


def test_one_change_is_planned_at_a_time():
    """Ranks that leave a world at the same commit must know the same next world."""
    job = running(2, 1, 5)
    job.on(HostFound("b", 2), HostFound("c", 1))
    assert job.on(ready(2), ready(3), ready(4)) == [world(1, 0, 1, 2, 3, 4, planned=True)]
    assert job.on(HostDraining("b")) == []
    assert job.form() == [world(2, 0, 1, 4, planned=True)]
    assert job.on(HostDraining("c")) == []
    assert job.on(failed(0)) == [world(3, 1)]


def test_a_newcomer_that_fails_disturbs_nobody():
    job = running(2, 1, 3, cooldown=Cooldown(1.0, 1.0))
    job.on(HostFound("b", 1))
    assert job.on(failed(2)) == []
    assert job.counts == (1, 0, 0)
    assert job.after(1.0) == [start(3, "b")]


def test_a_newcomer_that_is_ready_before_a_tick_that_is_due_does_not_replace_it():
    job = running(3, 1, 4, hosts={"a": 2, "c": 1}, cooldown=Cooldown(1.0, 1.0))
    assert job.on(HostFound("b", 1)) == [start(3, "b")]
    assert job.on(failed(2)) == [world(1, 0, 1)]
    job.form()
    assert job.membership.deadline == job.now + 1.0
    job.now += 1.0
    assert job.on(ready(3)) == [start(4, "c")]


def test_a_ready_newcomer_comes_in_when_a_worker_is_lost():
    job = running(2, 1, 4)
    job.on(HostFound("b", 2), ready(2))
    assert job.on(failed(0)) == [world(1, 1, 2)]


def test_a_newcomer_lost_before_its_world_has_formed():
    job = running(2, 1, 3)
    assert job.on(HostFound("b", 1), ready(2)) == [start(2, "b"), world(1, 0, 1, 2, planned=True)]
    assert job.on(failed(2)) == [world(2, 0, 1)]


def test_newcomers_do_not_go_on_without_the_state():
    job = running(1, 1, 2)
    job.on(HostFound("b", 1), ready(1))
    [end] = job.on(failed(0))
    assert end.error.startswith("every worker with the state of the training is lost. The last failure: worker-0")
