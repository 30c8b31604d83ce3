"""Workers and hosts that are lost, and the worlds of those that are left."""

import pytest
from membership_job import failed, ready, running, start, world

from executors.membership import Cooldown, HostFound, HostLost


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_survivors_go_on_at_once_in_their_order(victim):
    job = running()
    survivors = [number for number in range(3) if number != victim]
    assert job.on(failed(victim)) == [world(1, *survivors)]
    assert job.form() == []
    assert job.counts == (1, 0, 0)


def test_a_second_loss_during_a_recovery_makes_another_world():
    job = running(4, 2)
    assert job.on(failed(0)) == [world(1, 1, 2, 3)]
    assert job.on(failed(2)) == [world(2, 1, 3)]
    assert job.form() == []


def test_a_lost_worker_is_replaced_on_another_host_when_it_is_ready():
    job = running(3, 2, hosts={"a": 2, "b": 2})
    assert job.on(failed(0)) == [start(3, "b"), world(1, 1, 2)]
    assert job.form() == []
    assert job.on(ready(3)) == [world(2, 1, 2, 3, planned=True)]
    assert job.counts == (1, 1, 0)


def test_a_lost_host_is_one_failure():
    job = running(4, 2, hosts={"a": 2, "b": 2})
    assert job.on(HostLost("a", "link cut")) == [world(1, 2, 3)]
    assert job.counts == (1, 0, 0)


def test_a_job_that_is_too_small_waits_for_newcomers():
    job = running(2, 2, hosts={"a": 2}, timeout=30.0)
    assert job.on(failed(0)) == []
    job.now += 10
    assert job.on(HostFound("b", 1)) == [start(2, "b")]
    assert job.membership.deadline == 130.0
    assert job.on(ready(2)) == [world(1, 1, 2)]
    assert job.membership.deadline is None


def test_a_job_that_stays_too_small_ends_after_the_timeout():
    job = running(2, 2, hosts={"a": 2}, timeout=30.0, cooldown=Cooldown(60.0, 60.0))
    assert job.on(failed(0)) == []
    [end] = job.after(30.0)
    assert "the job has 1 of at least 2 workers" in end.error
    assert "a: 2 slots, blacklisted after 1 failure" in end.error
    assert end.error.endswith("The last failure: worker-0 on host a: killed by signal 9")


def test_a_job_ends_at_once_where_no_host_can_start_another_worker():
    job = running(2, 2, may_find_hosts=False)
    [end] = job.on(failed(0))
    assert "no host can start another one" in end.error
    assert "worker-0 on host a: killed by signal 9" in end.error


def test_a_blacklisted_host_gets_workers_again_after_its_cooldown():
    job = running(2, 1, hosts={"a": 2}, cooldown=Cooldown(2.0, 7.0))
    assert job.on(failed(0)) == [world(1, 1)]
    assert job.form() == []
    assert job.membership.deadline == job.now + 2 * (2 + 0.5)
    assert job.after(5.0) == [start(2, "a")]
    assert job.on(failed(2)) == []
    assert job.membership.deadline == job.now + 7.0
    assert job.after(7.0) == [start(3, "a")]
    assert job.on(ready(3)) == [world(2, 1, 3, planned=True)]


def test_a_host_that_comes_back_is_still_blacklisted():
    job = running(2, 1, hosts={"a": 1, "b": 1})
    assert job.on(HostLost("b", "gone"), HostFound("b", 1)) == [world(1, 0)]
