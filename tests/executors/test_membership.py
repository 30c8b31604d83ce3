"""The members of a job: each event, and the actions that follow."""

import pytest

from executors.membership import (
    Cooldown,
    End,
    HostDraining,
    HostFound,
    HostLost,
    HostUnusable,
    Limits,
    Members,
    Membership,
    Overdue,
    Publish,
    Start,
    Stop,
    Tick,
    WorkerBehind,
    WorkerDone,
    WorkerDraining,
    WorkerFailed,
    WorkerLeaves,
    WorkerRaised,
    WorkerReady,
    WorldFailed,
    WorldFormed,
)


class Job:
    """A membership, its clock, and the actions of the last event."""

    def __init__(self, size, least=None, most=None, **limits):
        limits = Limits(size, least or size, most or size, **limits)
        self.membership = Membership(limits, lambda: 0.5)
        self.now = 100.0

    def on(self, *events):
        """The actions that follow from ``events``."""
        return [action for event in events for action in self.membership.handle(event, self.now)]

    def after(self, seconds):
        """The actions of a tick after ``seconds``."""
        self.now += seconds
        return self.on(Tick())

    def form(self):
        return self.on(WorldFormed(self.membership.published.round))

    @property
    def counts(self):
        counts = self.membership.counts
        return counts.failures, counts.resizes, counts.preemptions


def workers(*numbers):
    return tuple(f"worker-{number}" for number in numbers)


def world(round, *numbers, planned=False):
    return Publish(Members(round, workers(*numbers)), planned)


def start(number, host):
    return Start(f"worker-{number}", host)


def failed(number):
    return WorkerFailed(f"worker-{number}", "killed by signal 9")


def ready(number):
    return WorkerReady(f"worker-{number}")


def running(size=3, least=2, most=None, hosts=None, **limits):
    """A job of workers on host a, or on ``hosts`` with their slots, whose first world has formed."""
    job = Job(size, least, most, **limits)
    for host, slots in (hosts or {"a": size}).items():
        job.on(HostFound(host, slots))
    assert job.form() == []
    return job


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


def late(host, *numbers, until, go_on=True):
    return Overdue(host, workers(*numbers), until, go_on)


def test_workers_that_come_to_no_commit_are_left_behind_before_their_host_is_gone():
    job = running(4, 2, hosts={"a": 2, "b": 2})
    assert job.on(HostDraining("a", until=110.0)) == [world(1, 2, 3, planned=True)]
    assert job.membership.deadline == 109.0
    assert job.after(8.9) == []
    assert job.after(0.1) == [late("a", 0, 1, until=110.0), world(2, 2, 3)]
    assert job.membership.deadline is None
    assert job.form() == []
    assert job.on(failed(0), HostLost("a", "preempted")) == []
    assert job.counts == (0, 0, 1)


def test_a_host_that_is_gone_soon_gives_half_of_the_time():
    job = running(4, 2, hosts={"a": 2, "b": 2})
    job.on(HostDraining("a", until=100.5))
    assert job.after(0.25) == [late("a", 0, 1, until=100.5), world(2, 2, 3)]


def test_a_host_that_is_gone_now_leaves_no_time():
    job = running(4, 2, hosts={"a": 2, "b": 2})
    assert job.on(HostDraining("a", until=99.0)) == [late("a", 0, 1, until=99.0), world(1, 2, 3)]


@pytest.mark.parametrize("until", [104.0, 116.0])
def test_the_last_time_at_which_a_host_will_be_gone_counts(until):
    job = running(4, 2, hosts={"a": 2, "b": 2})
    job.on(HostDraining("a"), HostDraining("a", until=110.0))
    assert job.membership.deadline == 109.0
    assert job.on(HostDraining("a", until=until)) == []
    assert job.membership.deadline == until - 1.0
    assert job.after(until - 101.0) == [late("a", 0, 1, until=until), world(2, 2, 3)]
    assert job.on(HostDraining("a", until=until)) == []
    assert job.membership.deadline is None
    assert job.counts == (0, 0, 1)


def test_a_host_that_drains_again_may_be_gone_at_the_same_time_as_before():
    job = running(4, 2, hosts={"a": 2, "b": 2})
    job.on(HostDraining("a", until=110.0), HostFound("a", 2), HostDraining("a", until=110.0))
    assert job.membership.deadline == 109.0


def test_nobody_is_left_behind_who_has_left():
    job = running(4, 2, hosts={"a": 2, "b": 2})
    job.on(HostDraining("a", until=110.0))
    job.form()
    assert job.after(10.0) == []


def test_a_host_that_stays_after_all_has_no_deadline():
    job = running(4, 2, hosts={"a": 2, "b": 2})
    assert job.on(HostDraining("a", until=110.0), HostFound("a", 2))[1:] == []
    job.form()
    assert job.after(10.0) == []


def test_a_change_that_was_planned_before_the_notice_does_not_keep_workers():
    job = running(2, 1, 3, hosts={"a": 1, "b": 1})
    job.on(HostFound("c", 1), ready(2))
    assert job.on(HostDraining("a", until=110.0)) == []
    assert job.after(9.0) == [late("a", 0, until=110.0), world(2, 1, 2)]


def test_nobody_is_left_behind_where_the_others_are_too_few():
    job = running(2, 2, hosts={"a": 1, "b": 1})
    job.on(HostDraining("a", until=110.0))
    assert job.after(9.0) == [late("a", 0, until=110.0, go_on=False)]
    assert job.on(HostFound("c", 1), ready(2)) == [start(2, "c"), world(1, 1, 2, planned=True)]


def test_the_only_one_with_the_state_is_not_left_behind():
    job = running(1, 1, 2, hosts={"a": 1})
    job.on(HostFound("b", 1), ready(1), HostDraining("a", until=110.0))
    assert job.after(9.0) == [late("a", 0, until=110.0, go_on=False)]


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
    assert job.on(HostFound("a", 2)) == [Stop("worker-2"), Stop("worker-3")]
    assert job.on(Tick()) == []


def test_a_host_with_fewer_slots_keeps_the_first_workers():
    job = running(3, 1)
    assert job.on(HostFound("a", 1)) == [world(1, 0, planned=True)]
    assert job.counts == (0, 1, 0)


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


def test_events_of_strangers_are_ignored():
    job = running(2, 1)
    assert job.on(failed(7), ready(7), WorkerDone("worker-7"), WorkerRaised("worker-7", "")) == []
    assert job.on(HostDraining("x"), HostLost("x", "")) == []
    assert job.counts == (0, 0, 0)


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


def test_one_that_leaves_keeps_its_place_until_its_process_has_ended():
    job = running(2, least=1, most=4)
    assert job.on(HostFound("a", 1)) == [world(1, 0, planned=True)]
    assert job.on(WorkerLeaves("worker-1"), HostFound("a", 2)) == []
    assert job.on(WorkerDone("worker-1")) == [start(2, "a")]


def test_ranks_that_should_leave_go_on_if_the_others_are_too_few():
    job = running(3, least=2, cooldown=Cooldown(1.0, 1.0))
    assert job.on(HostFound("a", 2)) == [world(1, 0, 1, planned=True)]
    assert job.on(failed(1)) == [world(2, 0, 2)]


def test_nobody_waits_for_the_late_worker_of_a_host_that_is_about_to_go():
    job = running(2, least=1, most=4, hosts={"h1": 1, "h2": 1})
    job.on(HostFound("h3", 1), ready(2), HostDraining("h1"), HostDraining("h2", job.now + 100.0))
    [overdue, publish] = job.after(99.5)
    assert overdue.workers == workers(1)
    assert publish.members.workers == workers(0, 2)
