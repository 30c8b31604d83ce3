"""SyncBatchNormalization: batches of other sizes on each rank are normalized as one."""

from unittest.mock import patch

import keras
import numpy as np
import pytest

import hvd_cluster.keras as hvd
from hvd_cluster.core import basics
from hvd_cluster.keras.backends import backend
from tests.checks import each_check


def rows(rank, sizes, mean=1.0):
    return (np.random.default_rng(rank).normal(size=(sizes[rank], 4, 3)) * 2 + mean).astype("f")


def joined(sizes, mean=1.0):
    return np.concatenate([rows(rank, sizes, mean) for rank in range(hvd.size())])


def check_a_mean_far_from_0():
    sizes = [3, 5]
    ours, _ = layers()
    everything = joined(sizes, 1000.0).astype("d")
    wanted = (everything - everything.mean((0, 1))) / np.sqrt(everything.var((0, 1)) + ours.epsilon)
    close(ours(rows(hvd.rank(), sizes, 1000.0), training=True), own(wanted, sizes))


def layers():
    return hvd.SyncBatchNormalization(epsilon=1e-5), keras.layers.BatchNormalization(epsilon=1e-5)


def close(one, other, atol=1e-3):
    np.testing.assert_allclose(keras.ops.convert_to_numpy(one), keras.ops.convert_to_numpy(other), 1e-4, atol)


def own(array, sizes):
    start = sum(sizes[: hvd.rank()])
    return array[start : start + sizes[hvd.rank()]]


def check_forward():
    for sizes in ([3, 5], [0, 4]):
        ours, theirs = layers()
        wanted = theirs(joined(sizes), training=True)
        close(ours(rows(hvd.rank(), sizes), training=True), own(keras.ops.convert_to_numpy(wanted), sizes))
        close(ours.moving_mean, theirs.moving_mean)
        close(ours.moving_variance, theirs.moving_variance)
        close(ours(joined(sizes)), theirs(joined(sizes)))


def check_ranks_that_have_built_other_numbers_of_models():
    for _ in range(hvd.rank()):
        keras.Sequential([hvd.SyncBatchNormalization()])
    batch_norms = [hvd.SyncBatchNormalization(gamma_initializer="ones") for _ in range(2)]
    doubled = keras.layers.Rescaling(2.0)
    model = keras.Sequential([keras.layers.Input((4, 3)), batch_norms[0], doubled, batch_norms[1]])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    inputs = rows(hvd.rank(), [3, 3])
    model.fit(inputs, inputs, batch_size=3, verbose=0)
    model(inputs, training=True)
    means = [keras.ops.convert_to_numpy(each.moving_mean) for each in batch_norms]
    close(means[0], hvd.allreduce(means[0]))
    close(means[1], hvd.allreduce(means[1]))


def check_masked_steps_do_not_count():
    ours, _ = layers()
    inputs = np.array([[[2.0 + hvd.rank() * 4], [50.0]]], "f")
    found = keras.ops.convert_to_numpy(ours(inputs, training=True, mask=np.array([[True, False]])))
    assert abs(found[0, 0, 0]) == pytest.approx(1.0, abs=1e-4)


def gradient(layer, inputs, weights):
    """Of the sum of the weighted outputs."""
    name = keras.backend.backend()
    layer.build(inputs.shape)
    if name == "tensorflow":
        import tensorflow as tf

        given = tf.constant(inputs)
        with tf.GradientTape() as tape:
            tape.watch(given)
            value = tf.reduce_sum(layer(given, training=True) * weights)
        return tape.gradient(value, given)
    if name == "torch":
        given = keras.ops.convert_to_tensor(inputs).requires_grad_()
        (layer(given, training=True) * keras.ops.convert_to_tensor(weights)).sum().backward()
        return given.grad
    import jax

    state = [variable.value for variable in layer.non_trainable_variables]
    trainable = [variable.value for variable in layer.trainable_variables]

    def value(given):
        return (layer.stateless_call(trainable, state, given, training=True)[0] * weights).sum()

    return jax.jit(jax.grad(value))(inputs)


def check_gradient_is_that_of_the_sum_of_the_losses():
    sizes = [3, 5]
    weights = np.random.default_rng(9).normal(size=(sum(sizes), 4, 3)).astype("f")
    ours, theirs = layers()
    found = gradient(ours, rows(hvd.rank(), sizes), own(weights, sizes))
    close(found, own(keras.ops.convert_to_numpy(gradient(theirs, joined(sizes), weights)), sizes))


def check_wrong_arguments():
    with pytest.raises(ValueError, match="does not support fused=True"):
        hvd.SyncBatchNormalization(fused=True)
    assert backend().__name__.endswith(keras.backend.backend())


def check_a_layer_that_is_alone_takes_part_where_others_may_join():
    """An elastic job compiles a step once, perhaps while it has one rank."""
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    layer, names = hvd.SyncBatchNormalization(process_set=sets[hvd.rank()]), []
    inputs = rows(hvd.rank(), [3, 5])
    alone = keras.ops.convert_to_numpy(layer(inputs, training=True))
    with patch.object(layer, "_total", lambda tensor, what: names.append(what) or tensor):
        layer(inputs, training=True)
        assert not names
        with patch.object(basics, "worlds", object):
            close(layer(inputs, training=True), alone)
    assert names == ["sums", "squares"]
    for each in sets:
        hvd.remove_process_set(each)


def check_saved_layers(folder):
    first, other = hvd.add_process_set([0]), hvd.add_process_set([1])
    hvd.remove_process_set(other)
    sets = [hvd.global_process_set, first, other]
    layers = [hvd.SyncBatchNormalization(process_set=each) for each in sets]
    model = keras.Sequential([keras.Input((3,)), *layers])
    path = f"{folder}/{keras.backend.backend()}-{hvd.rank()}.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    assert [type(each) for each in loaded.layers] == [hvd.SyncBatchNormalization] * 3
    assert loaded.layers[0].process_set is hvd.global_process_set
    assert loaded.layers[1].process_set is first
    assert loaded.layers[2].process_set.ranks == [1]
    assert loaded.layers[2].process_set.process_set_id is None
    hvd.remove_process_set(first)


@each_check(globals())
def test_sync_batch_norm(ranks, check, tmp_path):
    ranks.run(check, *([str(tmp_path)] if check.__code__.co_argcount else []))
