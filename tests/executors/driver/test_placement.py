from hypothesis import given
from hypothesis import strategies as st

from executors.job.worlds import assign_ranks, slots_of

HOSTS = st.lists(st.sampled_from("abcdef"), max_size=24)


def group(slots, key):
    groups = {}
    for slot in slots:
        groups.setdefault(key(slot), []).append(slot)
    return groups.values()


@given(HOSTS)
def test_every_worker_keeps_its_host_and_has_one_rank(hosts):
    slots = assign_ranks(hosts)
    assert [slot.host for slot in slots] == hosts
    assert sorted(slot.rank for slot in slots) == list(range(len(hosts)))
    assert all(slot.size == len(hosts) for slot in slots)
    assert [slot.rank for slot in slots[:1]] == [0] * bool(hosts)


@given(HOSTS)
def test_ranks_are_dense_on_each_host_and_local_ranks_follow_them(hosts):
    for members in group(assign_ranks(hosts), lambda slot: slot.host):
        first = members[0].rank
        assert [slot.rank for slot in members] == list(range(first, first + len(members)))
        assert [slot.local_rank for slot in members] == list(range(len(members)))
        assert {slot.local_size for slot in members} == {len(members)}


@given(HOSTS)
def test_hosts_come_in_order_of_first_appearance(hosts):
    by_rank = sorted(assign_ranks(hosts), key=lambda slot: slot.rank)
    assert list(dict.fromkeys(slot.host for slot in by_rank)) == list(dict.fromkeys(hosts))


@given(HOSTS)
def test_cross_ranks_number_the_hosts_that_have_this_local_rank(hosts):
    for members in group(assign_ranks(hosts), lambda slot: slot.local_rank):
        members.sort(key=lambda slot: slot.rank)
        assert [slot.cross_rank for slot in members] == list(range(len(members)))
        assert {slot.cross_size for slot in members} == {len(members)}


def test_uneven_hosts():
    slots = assign_ranks(["b", "a", "b", "b", "a"])
    assert [(slot.rank, slot.local_rank, slot.cross_rank, slot.cross_size) for slot in slots] == [
        (0, 0, 0, 2),
        (3, 0, 1, 2),
        (1, 1, 0, 2),
        (2, 2, 0, 1),
        (4, 1, 1, 2),
    ]


def test_no_workers_have_no_slots():
    assert assign_ranks([]) == []


@given(HOSTS)
def test_ranks_that_a_launcher_has_given_stay(hosts):
    slots = slots_of(hosts)
    assert [(slot.rank, slot.host) for slot in slots] == list(enumerate(hosts))
    for members in group(slots, lambda slot: slot.host):
        assert [slot.local_rank for slot in members] == list(range(len(members)))
    for peers in group(slots, lambda slot: slot.local_rank):
        assert sorted(slot.cross_rank for slot in peers) == list(range(len(peers)))
        assert {slot.cross_size for slot in peers} == {len(peers)}
