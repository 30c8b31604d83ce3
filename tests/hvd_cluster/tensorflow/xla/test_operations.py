"""Collectives in functions that XLA compiles give what they give elsewhere, gradients included."""

import numpy as np
import pytest
import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from collectives.events import Submitted
from hvd_cluster.core import basics
from tests.checks import each_check

SIZES = pytest.mark.parametrize("ranks", [3], indirect=True)

OPERATIONS = {
    "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum),
    "average": lambda x: hvd.allreduce(x, prescale_factor=2.0, postscale_factor=0.5),
    "compressed": lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16),
    "maximum": lambda x: hvd.allreduce(x, op=hvd.Max),
    "broadcast": lambda x: hvd.broadcast(x, 1),
    "allgather": hvd.allgather,
    "alltoall": hvd.alltoall,
    "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum),
    "group": lambda x: tf.concat(hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum), 0),
    "gathered_group": lambda x: tf.concat(hvd.grouped_allgather([x, 2 * x]), 0),
    "scattered_group": lambda x: tf.concat(hvd.grouped_reducescatter([x, 2 * x]), 0),
}


def compiled(function, **options):
    return tf.function(function, jit_compile=True, autograph=False, **options)


def values(rows=6):
    return tf.reshape(tf.range(2.0 * rows), [rows, 2]) + 10.0 * hvd.rank()


def check_results_are_those_of_eager_mode():
    x = values()
    for name, operation in OPERATIONS.items():
        np.testing.assert_array_equal(compiled(operation)(x), operation(x), err_msg=name)


def slope_of(operation, weights, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(operation(x) * weights)
    return tape.gradient(loss, x)


def check_gradients_are_those_of_eager_mode():
    x = values()
    for name, operation in OPERATIONS.items():
        if name == "maximum":
            continue
        weights = tf.cast(tf.range(operation(x).shape[0]), tf.float32)[:, None] * (1.0 + hvd.rank())
        wanted = slope_of(operation, weights, x)
        inside = compiled(lambda x, run=operation, by=weights: slope_of(run, by, x))
        around = compiled(operation)
        np.testing.assert_allclose(inside(x), wanted, rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(slope_of(around, weights, x), wanted, rtol=1e-6, err_msg=name)


def check_an_operation_without_a_gradient_says_so():
    with pytest.raises(ValueError, match="op Max has no gradient"):
        compiled(lambda x: slope_of(OPERATIONS["maximum"], 1.0, x))(values())


def check_dtypes():
    for dtype in (tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float64, tf.complex64, tf.uint32):
        x = tf.cast(tf.fill([4], 1 + hvd.rank()), dtype)
        result = compiled(lambda x: hvd.broadcast(x, 2))(x)
        assert result.dtype is dtype
        assert tf.cast(result, tf.int64).numpy().tolist() == [3] * 4
    flag = tf.constant([hvd.rank() == 1, True])
    assert compiled(lambda x: hvd.allreduce(x, op=hvd.Sum))(flag).numpy().tolist() == [True, True]


def check_scalars_and_tensors_without_elements():
    assert compiled(lambda x: hvd.allreduce(x, op=hvd.Sum))(tf.constant(1.0)).numpy() == hvd.size()
    empty = compiled(lambda x: [hvd.allreduce(x), hvd.allgather(x)])(tf.zeros([0, 3]))
    assert [tuple(each.shape) for each in empty] == [(0, 3), (0, 3)]


def check_one_trace_serves_batches_of_unknown_size():
    traces = []

    @tf.function(jit_compile=True, autograph=False, input_signature=[tf.TensorSpec([None, 2], tf.float32)])
    def step(x):
        traces.append(x)
        return [operation(x) for operation in OPERATIONS.values()]

    for rows in (3, 9):
        for name, result, operation in zip(OPERATIONS, step(values(rows)), OPERATIONS.values(), strict=True):
            np.testing.assert_array_equal(result, operation(values(rows)), err_msg=f"{name} {rows}")
    assert len(traces) == 1


def check_uneven_shares_of_a_reducescatter():
    x = values(7)
    np.testing.assert_array_equal(compiled(OPERATIONS["reducescatter"])(x), OPERATIONS["reducescatter"](x))


def check_loops_and_branches():
    @tf.function(jit_compile=True)
    def step(x):
        for _ in tf.range(3):
            x = hvd.allreduce(x, op=hvd.Sum)
        return tf.cond(x[0] > 0, lambda: hvd.allreduce(x + 1), lambda: hvd.allreduce(x - 1, op=hvd.Max))

    for sign in (1.0, -1.0):
        assert step(tf.fill([2], sign)).numpy().tolist() == [sign * (hvd.size() ** 3 + 1)] * 2


def check_gradients_of_a_loop():
    @tf.function(jit_compile=True)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(2):
                y = hvd.allreduce(y * y)
        return tape.gradient(y, x)

    assert step(tf.constant(3.0)).numpy() == 4 * 27


def check_a_function_that_is_called_twice():
    inner = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))

    def step(x):
        return inner(x) + inner(2 * x)

    assert compiled(step)(tf.constant(1.0)).numpy() == 3 * hvd.size()


def check_the_raw_tensor_may_be_used_too():
    def step(x):
        doubled = 2 * x
        return hvd.allreduce(doubled, op=hvd.Sum), doubled

    total, raw = compiled(step)(tf.fill([5], float(hvd.rank())))
    assert total.numpy().tolist() == [6.0] * 5
    assert raw.numpy().tolist() == [2.0 * hvd.rank()] * 5


def check_numbers_of_ranks():
    found = compiled(lambda: [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()])()
    assert [each.numpy() for each in found] == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]


def check_process_sets():
    some = hvd.add_process_set([0, 2])
    if some.included():
        gathered = compiled(lambda x: hvd.allgather(x, process_set=some))(tf.fill([2], hvd.rank()))
        assert gathered.numpy().tolist() == [0, 0, 2, 2]
        assert compiled(lambda x: hvd.allreduce(x, process_set=some))(tf.fill([2], 1.0 * hvd.rank()))[0] == 1
    hvd.barrier()
    hvd.remove_process_set(some)


def check_sparse_tensors():
    rows = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([hvd.rank(), 5]), tf.constant([8, 3]))

    def step(values, indices):
        combined = hvd.allreduce(tf.IndexedSlices(values, indices, tf.constant([8, 3])), op=hvd.Sum)
        return tf.convert_to_tensor(combined)

    wanted = tf.convert_to_tensor(hvd.allreduce(rows, op=hvd.Sum))
    np.testing.assert_array_equal(compiled(step)(rows.values, rows.indices), wanted)


def submitted(step):
    """The result of ``step()``, and the names of what it submits."""
    seen = []
    end = basics.engine().events.subscribe(lambda event: seen.append(event) if isinstance(event, Submitted) else None)
    try:
        return step(), seen
    finally:
        end()


def check_calls_have_the_order_of_the_program():
    """XLA runs independent calls on several threads, so each rank could have an order of its own."""

    @tf.function(jit_compile=True)
    def step(x):
        chains = []
        for number in range(20):
            y = tf.sort(tf.matmul(x, x) + float(number), axis=1)
            chains.append(hvd.allreduce(y, name=f"chain.{number}"))
        return tf.add_n([tf.matmul(each, each) for each in chains])

    x = tf.random.normal([128, 128])
    step(x)
    for _ in range(3):
        _, seen = submitted(lambda: step(x))
        assert [event.name for event in seen] == [f"allreduce.chain.{number}" for number in range(20)]


def check_a_name_at_two_places_of_a_program():
    total = tf.function(lambda x: hvd.allreduce(x, name="twice", op=hvd.Sum))

    @tf.function(jit_compile=True)
    def step(x):
        small, large = tf.sort(x * 1.0), tf.sort(tf.reverse(x, [0]) * 100.0)
        return tf.add_n([total(small) - total(large), total(large)])

    for _ in range(5):
        np.testing.assert_allclose(step(tf.ones([1000])), [hvd.size()] * 1000)


def check_all_start_before_one_waits():
    """The gradients of a tape: XLA waits once, after it has started all."""
    variables = [tf.Variable(tf.ones([50_000])) for _ in range(4)]

    @tf.function(jit_compile=True)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(each * each) for each in variables])
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    step()
    results, seen = submitted(step)
    assert len(seen) == 4
    assert all((each.numpy() == 2).all() for each in results)
    text = step.experimental_get_compiler_ir()(stage="hlo")
    assert text.count('custom_call_target="hvd_cluster"') == 5


@SIZES
@each_check(globals(), check_calls_have_the_order_of_the_program)
def test_operations(ranks, check):
    ranks.run(check)


def _begin_with_threads():
    tf.config.threading.set_intra_op_parallelism_threads(4)
    hvd.init()


def test_order(fresh_pool):
    """XLA has several threads, unlike in the other pools, whose calls have one order in any case."""
    pool = fresh_pool(2)
    pool.run(_begin_with_threads)
    pool.run(check_calls_have_the_order_of_the_program)
