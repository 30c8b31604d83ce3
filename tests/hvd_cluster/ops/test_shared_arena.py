"""Memory for tensors that ranks combine in place, on real processes."""

import copy
import gc
import os
from unittest import mock

import numpy as np
import pytest

from collectives import Operation, ReduceOp, Request, as_buffer
from collectives.backends.shm.backend import ShmAllreduce
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import global_process_set
from hvd_cluster.ops.shared_arena import SharedArena, can_share, combine_in_place

IN_PLACE = "collectives.backends.shm.backend.ShmAllreduce._combine_in_place"
COMBINE = ShmAllreduce._combine_in_place


def total(arrays):
    """Add up each array over the ranks; whether all were combined in place."""
    engine, works = basics.engine(), []
    with mock.patch(IN_PLACE, autospec=True, side_effect=COMBINE) as combine:
        for place, buffer in enumerate(map(as_buffer, arrays)):
            request = Request(f"total.{place}", Operation.ALLREDUCE, buffer.dtype, buffer.shape, op=ReduceOp.SUM)
            works.append(engine.submit(request, buffer, lambda _, buffer=buffer: buffer))
        for work in works:
            engine.synchronize(work)
    return combine.call_count > 0


def check_arena():
    rank, size = basics.rank(), basics.size()
    arena = SharedArena()
    arrays = [arena.take([200, 300], np.float32), arena.take([7], np.int32), arena.take([50_000], np.float64)]
    assert arena.take([0, 3], np.float32) is None
    assert copy.deepcopy(arena) is arena
    assert not any(array.any() for array in arrays)

    def is_in_place():
        for array in arrays:
            array[:] = rank + 1
        found = total(arrays)
        assert all(set(array.ravel().tolist()) == {size * (size + 1) / 2} for array in arrays)
        return found

    assert not is_in_place()
    for _ in range(2):
        assert combine_in_place(arena, "arena", global_process_set)
        assert is_in_place()
    del arena
    gc.collect()
    assert not is_in_place()  # the tensors outlive it
    arrays.clear()
    gc.collect()
    return sum("hvd-cluster-arena" in _target(name) for name in os.listdir("/proc/self/fd"))


def _target(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # that of the listing
        return ""


def test_arena(ranks):
    assert ranks.run(check_arena) == [0] * ranks.size


def check_a_rank_that_differs(change):
    arena = SharedArena()
    array = arena.take([100_000], np.float32)
    if basics.rank() == 1:
        arena, array = change(arena, array)
    connected = combine_in_place(arena, "arena", global_process_set)
    array = np.ones(100_000, np.float32) if array is None else array
    array[:] = basics.rank() + 1.0
    found = total([array])
    assert set(array.tolist()) == {3.0}
    return connected, found


def with_more(arena, array):
    arena.take([1], np.float32)
    return arena, array


def without_memory(arena, array):
    with mock.patch("os.memfd_create", side_effect=OSError(24, "Too many open files")):
        arena = SharedArena()
    return arena, arena.take([100_000], np.float32)


def without_room(arena, array):
    arena = SharedArena()
    with mock.patch("os.posix_fallocate", side_effect=OSError(28, "No space left on device")):
        return arena, arena.take([100_000], np.float32)


def without_arena(arena, array):
    return None, array


def behind_another_path(arena, array):
    arena._token = bytes(32)  # as a process of another container finds another file there
    return arena, array


@pytest.mark.parametrize("change", [with_more, without_memory, without_room, without_arena, behind_another_path])
def test_a_rank_that_differs(two, change):
    assert two.run(check_a_rank_that_differs, change) == [(False, False)] * 2


def check_ranks_without_memory():
    with mock.patch("os.posix_fallocate", side_effect=OSError(95, "Operation not supported")):
        arena = SharedArena()
    assert arena.take([100_000], np.float32) is None
    return combine_in_place(arena, "arena", global_process_set)


def test_ranks_without_memory(two):
    assert two.run(check_ranks_without_memory) == [False, False]


def check_arenas_of_other_members():
    """The last rank joins while the others share an arena anew: its earlier sharing with all fits no more."""
    rank, size = basics.rank(), basics.size()
    arena = SharedArena()
    array = arena.take([100_000], np.float32)
    assert combine_in_place(arena, "all", global_process_set)
    if rank == size - 1:
        basics.engine().join()
    else:
        assert not combine_in_place(arena, "some", global_process_set)
        basics.engine().join()
    array[:] = rank + 1
    found = total([array])
    assert set(array.tolist()) == {size * (size + 1) / 2}
    return found


def test_arenas_of_other_members(ranks):
    assert ranks.run(check_arenas_of_other_members) == [False] * ranks.size


def test_ranks_that_share_no_host(apart):
    def check():
        return can_share(global_process_set), combine_in_place(SharedArena(), "arena", global_process_set)

    assert apart.run(check) == [(False, False)] * 2
