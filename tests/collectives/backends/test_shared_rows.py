"""Allreduces in place, in memory that all members share. Members are threads, so any memory is shared."""

import functools
import threading

import numpy as np
import pytest

from collectives.api import DType, HorovodInternalError, Operation, ReduceOp, Request
from collectives.backends.shm import ShmBootstrap
from collectives.backends.shm.barrier import BUFFER_BYTES
from collectives.buffers import as_buffer
from collectives.kernels.reduction import reduction
from collectives.kernels.segments import Segments
from collectives.store.memory import MemoryStore
from tests.collectives.backends.members import group_of, in_threads
from tests.collectives.backends.offers import meet
from tests.collectives.engine.job import running

TIMEOUT = 20.0
KEY = b"a key"
SIZES = [1, 3 * BUFFER_BYTES // 4 + 5, 7, 100_000]  # in elements
ROW_BYTES = 8 * sum(SIZES) + 4096


def with_backends(size, body):
    """``body(backend, rows)`` on a thread of each member; the rows are the same memory for all."""

    def work(rank):
        backend = meet(ShmBootstrap(group_of(size, rank), TIMEOUT, crowded=False), store, TIMEOUT)
        try:
            return body(backend, rows)
        finally:
            backend.close()

    store, rows = MemoryStore(), np.zeros((size, ROW_BYTES), np.uint8)
    return in_threads(size, work)


def arrays_in(row, dtype=np.float32, sizes=SIZES, gap=64):
    """Arrays that lie one after the other in ``row``, from ``gap`` on."""
    arrays, start = [], gap
    for size in sizes:
        arrays.append(row[start : start + size * np.dtype(dtype).itemsize].view(dtype))
        start += -(-arrays[-1].nbytes // 64) * 64 + gap
    return arrays


def fill(arrays, rank):
    generator = np.random.default_rng(rank)
    for array in arrays:
        array[:] = (generator.random(len(array)) * 100).astype(array.dtype)


def expected(arrays, size, dtype, op, postscale):
    """The result of the kernel for the arrays of all ranks, in their order."""
    copies = [[array.copy() for array in arrays] for _ in range(size)]
    for rank, each in enumerate(copies):
        fill(each, rank)
    results = []
    for inputs in zip(*copies, strict=True):
        results.append(np.empty_like(inputs[0]))
        reduction(dtype, op, 1.0, postscale).combine_silently(results[-1], inputs)
    return results


def reduce(backend, arrays, op=ReduceOp.SUM, postscale=1.0, dtype=None):
    """In place; the phases of the operation."""
    seen = []
    buffers = [as_buffer(array) for array in arrays]
    if dtype is not None:
        buffers = [buffer.cast(dtype) for buffer in buffers]
    backend.observe(seen.append)
    backend.allreduce(buffers, buffers, op, 1.0, postscale)
    backend.observe(None)
    return {name for name, _, _ in seen}


def check(backend, arrays, op=ReduceOp.SUM, postscale=1.0, dtype=DType.FLOAT32):
    """Whether nothing was copied; the results are right."""
    fill(arrays, backend.rank)
    phases = reduce(backend, arrays, op, postscale, dtype)
    for array, right in zip(arrays, expected(arrays, backend.size, dtype, op, postscale), strict=True):
        assert array.tobytes() == right.tobytes()
    return "copy out" not in phases


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_same_bits_as_the_kernel(size):
    def body(backend, rows):
        leave = backend.share(list(rows), KEY)
        found = [
            check(backend, arrays_in(rows[backend.rank])),
            check(backend, arrays_in(rows[backend.rank])[1:2], postscale=1 / size),
            check(backend, arrays_in(rows[backend.rank], np.float64, gap=192), ReduceOp.MIN, dtype=DType.FLOAT64),
            check(backend, arrays_in(rows[backend.rank], np.int64), ReduceOp.AVERAGE, dtype=DType.INT64),
            check(backend, arrays_in(rows[backend.rank], np.float16), postscale=1 / size, dtype=DType.FLOAT16),
        ]
        del leave
        return found, check(backend, arrays_in(rows[backend.rank]))

    assert with_backends(size, body) == [([True] * 5, False)] * size


def test_what_lies_between_the_tensors_stays():
    def body(backend, rows):
        rows[backend.rank] = backend.rank + 1
        arrays = arrays_in(rows[backend.rank])
        leave = backend.share(list(rows), KEY)
        backend.barrier()
        is_in_place = check(backend, arrays)
        for array in arrays:
            array.view(np.uint8)[:] = backend.rank + 1
        return leave is not None, is_in_place, set(rows[backend.rank].tolist())

    assert with_backends(2, body) == [(True, True, {1}), (True, True, {2})]


def elsewhere(rows, rank):
    return [array.copy() for array in arrays_in(rows[rank])]


def one_elsewhere(rows, rank):
    arrays = arrays_in(rows[rank])
    return [*arrays[:1], arrays[1].copy(), *arrays[2:]]


def at_another_place(rows, rank):
    return arrays_in(rows[rank], gap=64 + 64 * rank)


def last_one_further_away(rows, rank):
    return [*arrays_in(rows[rank])[:3], rows[rank][-4 * SIZES[3] :].view(np.float32)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("other", [elsewhere, one_elsewhere, at_another_place, last_one_further_away])
def test_a_rank_with_tensors_at_another_place(size, other):
    """The others do as it does, in this operation only."""

    def body(backend, rows):
        leave = backend.share(list(rows), KEY)
        usual = functools.partial(arrays_in, rows[backend.rank])
        last = backend.rank == size - 1
        found = [check(backend, other(rows, backend.rank) if last else usual()), check(backend, usual())]
        return leave is not None and found

    assert with_backends(size, body) == [[False, True]] * size


def test_other_lengths_at_the_same_place():
    def body(backend, rows):
        leave = backend.share(list(rows), KEY)
        long = arrays_in(rows[backend.rank])[1]
        found = [check(backend, [long[:count]]) for count in (300_000, 100_000, len(long), 100_000)]
        return leave is not None and found

    assert with_backends(2, body) == [[True] * 4] * 2


def test_a_tensor_twice_in_a_batch():
    """Each of them has the result for the tensor as it was."""

    def body(backend, rows):
        leave = backend.share(list(rows), KEY)
        array = arrays_in(rows[backend.rank])[3]
        array[:] = backend.rank + 1
        phases = reduce(backend, [array, array])
        return leave is not None, "copy out" in phases, set(array.tolist())

    assert with_backends(2, body) == [(True, True, {3.0})] * 2


def test_an_abort_between_two_pieces():
    """The rank writes no more: the others may be in another world."""

    def body(backend, rows):
        leave = backend.share(list(rows), KEY)
        array = arrays_in(rows[backend.rank])[1]
        array[:] = backend.rank + 1
        backend.barrier()
        if backend.rank == 0:
            backend.abort(HorovodInternalError("the world has ended"))
            with pytest.raises(HorovodInternalError, match="the world has ended"):
                backend._allreduce._combine_in_place(
                    [Segments([arrays_in(row)[1]]) for row in rows], reduction(DType.FLOAT32, ReduceOp.SUM)
                )
        done.wait(TIMEOUT)
        return leave is not None, set(array.tolist())

    done = threading.Barrier(2)
    assert with_backends(2, body) == [(True, {1.0}), (True, {2.0})]


def test_ranks_that_share_other_memory():
    """Their keys differ."""

    def body(backend, rows):
        leave = backend.share(list(rows), KEY + bytes([backend.rank]))
        return leave is not None and check(backend, arrays_in(rows[backend.rank]))

    assert with_backends(2, body) == [False, False]


def test_results_elsewhere():
    def body(backend, rows):
        leave = backend.share(list(rows), KEY)
        arrays = arrays_in(rows[backend.rank])
        fill(arrays, backend.rank)
        before, results = [array.copy() for array in arrays], [np.empty_like(array) for array in arrays]
        backend.allreduce([as_buffer(each) for each in arrays], [as_buffer(each) for each in results], ReduceOp.SUM)
        assert all(np.array_equal(*pair) for pair in zip(arrays, before, strict=True))
        return leave is not None and [result.tobytes() for result in results]

    results = with_backends(2, body)
    right = expected(arrays_in(np.zeros(ROW_BYTES, np.uint8)), 2, DType.FLOAT32, ReduceOp.SUM, 1.0)
    assert results == [[array.tobytes() for array in right]] * 2


def test_an_engine():
    """Calls that repeat take the bypass, whose vote is the first crossing."""

    def total(engine, name, array):
        buffer = as_buffer(array)
        request = Request(name, Operation.ALLREDUCE, buffer.dtype, buffer.shape, op=ReduceOp.SUM)
        engine.run(request, buffer, lambda _: buffer)
        return set(array.tolist())

    def body(engine):
        rank = engine.topology.rank
        leave = engine.share(list(rows), KEY)
        gradient = rows[rank].view(np.float32)
        for turn in range(20):
            gradient[:] = turn * (rank + 1)
            assert total(engine, "gradient", gradient) == {turn * 3.0}
            if turn % 5 == 4:
                assert total(engine, "other", np.full(20_000 + turn, rank, np.float32)) == {1.0}
        return leave is not None

    rows = np.zeros((2, 4 * 50_000), np.uint8)
    with running(2, shared_memory=True) as job:
        assert job.run(body) == [True, True]
    with running(2) as job:
        assert [engine.share(list(rows), KEY) for engine in job.engines] == [None, None]
