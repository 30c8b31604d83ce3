"""Variables and objects from one rank to all."""

import numpy as np
import pytest
import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from tests.checks import each_check


def variables():
    rank = hvd.rank()
    kinds = (tf.float32, tf.bfloat16, tf.int64, tf.bool, tf.uint32)
    return [tf.Variable(tf.cast(tf.fill([2, 2], rank), kind)) for kind in kinds] + [tf.Variable(float(rank))]


def assert_values(found, value):
    for variable in found:
        expected = np.full(variable.shape, value).astype(variable.dtype.as_numpy_dtype)
        assert (variable.numpy() == expected).all(), variable


def check_broadcast_variables():
    for inplace in (False, True):
        mine = variables()
        assert hvd.broadcast_variables(mine, hvd.size() - 1, inplace=inplace) is None
        assert_values(mine, hvd.size() - 1)
    hvd.broadcast_variables([], 0)


def check_broadcast_variables_in_a_function():
    mine = variables()

    @tf.function
    def step():
        hvd.broadcast_variables(mine, 0)
        return mine[0].read_value()

    assert (step().numpy() == 0).all()
    assert_values(mine, 0)


def check_broadcast_in_place():
    mine = variables()
    values = hvd.broadcast_(mine, 0, name="values")
    assert_values(mine, 0)
    assert_values(values, 0)
    read = tf.function(lambda: hvd.broadcast_(mine[:1], 0, name="read"))
    assert (read()[0].numpy() == 0).all()


def check_keras_variables():
    import keras

    model = keras.Sequential([keras.layers.Dense(2), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])
    model.build((None, 3))
    for variable in model.variables:
        variable.assign(tf.cast(tf.fill(variable.shape, hvd.rank() + 1), variable.dtype))
    hvd.broadcast_variables(model.variables, 0)
    assert all((variable.numpy() == 1).all() for variable in model.variables)


def check_global_variables():
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)
    with tf.Graph().as_default():
        own = tf.compat.v1.get_variable("own", initializer=float(hvd.rank()))
        hook = hvd.BroadcastGlobalVariablesHook(hvd.size() - 1)
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            assert session.run(own) == hvd.size() - 1


def check_objects():
    last = hvd.size() - 1
    assert hvd.broadcast_object({"rank": hvd.rank()}, last) == {"rank": last}
    send = hvd.broadcast_object_fn(0)
    assert [send(hvd.rank()), send([hvd.rank()])] == [0, [0]]
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


@each_check(globals())
def test_function(ranks, check):
    ranks.run(check)


def check_process_sets():
    ranks = [0, 2]
    process_set = hvd.add_process_set(ranks)
    included = hvd.rank() in ranks
    id = process_set.process_set_id

    @tf.function
    def step(x):
        return hvd.allreduce(x, op=hvd.Sum, process_set=process_set), hvd.size_op(id)

    assert int(hvd.process_set_included_op(id)) == included
    if included:
        total, size = step(tf.constant(float(hvd.rank())))
        assert (float(total), int(size)) == (2.0, 2)
        assert hvd.allgather(tf.constant([hvd.rank()]), process_set=process_set).numpy().tolist() == ranks
        own = tf.Variable(hvd.rank())
        hvd.broadcast_variables([own], 2, process_set=process_set)
        assert own.numpy() == 2
        assert hvd.broadcast_object(hvd.rank(), 2, process_set=process_set) == 2
        hvd.barrier(process_set)
    else:
        for call in (lambda: hvd.allreduce(tf.ones([1]), process_set=process_set), lambda: step(tf.constant(0.0))):
            with pytest.raises(tf.errors.InvalidArgumentError, match="not a member"):
                call()
    assert hvd.remove_process_set(process_set)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(tf.ones([1]), process_set=process_set)


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_process_sets(ranks):
    ranks.run(check_process_sets)
