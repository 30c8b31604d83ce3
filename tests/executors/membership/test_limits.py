"""The limits of a job: how often it may change, and how long it waits."""

import pytest
from membership_job import failed, ready, running, start, world

from executors.membership import Cooldown, HostFound, Limits, Tick


@pytest.mark.parametrize("limit", ["resets", "failures"])
def test_a_job_ends_when_it_failed_too_often(limit):
    job = running(4, 1, **{limit: 1})
    assert job.on(failed(0)) == [world(1, 1, 2, 3)]
    [end] = job.on(failed(1))
    assert f"the number of {limit} exceeded its limit of 1 (2 failures, 0 resizes)" in end.error
    assert end.error.endswith("The last failure: worker-1 on host a: killed by signal 9")


def test_one_failure_is_singular():
    job = running(2, 1, resets=0)
    [end] = job.on(failed(0))
    assert "exceeded its limit of 0 (1 failure, 0 resizes); raise the limit" in end.error


@pytest.mark.parametrize("limit", ["resets", "resizes"])
def test_a_job_does_not_grow_more_often_than_allowed(limit):
    job = running(1, 1, 4, **{limit: 1})
    assert job.on(HostFound("b", 1), ready(1))[-1] == world(1, 0, 1, planned=True)
    assert job.on(HostFound("c", 1)) == []


def test_a_newcomer_that_comes_after_the_last_resize_waits_for_a_loss():
    job = running(2, 1, 4, resizes=1)
    assert job.on(HostFound("b", 2), ready(2))[-1] == start(3, "b")
    assert job.after(0.5) == [world(1, 0, 1, 2, planned=True)]
    assert job.on(ready(3), Tick()) == []
    assert job.on(failed(0)) == [world(2, 1, 2, 3)]


def test_a_job_that_is_too_small_may_always_get_workers():
    job = running(2, 2, hosts={"a": 2}, resizes=0)
    job.on(failed(0))
    assert job.on(HostFound("b", 1)) == [start(2, "b")]


@pytest.mark.parametrize("numbers", [(0, 0, 1), (1, 2, 3), (3, 1, 2)])
def test_limits_that_cannot_be_met(numbers):
    with pytest.raises(ValueError, match="1 <= least number <= number <= largest number"):
        Limits(*numbers)


@pytest.mark.parametrize("limit", ["resets", "failures", "resizes"])
def test_limits_below_zero(limit):
    with pytest.raises(ValueError, match=f"the limit of {limit} is -1"):
        Limits(1, 1, 1, **{limit: -1})


def test_a_timeout_below_zero():
    with pytest.raises(ValueError, match="elastic timeout is -1 s"):
        Limits(1, 1, 1, timeout=-1)


@pytest.mark.parametrize("seconds", [(0.5, 2.0), (3.0, 2.0), (1.0, 4000.0)])
def test_cooldowns_that_are_not_possible(seconds):
    with pytest.raises(ValueError, match="both from 1 to 3600 s"):
        Cooldown(*seconds)


def test_a_cooldown_doubles_up_to_its_longest_time():
    cooldown = Cooldown(2.0, 60.0)
    assert [cooldown.seconds(failures, 0.5) for failures in (1, 2, 5, 10_000)] == [5.0, 9.0, 60.0, 60.0]
