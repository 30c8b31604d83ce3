"""The room of an elastic job on Ray: places in a placement group, and workers that others leave no room for."""

import itertools
from collections import Counter

import pytest

from executors.agents.ray.placement.capacity import Share
from executors.agents.ray.placement.discovery import RoomDiscovery
from executors.agents.ray.placement.nodes import NodePlace
from executors.agents.ray.placement.room import Bundle, bundle_for, room, slots_in, too_small, used_by, within
from executors.agents.ray.placement.withdrawal import Withdrawal

NEED = {"CPU": 1.0}
ID = "5f01"


def bundle(index, node, total, free):
    return Bundle(index, node, {"CPU": float(total)}, {"CPU": float(free)})


class TestBundles:
    # The driver has the only CPU of bundle 0.
    GROUP = (bundle(0, "a", 0, 0), bundle(1, "a", 2, 1), bundle(2, "b", 1, 1))

    def test_resources_of_one_bundle(self):
        held = {"CPU": 7.0, f"CPU_group_1_{ID}": 2.0, f"CPU_group_11_{ID}": 3.0, f"CPU_group_{ID}": 5.0}
        assert within(1, ID, held) == {"CPU": 2.0}
        assert used_by({"CPU": 4.0, "GPU": 1.0}, {"CPU": 1.0}) == {"CPU": 3.0, "GPU": 1.0}

    def test_the_bundle_of_the_driver_is_no_room(self):
        assert room(self.GROUP, NEED) == 3
        assert slots_in(self.GROUP, NEED, {"a": Share(1)}, {}) == {"a": 2, "b": 1}

    def test_two_halves_in_two_bundles_are_no_room(self):
        halves = (bundle(0, "a", 0.5, 0.5), bundle(1, "a", 0.5, 0.5))
        assert (room(halves, NEED), slots_in(halves, NEED, {}, {})) == (0, {})

    def test_a_number_stays_while_ray_counts(self):
        assert slots_in(self.GROUP, NEED, {"a": Share(1, settled=False)}, {"a": 1}) == {"a": 1, "b": 1}

    def test_each_worker_gets_a_bundle_with_room_before_ray_has_counted_the_others(self):
        group = (bundle(0, "a", 0, 0), *(bundle(index, "a", 2, 2) for index in (1, 2)), bundle(3, "b", 9, 9))
        taken = []
        for _ in range(4):
            taken.append(bundle_for(group, NEED, "a", taken))
        assert Counter(taken) == {1: 2, 2: 2}
        assert bundle_for(group, NEED, "c", taken) == -1

    def test_a_lost_worker_is_replaced_in_its_bundle(self):
        group = (bundle(1, "a", 1, 0), bundle(2, "a", 1, 1))
        assert bundle_for(group, NEED, "a", [1]) == 2

    def test_a_group_that_is_too_small(self):
        text = too_small("min_workers", 4, NEED, self.GROUP)
        assert text.startswith(
            "min_workers is 4, but the current placement group has room for 3 workers with 1 CPU each"
        )
        assert text.endswith("lower min_workers to 3, make the group larger, or set use_current_placement_group=False")
        assert "lower" not in too_small("min_workers", 1, NEED, self.GROUP[:1])


class Room:
    """Two nodes with so many free places."""

    def __init__(self, **free):
        self.free = free

    def slots(self, shares, before):
        return {node: shares.get(node, Share()).workers + count for node, count in self.free.items()}


class TestRoomDiscovery:
    def test_a_job_without_workers_takes_no_place_that_is_not_enough(self):
        shares, room = {}, Room(a=1, b=0)
        discovery = RoomDiscovery(room, lambda: shares, least=2)
        assert discovery.find_available_hosts_and_slots() == {}
        room.free["b"] = 1
        assert discovery.find_available_hosts_and_slots() == {"a": 1, "b": 1}
        room.free["b"], shares["a"] = 0, Share(1)
        assert discovery.find_available_hosts_and_slots() == {"a": 2}

    def test_it_pauses_only_without_workers(self):
        now, shares = [0.0], {}
        discovery = RoomDiscovery(Room(a=2), lambda: shares, clock=lambda: now[0])
        discovery.close(5)
        assert discovery.find_available_hosts_and_slots() == {}
        now[0] = 5.0
        assert discovery.find_available_hosts_and_slots() == {"a": 2}

    def test_withdrawn_workers_are_found_once_so_that_more_room_is_news(self):
        discovery = RoomDiscovery(Room(a=3), lambda: {"a": Share(1)})
        discovery.withdraw("a", 1)
        assert [discovery.find_available_hosts_and_slots() for _ in range(2)] == [{"a": 1}, {"a": 4}]

    def test_hosts_of_the_user_in_a_room(self):
        class Hosts:
            def find_available_hosts_and_slots(self):
                return {"host-b": 5, "a": 1}

        places = [NodePlace(node, f"host-{node}", node) for node in "abc"]
        discovery = RoomDiscovery(Room(a=3, b=2, c=1), dict, hosts=Hosts(), places=lambda: places)
        assert discovery.find_available_hosts_and_slots() == {"a": 1, "b": 2}


class Workers:
    def __init__(self, located, without_room):
        self._located, self._without_room = located, without_room
        self.pauses = []

    def has_no_room(self, name):
        return name in self._without_room

    def located(self):
        return self._located

    def names(self):
        return [*self._located, *self._without_room]

    def close(self, seconds):
        self.pauses.append(seconds)


class TestWithdrawal:
    TEXT = "was withdrawn: Ray had no room for it within 20 s"

    def withdrawn(self, located, without_room, has_state=False, late="late", least=2):
        workers = Workers(located, without_room)
        withdrawn = Withdrawal(workers, workers, least, 20.0, lambda: 0.5).of(late, has_state)
        return dict(withdrawn), workers.pauses

    def test_a_worker_that_is_late_in_its_room_is_not_withdrawn(self):
        assert self.withdrawn(["a"], []) == ({}, [])

    @pytest.mark.parametrize(("located", "has_state"), [(["a", "b"], False), (["a"], True), ([], True)])
    def test_enough_workers_go_on_without_it(self, located, has_state):
        assert self.withdrawn(located, ["late", "other"], has_state) == ({"late": self.TEXT}, [])

    def test_too_few_workers_give_up_their_room_and_try_again_at_another_time(self, caplog):
        expected = {"a": "was given up for other jobs", "late": self.TEXT, "other": self.TEXT}
        assert self.withdrawn(["a"], ["late", "other"]) == (expected, [5.0])
        [line] = caplog.messages
        assert line.startswith(f"late {self.TEXT}. The job has 1 of at least 2 workers, and gives up their room")

    def test_no_two_jobs_hold_what_the_other_one_needs(self):
        """However two jobs share four places: afterwards each has enough to begin, or none."""
        for first, least, other in itertools.product(range(5), range(1, 5), range(1, 5)):
            for placed, needed in ((first, least), (4 - first, other)):
                names = [f"w{number}" for number in range(placed)]
                gone, _ = self.withdrawn(names, ["late"], least=needed)
                left = [name for name in names if name not in gone]
                assert not left or len(left) >= needed
