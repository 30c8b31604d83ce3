"""A graph that runs again after a failure: nothing of the run that failed takes part."""

import pytest
import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from collectives.api import MismatchError
from hvd_cluster.tensorflow.errors import engine_error
from tests.checks import each_check
from tests.hvd_cluster.tensorflow.gates import Gate


def after(first):
    """Rank 0 does not wait for ``first``, which fails, and so begins what the others never begin."""
    return tf.control_dependencies([first] if hvd.rank() else [])


def check_a_disagreement():
    @tf.function
    def step(x, length):
        first = hvd.allreduce(tf.ones([length]), name="disagreement")
        with after(first):
            return hvd.allreduce(x, op=hvd.Sum, name="other")

    for attempt in range(10):
        with pytest.raises(tf.errors.FailedPreconditionError) as caught:
            step(tf.constant(100.0), hvd.rank() + 1)
        assert isinstance(engine_error(caught.value), MismatchError)
        assert float(step(tf.constant(float(attempt)), 1)) == attempt * hvd.size()


def check_a_disagreement_before_a_group_and_a_barrier():
    @tf.function
    def step(x, length):
        first = hvd.allreduce(tf.ones([length]), name="disagreement")
        with after(first):
            results = hvd.grouped_allreduce([x, x + 1], op=hvd.Sum)
            hvd.barrier()
            return results

    for attempt in range(5):
        with pytest.raises(tf.errors.FailedPreconditionError):
            step(tf.constant(100.0), hvd.rank() + 1)
        results = step(tf.constant(float(attempt)), 1)
        assert [float(each) for each in results] == [attempt * hvd.size(), (attempt + 1) * hvd.size()]


def check_a_rank_that_made_the_call_outside_of_a_graph():
    """It does not come to the settlement of the others, who wait for it in vain."""
    call = lambda: hvd.allreduce(tf.ones([hvd.rank() + 1]), name="outside")  # noqa: E731
    with pytest.raises(tf.errors.FailedPreconditionError):
        (call if hvd.rank() else tf.function(call))()
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="inside")) == hvd.size()


def check_arguments_that_one_rank_refuses():
    """Each rank has begun the other operation when it hears of that."""
    for attempt in range(5):
        _refuse_once(float(attempt))


def _refuse_once(value):
    @tf.function
    def step(x, splits):
        total = hvd.allreduce(x, op=hvd.Sum, name="total")
        rows = hvd.alltoall(tf.ones([hvd.size()]), gate.late(splits), name="rows")[0]
        return total, rows

    right = tf.ones([hvd.size()], tf.int32)
    # The gate is that of this function alone, which needs its queue in the second call, too.
    with Gate() as gate, pytest.raises(tf.errors.OpError) as caught:
        step(tf.constant(100.0), right + 7 if hvd.rank() == 0 else right)
    kind = tf.errors.InvalidArgumentError if hvd.rank() == 0 else tf.errors.FailedPreconditionError
    assert isinstance(caught.value, kind)
    assert float(step(tf.constant(value), right)[0]) == value * hvd.size()


@pytest.mark.parametrize("ranks", [3], indirect=True)
@each_check(globals())
def test_retry(ranks, check):
    ranks.run(check)
