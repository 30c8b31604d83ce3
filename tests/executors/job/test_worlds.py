"""The messages between the driver and the workers of an elastic job."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executors.job.worlds import REPORTS, Published, Report, WorldCall, report_key, world_key

# Workers of host b came between those of host a.
MIXED = Published(7, (("worker-4", "a"), ("worker-2", "b"), ("worker-9", "a")), True, "rank 2 on host a joined")


@pytest.mark.parametrize(
    "message",
    [
        MIXED,
        Published(8, is_over=True, text="the job is done"),
        Report("failed", 3, (1, 4), "lost", 0.5, 2),
        WorldCall(12),
        WorldCall(12, has_returned=True),
    ],
)
def test_messages_survive_the_store(message):
    assert type(message).decode(message.encode()) == message


def test_a_large_world_is_small_in_the_store():
    world = Published(3, tuple((f"worker-{number}", f"host-{number // 8:04}") for number in range(10_000)))
    data = world.encode()
    assert len(data) < 100_000
    assert Published.decode(data) == world
    with pytest.raises(ValueError, match="cannot be read"):
        Published.decode(data[:-1])


def test_a_report_of_a_newer_version_can_be_read():
    assert Report.decode(b'{"kind": "ready", "version": "9.9", "mood": "good"}') == Report("ready", version="9.9")


def test_keys():
    assert world_key(3) == "worlds/3"
    assert report_key("worker-4", 2).removeprefix(REPORTS) == "worker-4/2"


class TestRanks:
    def test_ranks_are_dense_on_each_host(self):
        assert [MIXED.rank_of(worker) for worker in ("worker-4", "worker-9", "worker-2")] == [0, 1, 2]

    def test_both_directions_agree(self):
        assert [MIXED.rank_of(MIXED.worker_of(rank) or "") for rank in range(3)] == [0, 1, 2]

    def test_strangers(self):
        assert MIXED.rank_of("worker-1") is None
        assert MIXED.worker_of(3) is None

    def test_several_are_in_the_order_of_the_world(self):
        assert MIXED.workers_of((2, 1, 7, 1)) == ["worker-2", "worker-9"]

    @given(hosts=st.lists(st.sampled_from("abc"), max_size=9), host=st.sampled_from("abcd"))
    def test_a_newcomer_gets_the_slot_that_it_has_in_the_next_world(self, hosts, host):
        workers = [(f"worker-{number}", each) for number, each in enumerate(hosts)]
        after = Published(0, (*workers, ("worker-x", host)))
        assert Published(0, tuple(workers)).slot_with(host) == after.slots()["worker-x"]


class TestWorld:
    def test_a_member_gets_its_place(self):
        world = MIXED.world("worker-9", "job", ("127.0.0.1", 1234))
        assert (world.job, world.round, world.host, world.rendezvous) == ("job", 7, "a", ("127.0.0.1", 1234))
        place = world.topology
        assert (place.rank, place.size, place.local_rank, place.local_size) == (1, 3, 1, 2)
        assert (place.cross_rank, place.cross_size) == (0, 1)

    def test_a_stranger_gets_none(self):
        assert MIXED.world("worker-1", "job", ("127.0.0.1", 1234)) is None
        assert Published(8, is_over=True).world("worker-4", "job", ("127.0.0.1", 1234)) is None
