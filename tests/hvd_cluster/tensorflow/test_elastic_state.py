"""Elastic states of TensorFlow, and the errors with which they are left."""

import numpy as np
import pytest
import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from collectives.api import InvalidRequestError, MismatchError
from hvd_cluster.tensorflow.elastic import TensorFlowState, run
from hvd_cluster.tensorflow.errors import engine_errors
from tests.checks import each_check


def check_variables_are_kept_and_shared():
    numbers, half = tf.Variable([1.0, 2.0]), tf.Variable(tf.cast([[hvd.rank()]], tf.bfloat16))
    numbers.assign_add([hvd.rank(), 0.0])
    state = TensorFlowState([numbers, half], batch=hvd.rank())
    state.sync()
    assert (numbers.numpy().tolist(), float(half[0, 0]), state.batch) == ([1.0, 2.0], 0.0, 0)
    numbers.assign_add([1.0, 1.0])
    state.batch = 1
    state.commit()
    numbers.assign([9.0, 9.0])
    state.batch = 5
    state.restore()
    assert (numbers.numpy().tolist(), state.batch) == ([2.0, 3.0], 1)
    with pytest.raises(InvalidRequestError, match="there are no variables"):
        TensorFlowState([])


def check_variables_of_a_session():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=np.float32(hvd.rank()))
        session.run(tf.compat.v1.global_variables_initializer())
        state = TensorFlowState(session=session)
        state.sync()
        assert session.run(variable) == 0
        variable.load(7.0, session)
        state.restore()
        assert session.run(variable) == 0


def check_errors_of_a_graph():
    """Ours become the engine's, others pass."""

    @tf.function
    def differ():
        return hvd.allreduce(tf.ones([hvd.rank() + 1]), name="differs")

    if hvd.size() > 1:
        with pytest.raises(MismatchError, match="differs"), engine_errors():
            differ()
    with pytest.raises(tf.errors.InvalidArgumentError, match="reshape"), engine_errors():
        tf.raw_ops.Reshape(tensor=tf.ones(3), shape=[2])


def check_run_returns_the_value():
    assert run(lambda state, more: state.batch + more)(TensorFlowState([tf.Variable(1.0)], batch=2), 3) == 5


@each_check(globals())
def test_state(ranks, check):
    ranks.run(check)
