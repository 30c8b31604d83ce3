"""Every operation with each dtype and each shape, eagerly and in a tf.function; expected values come from all ranks."""

import numpy as np
import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from tests.checks import each_check

INTEGERS = [tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64]
FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
COMPLEX = [tf.complex64, tf.complex128]
DTYPES = [*INTEGERS, *FLOATS, tf.bool, *COMPLEX]
SHAPES = [(), (0,), (1,), (0, 3), (4, 3, 2), (1 << 10, 129)]
REDUCE = {
    "Sum": lambda stacked: stacked.sum(0),
    "Average": lambda stacked: stacked.mean(0),
    "Min": lambda stacked: stacked.min(0),
    "Max": lambda stacked: stacked.max(0),
    "Product": lambda stacked: stacked.prod(0),
}


def make(shape, dtype, rank):
    """Small whole numbers, different on each rank, so that every dtype holds the exact result of every operation."""
    values = np.random.default_rng(17 + rank).integers(0, 3, shape)
    if dtype.is_complex:
        values = values + 1j * (2 - values)
    return tf.constant(np.asarray(values).astype(dtype.as_numpy_dtype))


def wide(tensor):
    return np.asarray(tensor.numpy()).astype(np.complex128 if tensor.dtype.is_complex else np.float64)


def everyone(shape, dtype, size):
    return np.stack([wide(make(shape, dtype, rank)) for rank in range(size)])


def expected_reduction(stacked, op, dtype):
    result = REDUCE[op](stacked)
    return (result if dtype.is_floating or dtype.is_complex else np.trunc(result)).astype(dtype.as_numpy_dtype)


def same(actual, expected):
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype.as_numpy_dtype == expected.dtype, (actual.dtype, expected.dtype)
    np.testing.assert_allclose(wide(actual), expected.astype(wide(actual).dtype), rtol=1e-2, atol=1e-2)


def both(function):
    """The results in eager mode and in a tf.function, converted by AutoGraph as those of users are."""
    return function(), tf.function(function)()


def each_dtype_and_shape(dtypes=DTYPES, shapes=SHAPES):
    """Not their product, which the matrix of backends has. Complex numbers travel as pairs, so they have all shapes."""
    with_all = [dtype for dtype in (tf.float32, tf.complex64) if dtype in dtypes]
    pairs = [(dtype, shapes[-2]) for dtype in dtypes] + [(dtype, shape) for dtype in with_all for shape in shapes]
    return list(dict.fromkeys(pairs))


def has_result(dtype, op):
    return not (dtype is tf.bool and op == "Average") and not (dtype.is_complex and op not in ("Average", "Sum"))


def check_allreduce():
    for op in REDUCE:
        cases = each_dtype_and_shape([dtype for dtype in DTYPES if has_result(dtype, op)])
        tensors = [make(shape, dtype, hvd.rank()) for dtype, shape in cases]
        for results in both(lambda: [hvd.allreduce(tensor, op=getattr(hvd, op)) for tensor in tensors]):  # noqa: B023
            for result, (dtype, shape) in zip(results, cases, strict=True):
                same(result, expected_reduction(everyone(shape, dtype, hvd.size()), op, dtype))
        for tensor, (dtype, shape) in zip(tensors, cases, strict=True):
            same(tensor, make(shape, dtype, hvd.rank()).numpy())


def check_a_name_that_is_a_number():
    for result in both(lambda: hvd.allreduce(tf.ones([2]), op=hvd.Sum, name=3)):
        assert result.numpy().tolist() == [hvd.size()] * 2


def check_grouped_allreduce():
    cases = each_dtype_and_shape()
    tensors = [make(shape, dtype, hvd.rank()) for dtype, shape in cases]
    for results in both(lambda: hvd.grouped_allreduce(tensors, op=hvd.Sum)):
        assert len(results) == len(tensors)
        for result, (dtype, shape) in zip(results, cases, strict=True):
            same(result, expected_reduction(everyone(shape, dtype, hvd.size()), "Sum", dtype))


def check_a_group_of_no_tensors():
    """Nothing travels: a rank may call it alone."""
    for group in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter) if hvd.rank() else ():
        for results in both(lambda: group([], name="none")):  # noqa: B023
            assert results == []


def check_large_intermediate_results_are_reduced_in_their_own_memory():
    """TensorFlow gives the memory of an input away that nobody else reads, but never that of another."""

    @tf.function
    def step(tensor):
        sums = [hvd.allreduce(tensor * factor, op=hvd.Sum) for factor in range(1, 4)]
        return tensor, sums, hvd.allreduce(sums[0], op=hvd.Sum)

    tensor = make((1 << 16,), tf.float32, hvd.rank())
    total = everyone((1 << 16,), tf.float32, hvd.size()).sum(0).astype(np.float32)
    unchanged, sums, twice = step(tensor)
    same(unchanged, tensor.numpy())
    for factor, each in enumerate(sums, start=1):
        same(each, total * factor)
    same(twice, total * hvd.size())


def check_scaling():
    for dtype in (tf.float32, tf.float64, tf.bfloat16):
        tensor = make((5,), dtype, hvd.rank())
        total = everyone((5,), dtype, hvd.size()).sum(0)
        scales = {"prescale_factor": 1 / 3, "postscale_factor": 0.3}
        for result in both(lambda: hvd.allreduce(tensor, op=hvd.Sum, **scales)):  # noqa: B023
            np.testing.assert_allclose(wide(result), total * 0.1, rtol=1e-12 if dtype is tf.float64 else 2e-2)


def check_allgather():
    def rows(rank):
        return rank + 1, 3

    for dtype, trailing in each_dtype_and_shape(shapes=[(), (0,), (3,), (2, 2)]):
        shapes = [(rank * 2 % 5, *trailing) for rank in range(hvd.size())]
        tensor = make(shapes[hvd.rank()], dtype, hvd.rank())
        expected = np.concatenate([make(shape, dtype, rank).numpy() for rank, shape in enumerate(shapes)])
        for result in both(lambda: hvd.allgather(tensor)):  # noqa: B023
            same(result, expected)


def check_grouped_allgather():
    tensors = [tf.fill([hvd.rank() + index], tf.cast(hvd.rank(), tf.int32)) for index in range(3)]
    for results in both(lambda: hvd.grouped_allgather(tensors)):
        for index, result in enumerate(results):
            expected = np.concatenate([np.full(rank + index, rank, np.int32) for rank in range(hvd.size())])
            same(result, expected)


def check_broadcast():
    for root in range(hvd.size()):
        tensors = [make(shape, dtype, hvd.rank()) for dtype, shape in each_dtype_and_shape()]
        expected = [make(shape, dtype, root).numpy() for dtype, shape in each_dtype_and_shape()]
        for results in both(lambda: [hvd.broadcast(tensor, root) for tensor in tensors]):  # noqa: B023
            for result, wanted in zip(results, expected, strict=True):
                same(result, wanted)


def check_types_that_only_move():
    """Such as that of a seed of Keras; the engine does not compute with them."""
    last, size = hvd.size() - 1, hvd.size()
    for dtype in (tf.uint16, tf.uint32, tf.uint64):
        large = np.iinfo(dtype.name).max // 2 + 7
        tensor = tf.constant([hvd.rank(), large], dtype)
        repeated = tf.constant(np.repeat(tensor.numpy(), size))
        for gathered, sent, exchanged in both(
            lambda: (hvd.allgather(tensor), hvd.broadcast(tensor, last), hvd.alltoall(repeated))  # noqa: B023
        ):
            assert (gathered.dtype, sent.dtype, exchanged.dtype) == (dtype,) * 3
            mine = ([0] * size + [1] * size)[2 * hvd.rank() :][:2]
            assert exchanged.numpy().tolist() == [large if each else rank for rank in range(size) for each in mine]
            assert gathered.numpy().tolist() == [value for rank in range(size) for value in (rank, large)]
            assert sent.numpy().tolist() == [last, large]


def check_alltoall():
    """Rank r sends r + d rows to rank d."""
    ranks = range(hvd.size())
    for dtype in DTYPES:
        splits = [hvd.rank() + rank for rank in ranks]
        tensor = tf.fill([sum(splits), 2], tf.cast(hvd.rank() % 2, dtype))
        counts = [rank + hvd.rank() for rank in ranks]
        expected = np.concatenate([np.full((rank + hvd.rank(), 2), rank % 2) for rank in ranks])
        for output, received in both(lambda: hvd.alltoall(tensor, splits)):  # noqa: B023
            same(output, expected.astype(dtype.as_numpy_dtype))
            assert received.dtype == tf.int32
            assert received.numpy().tolist() == counts
    for output in both(lambda: hvd.alltoall(tf.fill([2 * hvd.size()], hvd.rank()))):
        same(output, np.repeat(np.arange(hvd.size()), 2).astype(np.int32))


def check_reducescatter():
    for rows in (0, 1, 4, 7):
        tensor = make((rows, 3), tf.float32, hvd.rank())
        parts = np.array_split(everyone((rows, 3), tf.float32, hvd.size()).sum(0), hvd.size())
        expected = parts[hvd.rank()].astype(np.float32)
        for single, (first, second) in both(
            lambda: (
                hvd.reducescatter(tensor, op=hvd.Sum),  # noqa: B023
                hvd.grouped_reducescatter([tensor, tf.cast(tensor, tf.float64)], op=hvd.Sum),  # noqa: B023
            )
        ):
            same(single, expected)
            same(first, expected)
            same(second, expected.astype(np.float64))


def check_slices():
    rank, size = hvd.rank(), hvd.size()
    slices = tf.IndexedSlices(tf.fill([2, 3], float(rank + 1)), tf.constant([rank, rank + 1]), tf.constant([9, 3]))
    indices = np.concatenate([[each, each + 1] for each in range(size)]).astype(np.int32)
    for total, average, (dense, half, other) in both(
        lambda: (
            hvd.allreduce(slices, op=hvd.Sum),
            hvd.allreduce(slices),
            hvd.grouped_allreduce([tf.ones([2]), slices, tf.zeros([1])], op=hvd.Sum, compression=hvd.Compression.bf16),
        )
    ):
        rows = np.repeat(np.arange(1, size + 1), 2)[:, None] * np.ones((1, 3))
        for result, factor in ((total, 1), (average, 1 / size), (half, 1)):
            assert isinstance(result, tf.IndexedSlices)
            same(result.indices, indices)
            same(result.values, (rows * factor).astype(np.float32))
            assert result.dense_shape.numpy().tolist() == [9, 3]
        same(dense, np.full(2, size, np.float32))
        same(other, np.zeros(1, np.float32))


def check_compression():
    tensor = tf.constant([1.5, hvd.rank()])
    integers = tf.constant([1, hvd.rank()])
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        for result, group, rows, whole in both(
            lambda: (
                hvd.allreduce(tensor, compression=compression),  # noqa: B023
                hvd.grouped_allreduce([tensor], compression=compression),  # noqa: B023
                hvd.reducescatter(tf.repeat(tensor[:1], hvd.size()), compression=compression),  # noqa: B023
                hvd.allreduce(integers, compression=compression, op=hvd.Sum),  # noqa: B023
            )
        ):
            same(result, np.array([1.5, (hvd.size() - 1) / 2], np.float32))
            same(group[0], np.array([1.5, (hvd.size() - 1) / 2], np.float32))
            same(rows, np.array([1.5], np.float32))
            same(whole, np.array([hvd.size(), sum(range(hvd.size()))], np.int32))


def check_join_and_barrier():
    last = hvd.size() - 1
    if hvd.rank() == last:
        same(hvd.allreduce(tf.ones([2]), op=hvd.Sum), np.ones(2, np.float32))
    for joined in both(hvd.join):
        assert joined.dtype == tf.int32
        assert 0 <= int(joined) <= last
    assert both(hvd.barrier) == (None, None)


def check_numbers():
    for numbers in both(
        lambda: [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op()]
    ):
        values = [int(number) for number in numbers]
        assert values == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), 1]
        assert all(number.dtype == tf.int32 and number.shape == () for number in numbers)


def check_python_values_are_converted():
    assert hvd.allreduce(1.5).numpy() == 1.5
    assert hvd.allreduce([1, 2], op=hvd.Sum).numpy().tolist() == [hvd.size(), 2 * hvd.size()]
    assert hvd.allgather(np.ones((1, 2))).shape == (hvd.size(), 2)


@each_check(globals())
def test_operation(ranks, check):
    ranks.run(check)
