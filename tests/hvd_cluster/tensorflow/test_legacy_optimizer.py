"""DistributedOptimizer around optimizers of tf.compat.v1, eagerly and in sessions."""

import numpy as np
import pytest
import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from tests.checks import each_check

v1 = tf.compat.v1
START = [1.0, -2.0]


def slope(rank):
    return np.array([rank + 1.0, 2.0 * rank])


def mean_slope():
    return np.mean([slope(rank) for rank in range(hvd.size())], 0)


def optimizer(**options):
    return hvd.DistributedOptimizer(v1.train.MomentumOptimizer(0.5, 0.9), **options)


def run_eagerly(steps, **options):
    variable, wrapped = tf.Variable(START, dtype=tf.float64), optimizer(**options)
    for _ in range(steps):
        wrapped.minimize(lambda: tf.reduce_sum(variable * slope(hvd.rank())), var_list=[variable])
    return variable.numpy()


def run_in_a_session(steps, **options):
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("weights", initializer=tf.constant(START, tf.float64))
        count = v1.train.get_or_create_global_step()
        wrapped = optimizer(**options)
        train = wrapped.minimize(tf.reduce_sum(variable * slope(hvd.rank())), global_step=count)
        session.run(v1.global_variables_initializer())
        assert wrapped.get_slot_names() == ["momentum"]
        assert wrapped.get_slot(variable, "momentum") is not None
        for _ in range(steps):
            session.run(train)
        assert session.run(count) == steps
        return session.run(variable)


def moved(gradients):
    position, momentum = np.array(START), np.zeros(2)
    for gradient in gradients:
        momentum = 0.9 * momentum + gradient
        position = position - 0.5 * momentum
    return position


def check_monitored_session():
    """The ranks begin with other values, and train from those of rank 0."""
    with tf.Graph().as_default():
        start = tf.constant(START, tf.float64) + float(hvd.rank())
        variable = v1.get_variable("weights", initializer=start, use_resource=True)
        count = v1.train.get_or_create_global_step()
        train = optimizer().minimize(tf.reduce_sum(variable * slope(hvd.rank())), global_step=count)
        with tf.control_dependencies([train]):
            value = variable.read_value()
        hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=3)]
        values = []
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            while not session.should_stop():
                values.append(session.run(value))
    np.testing.assert_allclose(values, [moved([mean_slope()] * steps) for steps in range(1, 4)], rtol=1e-6)


def check_gradients():
    for run in (run_eagerly, run_in_a_session):
        np.testing.assert_allclose(run(3), moved([mean_slope()] * 3), rtol=1e-6)


def check_several_passes():
    for run in (run_eagerly, run_in_a_session):
        found = run(5, backward_passes_per_step=2)
        np.testing.assert_allclose(found, moved([2 * mean_slope()] * 2), rtol=1e-6)
        found = run(4, backward_passes_per_step=2, average_aggregated_gradients=True)
        np.testing.assert_allclose(found, moved([mean_slope()] * 2), rtol=1e-6)


def check_a_variable_without_a_gradient_in_the_last_pass():
    always, first = tf.Variable([1.0]), tf.Variable([1.0])
    wrapped = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.25), backward_passes_per_step=2)
    for loss in (lambda: always + first, lambda: tf.identity(always)):
        wrapped.minimize(loss, var_list=[always, first])
    np.testing.assert_allclose([always.numpy(), first.numpy()], [[0.5], [0.75]])


def check_local_variables():
    variable, wrapped = tf.Variable(START, dtype=tf.float64), optimizer(scale_local_gradients=False)
    wrapped.register_local_var(variable)
    wrapped.minimize(lambda: tf.reduce_sum(variable * slope(hvd.rank())), var_list=[variable])
    np.testing.assert_allclose(variable.numpy(), moved([slope(hvd.rank())]))


def check_names_and_wrong_arguments():
    assert optimizer().get_name() == "DistributedMomentumOptimizer"
    for options, text in (
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"groups": [[7]]}, "not of int"),
        ({"op": hvd.Max}, "cannot combine gradients"),
        ({"sharded": True}, "sharded=True is not there for optimizers of TensorFlow"),
    ):
        with pytest.raises(ValueError, match=text):
            optimizer(**options)


def check_adasum_of_changes():
    with pytest.raises(ValueError, match="each pass steps"):
        optimizer(op=hvd.Adasum, backward_passes_per_step=2)
    wrapped = optimizer(op=hvd.Adasum)
    assert wrapped.get_name() == "DistributedDeltaMomentumOptimizer"
    for run in (run_eagerly, run_in_a_session):
        first, second = -0.5 * slope(0), -0.5 * slope(1)
        product = first @ second
        change = first * (1 - product / (2 * first @ first)) + second * (1 - product / (2 * second @ second))
        np.testing.assert_allclose(run(1, op=hvd.Adasum), START + change, rtol=1e-6)


@pytest.mark.parametrize("ranks", [3], indirect=True)
@each_check(globals(), check_adasum_of_changes)
def test_legacy_optimizer(ranks, check):
    ranks.run(check)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_adasum(ranks):
    ranks.run(check_adasum_of_changes)
