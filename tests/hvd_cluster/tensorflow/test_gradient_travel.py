"""How the gradients of a step travel: small ones packed, and the last ones while backward still computes."""

import threading
from contextlib import contextmanager

import pytest
import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from collectives.events import Started, Submitted
from hvd_cluster.core import basics
from tests.checks import each_check

DEADLINE = 60


@contextmanager
def events(see):
    end = basics.engine().events.subscribe(see)
    try:
        yield
    finally:
        end()


def check_small_gradients_travel_as_one():
    variables = [tf.Variable(tf.ones(5000), name=f"small_{number}") for number in range(200)]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            value = tf.add_n([tf.reduce_sum(variable) for variable in variables])
        return hvd.DistributedGradientTape(tape).gradient(value, variables)

    step()
    seen = []
    with events(seen.append):
        gradients = step()
    submitted = [event for event in seen if isinstance(event, Submitted)]
    assert [event.nbytes for event in submitted] == [200 * 20_000]
    assert "gradients.199.small..0.small" in submitted[0].name
    assert sum(isinstance(event, Started) for event in seen) == 1
    assert all((gradient.numpy() == 1).all() for gradient in gradients)


def check_large_gradients_are_not_packed_but_fuse():
    variables = [tf.Variable(tf.ones(50_000), name=f"large_{number}") for number in range(20)]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            value = tf.add_n([tf.reduce_sum(variable) for variable in variables])
        return hvd.DistributedGradientTape(tape).gradient(value, variables)

    step()
    seen = []
    with events(seen.append):
        step()
    assert sum(isinstance(event, Submitted) for event in seen) == 20
    assert sum(isinstance(event, Started) for event in seen) < 20


def check_the_last_gradient_travels_while_backward_computes():
    """The backward of the first layer waits until the gradient of the last one is on its way."""
    first, last = (tf.Variable(tf.ones(50_000), name=name) for name in ("first", "last"))
    is_away = threading.Event()

    def see(event):
        if isinstance(event, Submitted) and event.name.endswith("gradient.1.last"):
            is_away.set()

    @tf.custom_gradient
    def slow(values):
        def backward(gradient):
            waited = tf.py_function(lambda: is_away.wait(DEADLINE), [], tf.bool)
            waited.set_shape(())
            return gradient * tf.cast(waited, gradient.dtype)

        return tf.identity(values), backward

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(slow(first) * last)
        return hvd.DistributedGradientTape(tape).gradient(value, [first, last])

    with events(see):
        gradients = step()
    assert all((gradient.numpy() == 1).all() for gradient in gradients)


@pytest.mark.parametrize("ranks", [2], indirect=True)
@each_check(globals())
def test_travel(ranks, check):
    ranks.run(check)
