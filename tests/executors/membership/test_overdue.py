"""Workers that do not leave before their host is gone."""

import pytest
from membership_job import failed, ready, running, start, workers, world

from executors.membership import HostDraining, HostFound, HostLost, Overdue


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


def test_nobody_waits_for_the_late_worker_of_a_host_that_is_about_to_go():
    job = running(2, least=1, most=4, hosts={"h1": 1, "h2": 1})
    job.on(HostFound("h3", 1), ready(2), HostDraining("h1"), HostDraining("h2", job.now + 100.0))
    [overdue, publish] = job.after(99.5)
    assert overdue.workers == workers(1)
    assert publish.members.workers == workers(0, 2)
