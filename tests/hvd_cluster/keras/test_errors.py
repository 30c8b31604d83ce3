"""Ranks that disagree about a gradient or a variable hear of it, on every backend."""

import keras
import numpy as np
import pytest

import hvd_cluster.keras as hvd
from collectives.api import MismatchError
from tests.checks import each_check


def step(optimizer, gradient, variable):
    optimizer.apply([gradient], [variable])
    keras.ops.convert_to_numpy(variable)  # JAX raises no earlier


def check_shapes_that_differ():
    variable = keras.Variable(np.zeros((200 + hvd.rank(), 200), "f"), name="table")
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    gradient = keras.ops.ones(variable.shape)
    with pytest.raises(Exception, match=r"the variable 'table', number 0, is float32 of shape \(200, 200\) on rank 0"):
        step(wrapped, gradient, variable)
    if keras.backend.backend() == "jax":
        from hvd_cluster.jax.calls import last_error

        assert isinstance(last_error(), MismatchError)


def check_a_variable_whose_shape_differs_is_named():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1 + hvd.rank())])
    with pytest.raises(MismatchError, match=r"'.*/kernel', number 2, is float32 of shape \(2, 1\) on rank 0"):
        hvd.broadcast_global_variables(0, model)


@each_check(globals())
def test_errors(ranks, check):
    ranks.run(check)
