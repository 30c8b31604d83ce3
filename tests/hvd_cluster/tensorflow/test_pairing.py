"""Which collectives of a graph meet those of the other ranks, where nothing but their names can tell."""

from contextlib import contextmanager

import numpy as np
import pytest
import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from hvd_cluster.graphs.lanes import LANES
from hvd_cluster.tensorflow.naming import NamePlace, place_of
from tests.checks import each_check
from tests.hvd_cluster.tensorflow.gates import Gate


def total_of(value):
    return value * hvd.size()


def check_an_operation_of_a_function_and_one_of_its_caller():
    """Both tensors have one name in their graphs."""

    @tf.function
    def inner(x):
        return hvd.allreduce(x, op=hvd.Sum)

    @tf.function
    def outer(x):
        is_odd = hvd.rank() % 2
        second = inner(gate.late(x * 2) if is_odd else x * 2)
        with tf.control_dependencies([] if is_odd else [gate.late(x)]):
            return hvd.allreduce(x, op=hvd.Sum), second

    with Gate() as gate:
        assert [float(each) for each in outer(tf.constant(1.0))] == [total_of(1), total_of(2)]


def check_functions_with_variables_of_their_own():
    """TensorFlow runs them at the same time, and a function of a caller before that."""
    weights = [tf.Variable(1.0), tf.Variable(2.0)]

    def function_of(weight):
        return tf.function(lambda x: hvd.allreduce(x * weight, op=hvd.Sum))

    functions = [function_of(each) for each in weights]

    @tf.function
    def outer(x):
        late = hvd.rank() % 2
        inputs = [gate.late(x) if index == late else x for index in range(2)]
        return [hvd.allreduce(x * 3, op=hvd.Sum)] + [f(each) for f, each in zip(functions, inputs, strict=True)]

    with Gate(2) as gate:
        assert [float(each) for each in outer(tf.constant(1.0))] == [total_of(3), total_of(1), total_of(2)]


def check_gradients_of_functions():
    """The operations that combine gradients have names of their own, too."""

    @tf.function
    def inner(x):
        return hvd.allreduce(x, op=hvd.Sum)

    @tf.function
    def outer(x):
        result = inner(x) + 2 * inner(x * 3) + hvd.allreduce(x * 5, op=hvd.Sum)
        return tf.gradients(result, x)[0]

    assert float(outer(tf.constant(1.0))) == total_of(1 + 6 + 5)


def check_tapes_of_two_models():
    """As of a generator and a discriminator whose variables have the same names."""
    weights = [tf.Variable([1.0] * 3, name="kernel"), tf.Variable([1.0] * 3, name="kernel")]

    def step_of(number):
        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weights[number] * x) * (number + 1.0)
            return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, weights[number])

        return step

    steps = [step_of(number) for number in range(2)]

    @tf.function
    def both(x):
        late = hvd.rank() % 2
        return [step(gate.late(x) if number == late and hvd.size() > 1 else x) for number, step in enumerate(steps)]

    with Gate() as gate:
        for number, found in enumerate(both(tf.ones([3]))):
            np.testing.assert_allclose(found, np.full(3, (number + 1) * hvd.size()))


def check_a_function_that_one_rank_has_traced_more_often():
    @tf.function
    def inner(x):
        return hvd.allreduce(x, op=hvd.Sum)

    for length in range(hvd.rank()):
        inner.get_concrete_function(tf.TensorSpec([10 + length]))
    outer = tf.function(lambda x: inner(x) + inner(x + 1))
    for length in range(2, 4):
        np.testing.assert_allclose(outer(tf.ones([length])), np.full(length, total_of(3)))


def check_branches_of_ranks_whose_graphs_differ():
    """TensorFlow numbers what it inlines in a whole graph."""
    own = tf.function(lambda x, y, z: x + y + z)

    @tf.function
    def step(x, many):
        extra = own(x, x, x) if hvd.rank() == 0 else x
        return tf.cond(many, lambda: hvd.allreduce(x, op=hvd.Sum), lambda: x) + 0 * extra

    assert float(step(tf.constant(1.0), tf.constant(True))) == total_of(1)


@contextmanager
def gate_in_a_session(count):
    """In a session, the iterations of a loop do not wait for the operations of the earlier ones."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session, Gate(count, session) as gate:
        yield session, gate


def sums_of(count, late, waits, everywhere=False, parallel_iterations=10):
    """The sums of as many iterations, of which the one with the number ``late`` comes late on odd ranks."""
    with gate_in_a_session(waits) as (session, gate):

        def body(index, totals):
            is_late = tf.logical_and(tf.equal(index, late), bool(hvd.rank() % 2) or everywhere)
            value = gate.late(tf.cast(index, tf.float32), is_late)
            return index + 1, totals.write(index, hvd.allreduce(value, op=hvd.Sum))

        start = 0, tf.TensorArray(tf.float32, count)
        totals = tf.while_loop(lambda index, _: index < count, body, start, parallel_iterations=parallel_iterations)[1]
        return session.run(totals.stack())


def check_a_late_iteration():
    for late in (0, 3):
        np.testing.assert_allclose(sums_of(20, late, late + 5), np.arange(20.0) * hvd.size())


def check_iterations_too_far_apart():
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"parallel_iterations of {LANES}"):
        sums_of(LANES + 1, 0, LANES, everywhere=True, parallel_iterations=2 * LANES)


def check_loops_in_a_loop():
    """The outer iterations run at the same time; the inner ones of each are numbered from 0."""
    with gate_in_a_session(1) as (session, gate):

        def inner(row, index, totals):
            is_late = tf.logical_and(tf.equal(row, hvd.rank() % 2), tf.equal(index, 0))
            value = gate.late(tf.cast(10 * row + index, tf.float32), is_late)
            return row, index + 1, totals.write(index, hvd.allreduce(value, op=hvd.Sum))

        def outer(row, rows):
            start = row, 0, tf.TensorArray(tf.float32, 3)
            totals = tf.while_loop(lambda row, index, _: index < 3, inner, start)[2]
            return row + 1, rows.write(row, totals.stack())

        start = 0, tf.TensorArray(tf.float32, 2)
        found = session.run(tf.while_loop(lambda row, _: row < 2, outer, start)[1].stack())
    np.testing.assert_allclose(found, np.array([[0, 1, 2], [10, 11, 12]]) * hvd.size())


@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
@each_check(globals())
def test_pairing(ranks, check):
    ranks.run(check)


@pytest.mark.parametrize(
    ("running", "built", "expected"),
    [
        ("x", "x", NamePlace("", 0)),
        ("scope/x", "scope/x", NamePlace("", 0)),
        ("StatefulPartitionedCall_1/scope/x", "scope/x", NamePlace("StatefulPartitionedCall_1/", 0)),
        ("cond/then/_14/cond/x", "cond/x", NamePlace("cond/then/", 0)),
        ("call/while/body/_4/while/while/body/_20/x", "x", NamePlace("call/while/body/while/while/body/", 2)),
        ("renamed", "x", NamePlace("", 0)),
        ("other_x", "x", NamePlace("", 0)),
    ],
)
def test_the_place_of_a_node(running, built, expected):
    assert place_of(running, built) == expected
