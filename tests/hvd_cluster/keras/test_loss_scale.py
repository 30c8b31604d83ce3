"""Mixed precision: gradients are combined while they are scaled, so that all ranks skip the same steps."""

import keras
import numpy as np

import hvd_cluster.keras as hvd
from tests.checks import each_check
from tests.hvd_cluster.keras.training import fit_alone, fit_together, identical, model, same


def inside():
    return keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), 8.0)


def outside():
    return hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0))


def apply(optimizer, gradients, variables):
    """As ``fit`` does on this backend."""
    if not optimizer.built:
        optimizer.build(variables)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.function(lambda given: optimizer.apply(given, variables))(gradients)
    elif keras.backend.backend() == "torch":
        optimizer.apply(gradients, variables)
    else:
        import jax

        states = [[variable.value for variable in group] for group in (optimizer.variables, variables)]
        weights, state = jax.jit(optimizer.stateless_apply)(states[0], gradients, states[1])
        for variable, value in zip([*variables, *optimizer.variables], [*weights, *state], strict=True):
            variable.assign(value)


def check_all_ranks_skip_the_same_steps():
    for make in (inside, outside):
        optimizer, variable = make(), keras.Variable(np.zeros(3, "f"))
        bad = np.array([1, np.inf if hvd.rank() == 0 else 1, 1], "f")
        apply(optimizer, [keras.ops.convert_to_tensor(bad)], [variable])
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), np.zeros(3))
        assert float(optimizer.dynamic_scale) == 4.0
        apply(optimizer, [keras.ops.ones(3) * 4 * (1 + hvd.rank())], [variable])
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), np.full(3, -1.5))
        assert int(optimizer.iterations) == 1


def check_mixed_float16():
    def build():
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return model()
        finally:
            keras.config.set_dtype_policy("float32")

    trained = fit_together(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), build=build)
    assert isinstance(trained.optimizer, keras.optimizers.LossScaleOptimizer)
    same(trained, fit_alone(keras.optimizers.SGD(0.1), build=build), rtol=0.1, atol=0.02)
    identical([keras.ops.convert_to_numpy(trained.optimizer.dynamic_scale)])


@each_check(globals())
def test_loss_scale(ranks, check):
    ranks.run(check)
