"""Models that XLA compiles train as others do, with tapes and with optimizers of Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_cluster.tensorflow.keras as hvd
from hvd_cluster.tensorflow import DistributedGradientTape
from tests.checks import each_check

ROWS = 24


def train(jit_compile, build, wrap, data=None):
    """The weights after some steps on data of this rank."""
    keras.utils.set_random_seed(3)
    random = np.random.default_rng(hvd.rank())
    x = random.normal(size=(ROWS, 6)).astype("f") if data is None else data(random)
    trained = build()
    trained.compile(wrap(), "mse", jit_compile=jit_compile)
    trained.fit(x, random.normal(size=(ROWS, 2)).astype("f"), batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert trained.jit_compile is jit_compile
    return [np.asarray(each) for each in trained.get_weights()]


def dense(*layers):
    return lambda: keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), *layers, keras.layers.Dense(2)])


def sgd(**options):
    return lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), **options)


def require_same(*arguments, **options):
    for one, other in zip(train(True, *arguments, **options), train(False, *arguments, **options), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def check_adam_with_other_options():
    require_same(dense(), lambda: hvd.DistributedOptimizer(keras.optimizers.Adam(0.01, clipnorm=0.5, use_ema=True)))


def check_several_passes():
    require_same(dense(), sgd(backward_passes_per_step=2, average_aggregated_gradients=True))


def check_groups_and_factors():
    require_same(dense(), sgd(groups=2))
    require_same(dense(), sgd(gradient_predivide_factor=2.0))


def check_compression():
    require_same(dense(), sgd(compression=hvd.Compression.bf16))
    require_same(dense(), sgd(compression=hvd.Compression.fp16))


def check_a_loss_scale():
    require_same(dense(), lambda: keras.optimizers.LossScaleOptimizer(sgd()()))


def check_sparse_gradients():
    def embedding():
        return keras.Sequential([keras.layers.Embedding(50, 4), keras.layers.Flatten(), keras.layers.Dense(2)])

    def words(random):
        return random.integers(0, 50, (ROWS, 3))

    require_same(embedding, sgd(), data=words)
    require_same(embedding, sgd(sparse_as_dense=True), data=words)


def check_a_tape_with_local_variables_and_none():
    def step(both, unused, local):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(both * local * (1.0 + hvd.rank()))
        wrapped = DistributedGradientTape(tape)
        wrapped.register_local_source(local)
        return wrapped.gradient(loss, [both, unused, local])

    variables = [tf.Variable(tf.fill([4], 2.0), name=name) for name in ("both", "unused", "local")]
    for function in (tf.function(step), tf.function(step, jit_compile=True)):
        both, unused, local = function(*variables)
        np.testing.assert_allclose(both, [2 * (1 + hvd.size()) / 2] * 4)
        np.testing.assert_allclose(unused, [0.0] * 4)
        np.testing.assert_allclose(local, [2 * (1.0 + hvd.rank()) / hvd.size()] * 4)


@pytest.mark.parametrize("ranks", [2], indirect=True)
@each_check(globals())
def test_training(ranks, check):
    ranks.run(check)
