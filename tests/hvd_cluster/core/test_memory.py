"""Memory that is used again: never while anything views it, and not kept for ever."""

import gc
import os
import threading

import numpy as np
import pytest

from hvd_cluster.core import memory
from hvd_cluster.core.memory import ResultMemory

SIZE = 4 << 20
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


@pytest.fixture
def pool():
    pool = ResultMemory()
    yield pool
    pool.close()


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_that_nothing_views_is_used_again(pool):
    first = pool.take(SIZE)
    place = address(first)
    del first
    assert pool.unused_bytes == SIZE
    assert address(pool.take(SIZE - 100)) == place


def test_results_of_nearly_the_same_size_share_memory(pool):
    place = address(pool.take(SIZE - 5000))
    assert address(pool.take(SIZE - 9000)) == place
    assert address(pool.take(SIZE // 2)) != place


VIEWS = {
    "itself": lambda array: array,
    "slice": lambda array: array[100:200],
    "slice of a slice": lambda array: array[100:][::7][3:],
    "other type": lambda array: array.view(np.float64).reshape(8, -1).T[5],
    "memoryview": memoryview,
    "memoryview of a slice": lambda array: memoryview(array[5:])[3:9],
    "frombuffer": lambda array: np.frombuffer(array, np.int32)[2:],
    "broadcast": lambda array: np.broadcast_to(array[:1], 10),
    "base": lambda array: array[5:].base,
    "base of all": lambda array: array.base,
    "iterator": lambda array: np.nditer(array[:5]),
    "flat": lambda array: array[3:].flat,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_memory_that_something_views_is_not_used_again(pool, view):
    array = pool.take(SIZE)
    place, held = address(array), view(array)
    del array
    gc.collect()
    assert pool.unused_bytes == 0
    others = [pool.take(SIZE) for _ in range(3)]
    assert place not in map(address, others)
    del held
    gc.collect()
    assert pool.unused_bytes == SIZE
    assert address(pool.take(SIZE)) == place


def test_arrays_that_are_held_do_not_overlap(pool):
    """Random takes and drops, each array with its own number in it."""
    generator = np.random.default_rng(1)
    held = {}
    for number in range(400):
        array = pool.take(int(generator.integers(memory.MINIMUM, 2 * memory.MINIMUM)))
        array[:] = number % 251
        held[number] = array
        if len(held) > 10:
            del held[int(generator.choice(list(held)))]
        assert all((array == number % 251).all() for number, array in held.items())


def test_threads_never_get_the_same_memory(pool):
    wrong = []

    def use(number):
        for _ in range(200):
            array = pool.take(memory.MINIMUM)
            array[:] = number
            kept = array[1000:]
            del array
            if not (kept == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_garbage_collector_may_give_back_anywhere(pool):
    ring = [pool.take(SIZE)]
    ring.append(ring)
    place = address(ring[0])
    del ring
    other = pool.take(SIZE)
    assert address(other) != place
    gc.collect()
    assert pool.unused_bytes == SIZE


def test_no_more_than_the_limit_is_kept(pool, monkeypatch):
    monkeypatch.setattr(memory, "KEPT_BYTES", 3 * SIZE)
    arrays = [pool.take(SIZE) for _ in range(5)]
    del arrays
    assert pool.unused_bytes == 3 * SIZE
    larger = pool.take(2 * SIZE)
    del larger
    assert pool.unused_bytes == 2 * SIZE, "other sizes make room"
    assert pool.take(4 * SIZE).size == 4 * SIZE
    assert pool.unused_bytes <= 3 * SIZE


def test_memory_is_let_go_when_none_is_taken_for_a_while(pool, monkeypatch):
    monkeypatch.setattr(memory, "KEPT_SECONDS", 0.5)
    array = pool.take(SIZE)
    thread = next(thread for thread in threading.enumerate() if thread.name == "hvd-results")
    del array
    thread.join(10)
    assert not thread.is_alive()
    assert pool.unused_bytes == 0
    late = pool.take(SIZE)
    assert any(thread.name == "hvd-results" for thread in threading.enumerate())
    del late


def test_sizes_that_are_no_longer_used_go_though_others_are(pool, monkeypatch):
    monkeypatch.setattr(memory, "KEPT_SECONDS", 0.01)
    large, small = pool.take(4 * SIZE), pool.take(SIZE)
    del large
    while pool.unused_bytes > 2 * SIZE:
        small = pool.take(SIZE)
    assert small.size == SIZE


def test_nothing_is_kept_after_the_close(pool):
    kept, late = pool.take(SIZE), pool.take(SIZE)
    del kept
    assert pool.unused_bytes
    pool.close()
    assert not pool.unused_bytes
    assert (late[:] == late).all()
    del late
    assert not pool.unused_bytes


def test_where_no_thread_can_start_nothing_is_kept(pool, monkeypatch):
    def start(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(2):
        assert pool.take(SIZE).size == SIZE
    assert pool.unused_bytes == 0


def test_a_forked_child_can_close_although_a_thread_of_the_parent_held_the_lock(pool):
    pool.take(SIZE)
    parent = pool._stop
    closing = threading.Thread(target=lambda: (pool.forget(), pool.close()))
    with parent._cond:
        closing.start()
        closing.join(10)
        ended = not closing.is_alive()
    parent.set()
    closing.join()
    assert ended


@forks
def test_a_forked_child_has_its_own_copy(pool):
    held = pool.take(SIZE)
    held[:] = 1
    dropped = pool.take(SIZE)
    dropped[:] = 2
    del dropped
    child = os.fork()
    if not child:
        status = 1
        try:
            pool.forget()
            fresh = [pool.take(SIZE) for _ in range(2)]
            for array in fresh:
                array[:] = 3
            unchanged = (held == 1).all() and not any(address(array) == address(held) for array in fresh)
            held[:] = 4
            del held
            array = pool.take(SIZE)
            status = 0 if unchanged and pool._keeps else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert (held == 1).all()
    assert (pool.take(SIZE) == 2).all()


@forks
def test_a_fork_while_another_thread_takes_and_drops(pool):
    """No lock of the parent is left locked in a child."""
    stop = threading.Event()

    def work():
        while not stop.is_set():
            pool.take(memory.MINIMUM)
            pool.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(50):
            child = os.fork()
            if not child:
                pool.forget()
                pool.take(memory.MINIMUM)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()
