"""The gradients of operations: on a tape in eager mode, on one around a tf.function, and inside one."""

import numpy as np
import pytest
import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from tests.checks import each_check


def gradients(loss, *sources):
    """Of ``loss(*sources)``, computed in each of the ways; None stays None."""

    def on_tape(function):
        with tf.GradientTape() as tape:
            tape.watch(sources)
            value = function(*sources)
        return tape.gradient(value, sources)

    inside = tf.function(lambda: on_tape(loss))
    return on_tape(loss), on_tape(tf.function(loss)), inside()


def assert_gradients(loss, sources, expected):
    for found in gradients(loss, *sources):
        for each, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(each.numpy(), wanted, rtol=1e-6)


def weights():
    """Different on each rank, as is what a rank computes from a result."""
    return tf.constant([1.0, 2.0, 3.0]) * (hvd.rank() + 1)


def sum_of_weights():
    return np.array([1.0, 2.0, 3.0]) * sum(range(1, hvd.size() + 1))


def check_allreduce():
    ones, size = tf.ones([3]), hvd.size()
    assert_gradients(lambda x: tf.reduce_sum(hvd.allreduce(x) * weights()), [ones], [sum_of_weights() / size])
    assert_gradients(lambda x: tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum) * weights()), [ones], [sum_of_weights()])

    def scaled(x):
        return tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0) * weights())

    assert_gradients(scaled, [ones], [sum_of_weights() * 1.5])


def check_a_group_has_gradients_where_its_tensors_have():
    def loss(x, y):
        first, _, second = hvd.grouped_allreduce([x, tf.constant([1, 2]), y], op=hvd.Sum)
        return tf.reduce_sum(first * weights()) + 2 * tf.reduce_sum(second)

    assert_gradients(loss, [tf.ones([3]), tf.ones([2])], [sum_of_weights(), np.full(2, 2 * hvd.size())])


def check_some_rows_of_a_result():
    """Their gradient is an IndexedSlices."""
    expected = np.array([[2.0], [0.0], [1.0]]) * hvd.size()

    def loss(table):
        rows = tf.gather(hvd.allreduce(table, op=hvd.Sum), [0, 2, 0])
        return tf.reduce_sum(rows) + tf.reduce_sum(tf.gather(hvd.grouped_allreduce([table])[0], [1])) * 0.0

    assert_gradients(loss, [tf.ones([3, 1])], [expected])


def check_allgather():
    rows = hvd.rank() + 1
    first = sum(range(1, rows))
    total = sum(range(1, hvd.size() + 1))
    scale = tf.range(1.0, total + 1.0) * (hvd.rank() + 1)
    average = np.arange(1.0, total + 1) * sum(range(1, hvd.size() + 1)) / hvd.size()
    expected = average[first : first + rows]
    assert_gradients(lambda x: tf.reduce_sum(hvd.allgather(x) * scale), [tf.ones([rows])], [expected])

    def grouped(x, y):
        first, second = hvd.grouped_allgather([x, y])
        return tf.reduce_sum(first * scale) + tf.reduce_sum(second)

    assert_gradients(grouped, [tf.ones([rows]), tf.ones([1])], [expected, [1.0]])


def check_a_contrastive_loss_on_a_distributed_tape():
    """The encoder gets 1/size of the joint gradient, and all of it with the function of docs/tensorflow.md."""

    @tf.custom_gradient
    def joint(embeddings):
        return tf.identity(embeddings), lambda gradient: gradient * hvd.size()

    def loss(embeddings):
        return tf.reduce_logsumexp(embeddings @ tf.transpose(embeddings))

    def gradient(gather, mine):
        with tf.GradientTape() as tape:
            value = loss(gather(mine @ weight))
        return hvd.DistributedGradientTape(tape).gradient(value, weight)

    weight = tf.Variable(tf.eye(2))
    samples = [tf.constant([[0.1, 0.2 * rank], [0.3, 0.4]]) for rank in range(hvd.size())]
    with tf.GradientTape() as tape:
        value = loss(tf.concat(samples, 0) @ weight)
    expected, mine = tape.gradient(value, weight), samples[hvd.rank()]
    np.testing.assert_allclose(gradient(hvd.allgather, mine), expected / hvd.size(), rtol=1e-5)
    np.testing.assert_allclose(gradient(lambda each: hvd.allgather(joint(each)), mine), expected, rtol=1e-5)


def check_broadcast():
    root = hvd.size() - 1
    expected = sum_of_weights() / hvd.size() if hvd.rank() == root else np.zeros(3)
    assert_gradients(lambda x: tf.reduce_sum(hvd.broadcast(x, root) * weights()), [tf.ones([3])], [expected])


def check_alltoall():
    """The last row stays here."""
    rows = tf.ones([hvd.size() + 1, 2])
    expected = np.concatenate([np.full((1, 2), rank + 1.0) for rank in range(hvd.size())] + [np.zeros((1, 2))])

    def loss(x):
        return tf.reduce_sum(hvd.alltoall(x, [1] * hvd.size())[0] * float(hvd.rank() + 1))

    assert_gradients(loss, [rows], [expected])


def check_reducescatter():
    """With an allgather behind it, the gradient of an allreduce."""

    def loss(x, op=hvd.Sum):
        return tf.reduce_sum(hvd.allgather(hvd.reducescatter(x, op=op)) * weights())

    assert_gradients(loss, [tf.ones([3])], [sum_of_weights()])
    assert_gradients(lambda x: loss(x, hvd.Average), [tf.ones([3])], [sum_of_weights() / hvd.size()])

    def grouped(x):
        (part,) = hvd.grouped_reducescatter([x], op=hvd.Sum)
        return tf.reduce_sum(hvd.allgather(part) * weights())

    assert_gradients(grouped, [tf.ones([3])], [sum_of_weights()])


def check_numbers_have_none():
    with tf.GradientTape() as tape:
        x = tf.constant(2.0)
        tape.watch(x)
        value = x * tf.cast(hvd.size_op(), tf.float32)
    assert tape.gradient(value, x).numpy() == hvd.size()


def check_max_has_none():
    with tf.GradientTape() as tape:
        x = tf.constant(2.0)
        tape.watch(x)
        value = hvd.allreduce(x, op=hvd.Max)
    with pytest.raises(ValueError, match="op Max has no gradient"):
        tape.gradient(value, x)


@each_check(globals())
def test_gradient(ranks, check):
    ranks.run(check)
