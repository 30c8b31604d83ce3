"""Settings that must be the same on all ranks, and the cores of a host."""

import os

import pytest

from collectives.api import (
    SettingsError,
)
from collectives.handshake import Hello, connect
from tests.collectives.handshake.handshakes import connect_all


def configured(*values):
    return [Hello(rank, len(values), "node", configuration=value) for rank, value in enumerate(values)]


def test_ranks_that_are_set_differently_all_hear_who_has_set_what():
    shm, gloo = {"OPERATIONS": "shm", "CACHE": "0"}, {"OPERATIONS": "gloo", "CACHE": "0"}
    errors = connect_all(configured(shm, gloo, shm, {"OPERATIONS": "shm", "CACHE": "above 0"}))
    assert [type(error) for error in errors] == [SettingsError] * 4
    (text,) = {str(error) for error in errors}
    assert text == (
        "OPERATIONS is 'shm' on ranks 0, 2, 3 and 'gloo' on rank 1; CACHE is '0' on ranks 0, 1, 2 and 'above 0' on "
        "rank 3; it must be the same on all ranks"
    )


def test_ranks_that_are_set_alike_start():
    assert connect_all(configured({"OPERATIONS": "shm"}, {"OPERATIONS": "shm"})) == [("node", "node")] * 2


def test_a_disagreement_of_many_ranks_is_still_short():
    text = connect.disagreement([{"A": "1"}] + [{"A": "2"}] * 1000)
    assert (
        text
        == "A is '1' on rank 0 and '2' on ranks 1, 2, 3, 4, 5, 6, 7, 8 and 992 more; it must be the same on all ranks"
    )


def test_a_long_value_is_cut_but_not_mistaken_for_another():
    assert connect.brief("short") == "short"
    one, other = connect.brief("x" * 10_000 + "1"), connect.brief("x" * 10_000 + "2")
    assert one != other
    assert max(len(one), len(other)) < 300


@pytest.mark.parametrize("hosts", [("a",), ("a", "b"), ("a", "b", "b")], ids=str)
def test_the_ranks_of_a_host_agree_on_its_cores(hosts):
    hellos = [Hello(rank, 5, hosts[rank % len(hosts)], cores=(rank, rank + 1)) for rank in range(5)]
    found = connect_all(hellos, tell=lambda connected: (connected.hosts, connected.cores))
    for hello, (_, cores) in zip(hellos, found, strict=True):
        assert cores == len({core for other in hellos if other.host == hello.host for core in other.cores})


def test_by_default_a_rank_says_which_cores_it_may_use():
    assert Hello(0, 1, "node").cores == tuple(sorted(os.sched_getaffinity(0)))
