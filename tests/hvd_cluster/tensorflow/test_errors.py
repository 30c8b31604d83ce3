"""What TensorFlow raises, and the engine's own error behind it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from collectives.api import InvalidRequestError, MismatchError, NotInitializedError, RefusedCallError
from hvd_cluster.tensorflow.errors import engine_error
from tests.checks import each_check

MODES = {"eager": lambda function: function, "graph": tf.function}


def error_of(function):
    """The engine's error behind the one of TensorFlow, and that."""
    with pytest.raises(tf.errors.OpError) as caught:
        function()
    return engine_error(caught.value), caught.value


def check_disagreement():
    for mode, wrap in MODES.items():
        wrong = wrap(lambda: hvd.allreduce(tf.ones([hvd.rank() + 1]), name=f"shape.{mode}"))  # noqa: B023
        cause, error = error_of(wrong)
        assert isinstance(error, tf.errors.FailedPreconditionError)
        assert isinstance(cause, MismatchError)
        assert cause.property == "shape"
        assert "HorovodAllreduce" in str(error) or mode == "graph"
        if mode == "eager":
            assert error.__cause__ is cause
        assert hvd.allreduce(tf.ones([2]), op=hvd.Sum).numpy().tolist() == [hvd.size()] * 2


def check_the_text_begins_with_what_has_happened():
    """Then come the lines of Python that made the node, without those of this package."""

    @tf.function
    def step(x, splits):
        with tf.control_dependencies([hvd.alltoall(x, splits, name="rows")[0]]):
            return hvd.allreduce(x, name="later")

    @tf.function
    def outer(x):
        for _ in tf.range(2):
            step(x, hvd.size() * [1])
        return step(x, hvd.size() * [-1])

    class Model(keras.Sequential):
        def train_step(self, data):
            return {"loss": tf.reduce_sum(step(data[0], hvd.size() * [-1]))}

    model, rows = Model([keras.layers.Dense(1)]), tf.ones([hvd.size(), 1])
    model.compile(jit_compile=False)
    for wrong in (
        lambda: step(rows, hvd.size() * [-1]),
        lambda: outer(rows),
        lambda: model.fit(rows, rows, verbose=0),
        lambda: hvd.alltoall(rows, hvd.size() * [-1], name="rows"),
        lambda: in_a_session(lambda: hvd.alltoall(rows.numpy(), hvd.size() * [-1], name="rows")[0]),
    ):
        cause, error = error_of(wrong)
        assert isinstance(cause, InvalidRequestError)
        assert str(error).startswith(str(cause))
        assert "calls.py" not in str(error) or "Original stack trace" in str(error), "TensorFlow adds it in a session"


def in_a_session(make):
    with tf.Graph().as_default():
        result = make()
        with tf.compat.v1.Session() as session:
            return session.run(result)


def check_the_text_of_another_error_is_that_of_tensorflow():
    @tf.function
    def step(x, divisor):
        return tf.cast(hvd.allreduce(x), tf.int32) // divisor

    for wrong in (
        lambda: step(tf.ones([3]), tf.constant(0)),
        lambda: in_a_session(lambda: step(np.ones(3, "f"), tf.constant(0))),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match="zero") as caught:
            wrong()
        assert str(caught.value).startswith("Graph execution error")


def check_a_variable_that_differs_is_named():
    layer = keras.layers.Dense(1, name="head")
    layer.build((None, hvd.rank() + 1))
    variables = [tf.Variable([1.0], name="same"), tf.Variable(tf.ones([hvd.rank() + 1]), name="other")]
    for given, name in ((variables, "other"), (layer.weights[::-1], layer.kernel.path)):
        cause, error = error_of(lambda: hvd.broadcast_variables(given, 0))  # noqa: B023
        assert isinstance(error, tf.errors.FailedPreconditionError)
        assert error.__cause__ is cause
        assert f"the variable {name!r}, number 1, is float32 of shape" in str(error)


def check_a_session_names_the_variable():
    with tf.Graph().as_default():
        tf.compat.v1.get_variable("same", [1])
        tf.compat.v1.get_variable("other", [hvd.rank() + 1])
        hook = hvd.BroadcastGlobalVariablesHook(0)
        hook.begin()
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            _, error = error_of(lambda: hook.after_create_session(session, None))
    assert isinstance(error, tf.errors.FailedPreconditionError)
    assert "It is the variable 'other:0' of this rank" in str(error)


def check_kinds():
    """One rank is in another operation of the same name, or gives rows instead of a whole tensor."""
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    pairs = [
        (lambda: hvd.allreduce(tf.ones([2]), name="k"), lambda: hvd.broadcast(tf.ones([2]), 0, name="k")),
        (lambda: hvd.allreduce(tf.ones([3, 2]), name="k"), lambda: hvd.allreduce(rows, name="k")),
    ]
    for usual, odd in pairs:
        cause, error = error_of(odd if hvd.rank() == 1 else usual)
        assert isinstance(error, tf.errors.FailedPreconditionError)
        assert isinstance(cause, MismatchError)
        assert cause.property == "operation"
        assert cause.values[0] == "allreduce" != cause.values[1]
        assert hvd.allgather_object(str(cause)) == [str(cause)] * hvd.size()
        assert usual() is not None


def check_arguments():
    cause, error = error_of(lambda: hvd.broadcast(tf.ones([2]), 99, name="root"))
    assert isinstance(error, tf.errors.InvalidArgumentError)
    assert isinstance(cause, InvalidRequestError)
    cause, error = error_of(lambda: hvd.size_op(77))
    assert isinstance(error, tf.errors.InvalidArgumentError)


def check_arguments_that_are_wrong_before_the_operation_runs():
    for wrong in (
        lambda: hvd.allreduce(tf.ones([1]), op=77),
        lambda: hvd.allreduce(tf.ones([1]), average=True, op=hvd.Sum),
        lambda: hvd.allreduce(tf.constant(["text"])),
        lambda: hvd.allreduce(tf.constant([1], tf.uint16)),
        lambda: hvd.allreduce(tf.ones([1]), prescale_factor="x"),
        lambda: hvd.broadcast(tf.ones([1]), "first"),
        lambda: hvd.grouped_allreduce(tf.ones([1])),
        lambda: hvd.alltoall(tf.ones([1]), splits=[0.5]),
        lambda: hvd.broadcast_([1], 0),
    ):
        with pytest.raises(InvalidRequestError):
            wrong()
    slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]))
    for arguments in ({"op": hvd.Max}, {"op": hvd.Adasum}, {"prescale_factor": 0.5}):
        with pytest.raises(NotImplementedError, match="IndexedSlices"):
            hvd.allreduce(slices, **arguments)


def check_errors_name_a_remedy_that_helps():
    ragged, sparse = tf.ragged.constant([[1.0], []]), tf.sparse.from_dense([[1.0]])
    float8 = tf.cast(tf.ones([1]), tf.dtypes.experimental.float8_e5m2)
    cases = [
        (lambda: hvd.allreduce(tf.constant(["text"])), "string is not supported; give strings as objects"),
        (lambda: hvd.allreduce(tf.constant([1], tf.uint16)), "uint16 is not supported; convert .* complex128$"),
        *(
            (call, "float8_e5m2 is not supported; convert .* uint16, uint32, uint64$")
            for call in (
                lambda: hvd.allgather(float8),
                lambda: hvd.broadcast(float8, 0),
                lambda: hvd.alltoall(float8),
            )
        ),
        (lambda: hvd.broadcast_([1], 0), "type int is not a variable"),
        (lambda: hvd.allreduce(ragged), "RaggedTensor is not one tensor; give .* row_splits"),
        (lambda: hvd.allgather(sparse), r"SparseTensor is not one tensor; give .* tf\.sparse\.to_dense"),
    ]
    for wrong, text in cases:
        with pytest.raises(InvalidRequestError, match=text):
            wrong()


def check_autograph_leaves_the_class_of_an_error():
    def wrong():
        return hvd.allreduce(tf.ones([1]), op=77)

    def slices():
        return hvd.allreduce(tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0])), op=hvd.Max)

    with pytest.raises(InvalidRequestError, match="op=77"):
        tf.function(wrong)()
    with pytest.raises(NotImplementedError, match="IndexedSlices"):
        tf.function(slices)()


def check_other_ranks_hear_of_a_refused_call():
    if hvd.rank() == 0:
        with pytest.raises(InvalidRequestError):
            hvd.allreduce(tf.constant(["text"]), name="refused")
    else:
        cause, error = error_of(lambda: hvd.allreduce(tf.ones([1]), name="refused"))
        assert isinstance(error, tf.errors.FailedPreconditionError)
        assert isinstance(cause, RefusedCallError)


def check_a_failure_ends_the_whole_run_of_a_graph():
    """Rank 0 has begun an operation that the others never begin, because the one before it fails there."""

    @tf.function
    def step():
        first = hvd.allreduce(tf.ones([hvd.rank() + 1]), name="fails")
        with tf.control_dependencies([first] if hvd.rank() else []):
            return first, hvd.allreduce(tf.ones([2]), name="alone")

    _, error = error_of(step)
    assert isinstance(error, tf.errors.FailedPreconditionError | tf.errors.CancelledError)


def check_an_error_of_another_kind_is_not_ours():
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        tf.reshape(tf.ones([3]), [2])
    assert engine_error(caught.value) is None


BETWEEN_RANKS = (
    check_disagreement,
    check_a_variable_that_differs_is_named,
    check_a_session_names_the_variable,
    check_kinds,
    check_other_ranks_hear_of_a_refused_call,
)


@each_check(globals(), *BETWEEN_RANKS, check_a_failure_ends_the_whole_run_of_a_graph)
@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_error(ranks, check):
    ranks.run(check)


@pytest.mark.parametrize("check", BETWEEN_RANKS)
@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_error_between_ranks(ranks, check):
    ranks.run(check)


def test_a_failure_ends_the_whole_run_of_a_graph(fresh_pool):
    pool = fresh_pool(2)
    pool.run(hvd.init)
    pool.run(check_a_failure_ends_the_whole_run_of_a_graph)


def check_before_init():
    for call in (hvd.allreduce, hvd.allgather, hvd.reducescatter):
        with pytest.raises(NotInitializedError):
            call(tf.ones([1]))
    assert isinstance(error_of(hvd.rank_op)[1], tf.errors.FailedPreconditionError)


def check_shutdown():
    step = tf.function(lambda: hvd.allreduce(tf.ones([2]), name="late"))
    step()
    hvd.shutdown()
    assert isinstance(error_of(step)[0], NotInitializedError)
    hvd.init()
    assert step().numpy().tolist() == [1.0, 1.0]


def test_before_init_and_after_shutdown(fresh_pool):
    pool = fresh_pool(1)
    pool.run(check_before_init)
    pool.run(hvd.init)
    pool.run(check_shutdown)
