"""Which hosts get the workers that come later: the loss of one host shall leave others with the state."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership_job import Job, failed, ready, running, start, workers, world

from executors.membership import Cooldown, HostFound, HostLost
from executors.membership.hosts import spread

HOSTS = st.sampled_from("abcd")
COUNTS = st.dictionaries(HOSTS, st.integers(0, 5))


@pytest.mark.parametrize(
    ("number", "free", "present", "chosen"),
    [
        (3, {"a": 3, "b": 3}, {}, ["a", "b", "a"]),
        (3, {"a": 3, "b": 3}, {"a": 2}, ["b", "b", "a"]),
        (3, {"a": 1, "b": 1}, {"a": 2}, ["b", "a"]),
        (2, {"a": 0, "b": 3}, {"c": 1}, ["b", "b"]),
        (0, {"a": 1}, {}, []),
    ],
)
def test_the_host_with_the_fewest_workers_is_next(number, free, present, chosen):
    assert spread(number, free, present) == chosen


@given(st.integers(0, 12), COUNTS, COUNTS)
def test_no_host_gets_a_worker_while_one_with_fewer_has_a_free_slot(number, free, present):
    chosen = Counter(spread(number, free, present))
    assert sum(chosen.values()) == min(number, sum(free.values()))
    for host, count in chosen.items():
        assert count <= free[host]
        for other in free:
            if chosen[other] < free[other]:
                assert present.get(host, 0) + count - 1 <= present.get(other, 0) + chosen[other]


def test_the_first_workers_fill_the_hosts_in_order():
    job = Job(3)
    actions = job.on(HostFound("a", 2), HostFound("b", 2))
    assert actions[:3] == [start(0, "a"), start(1, "a"), start(2, "b")]


def test_replacements_are_spread_while_a_host_cools_down():
    job = running(4, 1, hosts={"a": 4, "b": 4, "c": 4}, cooldown=Cooldown(60.0, 60.0))
    assert job.on(failed(0))[0] == start(4, "b")
    assert job.on(failed(1))[0] == start(5, "c")
    assert job.on(failed(2))[0] == start(6, "b")
    assert job.on(failed(3), *map(ready, (4, 5, 6)))[-1].error.startswith("every worker with the state")


def test_the_loss_of_one_host_leaves_others_with_the_state():
    job = running(2, 1, hosts={"a": 2, "b": 2, "c": 2}, cooldown=Cooldown(60.0, 60.0))
    for lost, newcomer in ((0, 2), (1, 3)):
        job.on(failed(lost), ready(newcomer))
        job.form()  # without the lost one
        job.form()  # with the newcomer
    assert [job.membership.host_of(worker) for worker in workers(2, 3)] == ["b", "c"]
    assert job.on(HostLost("b", "link cut"))[-1] == world(5, 3)
