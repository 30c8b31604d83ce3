"""Positions, global ranks and hosts."""

import pytest

from collectives.api import Topology
from collectives.backends.base import Group

GROUP = Group((1, 2, 4, 5), 2, tuple("abba"))


def test_a_group_of_a_topology():
    topology = Topology(rank=4, size=6, hosts=tuple("aaabba"))
    assert Group.of([1, 2, 4], topology) == Group((1, 2, 4), 2, tuple("aab"))


def test_positions():
    assert (GROUP.size, GROUP.others) == (4, [0, 1, 3])
    assert GROUP.by_host() == [[0, 3], [1, 2]]


def test_a_part_keeps_ranks_and_hosts():
    assert GROUP.part([1, 2]) == Group((2, 4), 1, ("b", "b"))
    with pytest.raises(ValueError, match="not in"):
        GROUP.part([0, 1])


def test_members_are_described_by_global_rank_and_host():
    assert GROUP.describe([1]) == "rank 2 on host 'b'"
    assert GROUP.describe(GROUP.others) == "ranks 1, 5 on host 'a' and rank 2 on host 'b'"


def test_a_message_names_some_of_many_members():
    """Each rank of a large world may send such a message to rank 0."""
    group = Group(tuple(range(10_000)), 0, tuple(f"host-{rank // 8}" for rank in range(10_000)))
    text = group.describe(group.others)
    assert len(text) < 1000
    assert text.startswith("ranks 1, 2, 3, 4, 5, 6, 7 on host 'host-0' and ranks 8, 9")
    assert text.endswith("and rank 64 on host 'host-8' and 9935 more")
