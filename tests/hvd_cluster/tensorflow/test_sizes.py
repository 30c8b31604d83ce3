"""Tensors whose sizes sometimes repeat and sometimes change, so that attempts without the coordinator are declined.

TensorFlow gives the memory of an output once: an attempt must not take it.
"""

import functools
import random

import numpy as np
import pytest
import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from tests.checks import each_check

STEPS = 40
ROWS = tf.TensorSpec([None, 2])
VECTOR = tf.TensorSpec([None], tf.int32)


def sizes(seed, columns=1):
    """For each step and rank, ``columns`` numbers of rows: the last ones on all ranks, or others on some."""
    draw, ranks = random.Random(seed), range(hvd.size())
    rows = {rank: [3] * columns for rank in ranks}
    for _ in range(STEPS):
        if draw.random() < 0.4:
            most = draw.choice([1, 6, 3000])
            rows |= {rank: [draw.randint(0, most) for _ in range(columns)] for rank in ranks if draw.random() < 0.6}
        yield [rows[rank] for rank in ranks]


def full(rows, rank):
    return np.full((rows, 2), rank + 1.0, np.float32)


def in_both_modes(call, *specs):
    return call, tf.function(call, input_signature=specs)


def check_allgather():
    for number, call in enumerate(in_both_modes(lambda x: hvd.allgather(x, name="rows"), ROWS)):
        for rows in sizes(number):
            expected = [full(count, rank) for rank, [count] in enumerate(rows)]
            np.testing.assert_array_equal(call(expected[hvd.rank()]), np.concatenate(expected))


def check_allgather_of_a_process_set():
    """The last rank has no part in it."""
    ranks = [*range(max(1, hvd.size() - 1))]
    some = hvd.add_process_set(ranks) if len(ranks) < hvd.size() else hvd.global_process_set
    gather = functools.partial(hvd.allgather, name="some", process_set=some)
    for number, call in enumerate(in_both_modes(gather, ROWS) if hvd.rank() in ranks else ()):
        for rows in sizes(number):
            expected = [full(rows[rank][0], rank) for rank in ranks]
            np.testing.assert_array_equal(call(expected[hvd.rank()]), np.concatenate(expected))
    if some is not hvd.global_process_set:
        hvd.remove_process_set(some)


def check_the_gradient_of_allgather():
    """It takes this rank's rows out of those of all, and so depends on the last output of the operation."""

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(hvd.allgather(x, name="forward") ** 2)
        return tape.gradient(loss, x)

    for number, call in enumerate(in_both_modes(gradient, ROWS)):
        for rows in sizes(number):
            mine = full(rows[hvd.rank()][0], hvd.rank())
            np.testing.assert_allclose(call(tf.constant(mine)), 2 * mine)


def check_alltoall():
    def exchange(x, splits):
        return hvd.alltoall(x, splits, name="parts")

    for number, call in enumerate(in_both_modes(exchange, ROWS, VECTOR)):
        for rows in sizes(number, hvd.size()):
            splits = rows[hvd.rank()]
            result, received = call(full(sum(splits), hvd.rank()), np.array(splits, np.int32))
            expected = [full(of_rank[hvd.rank()], rank) for rank, of_rank in enumerate(rows)]
            np.testing.assert_array_equal(result, np.concatenate(expected))
            assert received.numpy().tolist() == [len(part) for part in expected]


def check_operations_on_equal_shapes():
    def reduce(x):
        half = hvd.allreduce(x, op=hvd.Sum, name="sum", prescale_factor=0.5)
        return half, hvd.broadcast(x * 2.0, 0, name="sent"), hvd.reducescatter(x, op=hvd.Sum, name="scattered")

    for number, call in enumerate(in_both_modes(reduce, ROWS)):
        for [[rows], *_] in sizes(number):
            total = sum(full(rows, rank) for rank in range(hvd.size()))
            half, sent, part = call(full(rows, hvd.rank()))
            np.testing.assert_array_equal(half, total / 2)
            np.testing.assert_array_equal(sent, full(rows, 0) * 2)
            np.testing.assert_array_equal(part, np.array_split(total, hvd.size())[hvd.rank()])


def check_groups():
    def together(x, y):
        return (
            hvd.grouped_allgather([x, y, x[:1]], name="gathered"),
            hvd.grouped_reducescatter([y, y], op=hvd.Sum, name="scattered"),
        )

    for number, call in enumerate(in_both_modes(together, ROWS, ROWS)):
        for rows in sizes(number):
            alike = [full(rows[0][0], rank) for rank in range(hvd.size())]
            ragged = [full(count, rank) for rank, [count] in enumerate(rows)]
            gathered, scattered = call(ragged[hvd.rank()], alike[hvd.rank()])
            for result, parts in zip(gathered, (ragged, alike, [each[:1] for each in ragged]), strict=True):
                np.testing.assert_array_equal(result, np.concatenate(parts))
            for part in scattered:
                np.testing.assert_array_equal(part, np.array_split(sum(alike), hvd.size())[hvd.rank()])


def check_slices():
    """As the gradient of an embedding."""

    def reduce(values, indices):
        return hvd.allreduce(tf.IndexedSlices(values, indices, tf.constant([5000, 2])), op=hvd.Sum, name="slices")

    for number, call in enumerate(in_both_modes(reduce, ROWS, VECTOR)):
        for rows in sizes(number):
            of_ranks = [full(count, rank) for rank, [count] in enumerate(rows)]
            result = call(of_ranks[hvd.rank()], np.arange(len(of_ranks[hvd.rank()]), dtype=np.int32))
            np.testing.assert_array_equal(result.values, np.concatenate(of_ranks))
            np.testing.assert_array_equal(result.indices, np.concatenate([np.arange(len(each)) for each in of_ranks]))


def check_a_tape():
    """A variable with a sparse gradient, and one with a dense gradient of the same tensor."""
    table, weight = tf.Variable(tf.ones([50, 2])), tf.Variable(tf.ones([2]))

    def gradients(indices):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(tf.gather(table, indices) * weight)
        return tape.gradient(loss, [table, weight])

    for number, call in enumerate(in_both_modes(gradients, VECTOR)):
        for rows in sizes(number):
            counts = [min(count, 50) for [count] in rows]
            sparse, dense = call(np.arange(counts[hvd.rank()], dtype=np.int32))
            used = np.zeros((50, 2), np.float32)
            for count in counts:
                used[:count] += 1 / hvd.size()
            np.testing.assert_allclose(tf.convert_to_tensor(sparse), used, rtol=1e-5)
            np.testing.assert_allclose(dense, np.full(2, sum(counts) / hvd.size()), rtol=1e-5)


def check_a_loop():
    """Each iteration has sizes of its own; a run of the graph repeats some of those of the run before."""

    @tf.function(input_signature=[VECTOR])
    def loop(counts):
        totals = tf.TensorArray(tf.float32, tf.size(counts))
        for step in tf.range(tf.size(counts)):
            rows = hvd.allgather(tf.fill([counts[step], 2], 1.0), name="in the loop")
            totals = totals.write(step, tf.reduce_sum(rows))
        return totals.stack()

    steps = [*sizes(0)]
    for start in range(0, STEPS, 5):
        some = steps[start : start + 5]
        expected = [2 * sum(count for [count] in rows) for rows in some]
        mine = [rows[hvd.rank()][0] for rows in some]
        assert loop(np.array(mine, np.int32)).numpy().tolist() == expected


@pytest.fixture(
    scope="session", params=[(2, None), (3, None), (2, "ab"), (3, "abb")], ids=["2", "3", "two hosts", "3 on two hosts"]
)
def members(request, pools):
    """Ranks that agree in shared memory, or over TCP."""
    size, hosts = request.param
    return pools(size, hosts)


@each_check(globals())
def test_sizes(members, check):
    members.run(check)
