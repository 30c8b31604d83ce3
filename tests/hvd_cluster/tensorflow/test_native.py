"""The ways to TensorFlow that no interface promises, and the way without them."""

import ctypes
import gc

import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from hvd_cluster.tensorflow.native import done
from tests.checks import each_check


def check_a_foreign_callback_is_left_where_it_is():
    """Its functions lie in Python, not in TensorFlow. Functions that are traced later have an order."""
    words = (ctypes.c_uint64 * 4)(1, 2, id(object), id(object))
    assert done.can_take()
    try:
        assert done.take(ctypes.addressof(words)) is None
        assert list(words) == [1, 2, id(object), id(object)]
        first, second = collectives_of(lambda x: [hvd.allreduce(x), hvd.allreduce(x)])
        assert second.control_inputs == [first]
    finally:
        done._refused.clear()
        done._is_understood.cache_clear()
    assert done.can_take()


def collectives_of(function):
    graph = tf.function(function).get_concrete_function(tf.TensorSpec([])).graph
    return [node for node in graph.get_operations() if node.type == "HorovodAllreduce"]


def check_untested_versions_run_one_operation_after_the_other():
    """In the order of tracing: each waits for the one before it, whose kernel waits for the other ranks."""
    newest = done.NEWEST
    try:
        done.NEWEST = done.OLDEST
        done.is_known.cache_clear()
        assert not done.is_known()
        step = tf.function(lambda x: [hvd.allreduce(x * factor, op=hvd.Sum) for factor in range(5)])
        nodes = step.get_concrete_function(tf.TensorSpec([])).graph.get_operations()
        collectives = [node for node in nodes if node.type == "HorovodAllreduce"]
        assert [node.control_inputs for node in collectives[1:]] == [[node] for node in collectives[:-1]]
        assert [int(result) for result in step(tf.constant(1.0))] == [factor * hvd.size() for factor in range(5)]
    finally:
        done.NEWEST = newest
        done.is_known.cache_clear()
    assert done.is_known()


def check_memory_is_freed():
    """A run of a graph keeps neither its tensors nor anything of its own."""
    from hvd_cluster.tensorflow.native.context import Hold

    def held():
        gc.collect()
        return sum(type(each) is Hold for each in gc.get_objects())

    step = tf.function(lambda x: (hvd.allreduce(x), hvd.allgather(x)))
    for _ in range(3):
        step(tf.ones([1 << 16]))
        hvd.allreduce(tf.ones([4]))
    assert held() == 0


@each_check(globals())
def test_native(ranks, check):
    ranks.run(check)


def test_this_version_is_tested():
    installed = tuple(int(part) for part in tf.__version__.split(".")[:2])
    assert done.OLDEST <= installed <= done.NEWEST
