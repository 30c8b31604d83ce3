"""Batches: what fuses comes out as if it had run alone."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.api import DType, Operation, ReduceOp, Request
from collectives.buffers import as_buffer, empty
from collectives.controller.messages import Response
from collectives.engine.work import Work, execute
from tests.collectives.backends.inproc import InprocBackend, InprocGroup
from tests.collectives.backends.members import group_of, in_threads

shapes = st.lists(st.integers(0, 4), max_size=2).map(tuple)


def allocate(dtype):
    return lambda shape: empty(dtype, shape)


class Counting(InprocBackend):
    """Counts its calls."""

    calls = 0

    def _exchange(self, call, payload):
        self.calls += 1
        return super()._exchange(call, payload)


def on_all_ranks(size, tensors, responses):
    """``tensors[rank][i]`` is what a rank has for ``responses[i]``: the results alone and fused, by rank."""

    def body(rank):
        backend = Counting(group_of(size, rank), group, 20.0)
        results = []
        for batches in ([[index] for index in range(len(responses))], [range(len(responses))]):
            begin, works = backend.calls, []
            for batch in batches:
                works += (batch_works := [work(rank, index) for index in batch])
                execute(batch_works, [responses[index] for index in batch], backend)
            assert backend.calls - begin == len(batches)
            results.append([each.result().owner for each in works])
        return results

    def work(rank, index):
        source = as_buffer(tensors[rank][index].copy())
        return Work(replace(responses[index].request, shape=source.shape), source, allocate(source.dtype))

    group = InprocGroup(size)
    return in_threads(size, body, 20.0)


def assert_same(results, expected):
    for alone, fused in results:
        for one, other, wanted in zip(alone, fused, expected, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other, strict=True)
            np.testing.assert_array_equal(one, wanted)


@settings(max_examples=50)
@given(st.data(), st.integers(1, 4))
def test_fused_allgathers(data, size):
    dtypes = data.draw(st.lists(st.sampled_from([DType.FLOAT64, DType.INT8, DType.BOOL]), min_size=1, max_size=5))
    tails = [data.draw(shapes) for _ in dtypes]
    sizes = [data.draw(st.tuples(*[st.integers(0, 3)] * size)) for _ in dtypes]
    generator = np.random.default_rng(0)
    tensors = [
        [
            generator.integers(0, 100, (rows[rank], *tail)).astype(dtype.storage)
            for dtype, tail, rows in zip(dtypes, tails, sizes, strict=True)
        ]
        for rank in range(size)
    ]
    responses = [
        Response(index, Request(f"t{index}", Operation.ALLGATHER, dtype, (rows[0], *tail)), rows)
        for index, (dtype, tail, rows) in enumerate(zip(dtypes, tails, sizes, strict=True))
    ]
    results = on_all_ranks(size, tensors, responses)
    expected = [np.concatenate(of_ranks) for of_ranks in zip(*tensors, strict=True)]
    assert_same(results, expected)


def uneven(rows, size):
    return (min(rows, 1), *[0] * (size - 2), max(0, rows - 1)) if size > 1 else (rows,)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 9), shapes), min_size=1, max_size=5),
    st.integers(1, 4),
    st.sampled_from([DType.FLOAT64, DType.INT32, DType.COMPLEX64]),
    st.sampled_from([ReduceOp.SUM, ReduceOp.AVERAGE]),
    st.sampled_from([1.0, 2.0]),
    st.booleans(),
)
def test_fused_reducescatters(tensor_shapes, size, dtype, op, factor, gives_splits):
    """With splits the last rank gets all rows but one."""
    generator = np.random.default_rng(1)
    tensors = [
        [
            (generator.integers(0, 100, (rows, *tail)) * (1 + 2j if dtype is DType.COMPLEX64 else 1)).astype(
                dtype.storage
            )
            for rows, tail in tensor_shapes
        ]
        for _ in range(size)
    ]
    responses = [
        Response(
            index,
            Request(
                f"t{index}",
                Operation.REDUCESCATTER,
                dtype,
                (rows, *tail),
                op,
                prescale_factor=factor,
                splits=uneven(rows, size) if gives_splits else (),
            ),
        )
        for index, (rows, tail) in enumerate(tensor_shapes)
    ]
    results = on_all_ranks(size, tensors, responses)
    for rank, result in enumerate(results):
        share = factor / (size if op is ReduceOp.AVERAGE else 1)
        totals = [sum(of_ranks) * share for of_ranks in zip(*tensors, strict=True)]
        cuts = [np.cumsum(uneven(len(total), size))[:-1] if gives_splits else size for total in totals]
        parts = [
            np.array_split(total.astype(dtype.storage), cut)[rank] for total, cut in zip(totals, cuts, strict=True)
        ]
        assert_same([result], parts)
