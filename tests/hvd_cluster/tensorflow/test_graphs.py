"""Operations of a graph: they run side by side and fuse, in any order; names, shapes, sessions, compilation."""

import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from collectives.events import Decided, Submitted
from hvd_cluster.core import basics
from tests.checks import each_check
from tests.hvd_cluster.tensorflow.pool import Pool

COUNT = 50


def gradients():
    return [tf.fill([100 + index], float(index * (hvd.rank() + 1))) for index in range(COUNT)]


def assert_sums(results):
    factor = sum(range(1, hvd.size() + 1))
    for index, result in enumerate(results):
        np.testing.assert_allclose(result.numpy(), np.full(100 + index, index * factor))


def step_in_order_of_rank():
    """A step whose 50 operations each rank traces in another order."""
    order = range(COUNT) if hvd.rank() % 2 else range(COUNT - 1, -1, -1)

    @tf.function
    def step(tensors):
        sums = {index: hvd.allreduce(tensors[index], op=hvd.Sum, name=f"gradient.{index}") for index in order}
        return [sums[index] for index in range(COUNT)]

    return step


def check_operations_overlap_and_fuse_in_any_order():
    """One after the other, the ranks would wait for one another for ever."""
    decided = []
    step, tensors = step_in_order_of_rank(), gradients()
    end = basics.engine().events.subscribe(lambda event: decided.append(event) if type(event) is Decided else None)
    for _ in range(5):
        assert_sums(step(tensors))
    end()
    batches = {event.batch for event in decided}
    assert len(batches) < 5 * COUNT / 2, len(batches)


def check_all_are_in_flight_before_the_first_ends():
    """The last rank submits its tensors one by one, each when the one before it has its result."""
    submitted = []
    last = hvd.rank() == hvd.size() - 1

    @tf.function
    def step(tensors):
        results = []
        for index, tensor in enumerate(tensors):
            with tf.control_dependencies(results[-1:] if last else []):
                results.append(hvd.allreduce(tensor, op=hvd.Sum, name=f"in_flight.{index}"))
        return results

    end = basics.engine().events.subscribe(lambda event: submitted.append(event) if type(event) is Submitted else None)
    assert_sums(step(gradients()))
    end()
    assert len([event for event in submitted if "in_flight" in event.name]) == COUNT


def check_timeline():
    """In the timeline of rank 0 the negotiations of different tensors overlap."""
    step, tensors = step_in_order_of_rank(), gradients()
    step(tensors)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        hvd.start_timeline(str(path))
        assert_sums(step(tensors))
        hvd.barrier()
        hvd.stop_timeline()
        if hvd.rank():
            return
        records = json.loads(path.read_text())
    names = [each for each in records if each.get("name") == "process_name" and "name" in each["args"]]
    rows = {each["pid"] for each in names if "gradient." in each["args"]["name"]}
    spans = {}
    for record in records:
        if record["pid"] in rows and record["ph"] in "BEX":
            first, last = spans.get(record["pid"], (record["ts"], record["ts"]))
            spans[record["pid"]] = min(first, record["ts"]), max(last, record["ts"])
    assert len(spans) >= COUNT
    ordered = sorted(spans.values())
    overlapping = [later for (_, end), (later, _) in itertools.pairwise(ordered) if later < end]
    assert len(overlapping) > COUNT / 2, ordered


def check_nested_functions_and_branches():
    @tf.function
    def inner(x):
        return hvd.allreduce(x, op=hvd.Sum)

    @tf.function
    def outer(x, many):
        total = inner(x) + inner(x + 1.0)
        if many:
            total += hvd.allreduce(x, op=hvd.Sum)
        for _ in tf.range(3):
            total += hvd.allreduce(x, op=hvd.Sum, name="in_loop")
        return total

    size = hvd.size()
    assert outer(tf.constant(1.0), tf.constant(True)).numpy() == 7 * size
    assert outer(tf.constant(1.0), tf.constant(False)).numpy() == 6 * size


def check_iterations_that_run_at_the_same_time():
    """Nothing but the collectives orders them; each must meet the same iteration of the other ranks."""

    @tf.function
    def step(x):
        totals = tf.TensorArray(tf.float32, 20)
        _, totals = tf.while_loop(
            lambda index, _: index < 20,
            lambda index, totals: (
                index + 1,
                totals.write(index, hvd.allreduce(x * tf.cast(index, tf.float32), op=hvd.Sum)),
            ),
            (0, totals),
        )
        return totals.stack()

    for _ in range(3):
        np.testing.assert_allclose(step(tf.constant(1.0)).numpy(), np.arange(20.0) * hvd.size())


def check_an_operation_whose_result_nobody_reads_runs():
    """On another rank somebody may read it."""

    @tf.function
    def step(x):
        result = hvd.allreduce(x, op=hvd.Sum)
        return result if hvd.rank() == 0 else x

    assert step(tf.constant(1.0)).numpy() == (hvd.size() if hvd.rank() == 0 else 1)


def names_of(function, *arguments):
    graph = tf.function(function).get_concrete_function(*arguments).graph
    return [node.get_attr("tensor_name").decode() for node in graph.get_operations() if "Horovod" in node.type]


def check_names():
    def step(x, y):
        with tf.name_scope("layer"):
            first, second = hvd.allreduce(x), hvd.allreduce(x)
        group = hvd.grouped_allreduce([x, y])
        with tf.name_scope("scope"):
            own = hvd.allreduce(y, name="own", ignore_name_scope=True)
        return first, second, group, own

    arguments = tf.TensorSpec([2], name="x"), tf.TensorSpec([2], name="y.1")
    expected = [
        "layer/HorovodAllreduce_x_0",
        "layer/HorovodAllreduce_x_0_1",
        "HorovodGroupedAllreduce_x_0_y_1_0",
        "own",
    ]
    assert names_of(step, *arguments) == expected
    assert names_of(step, *arguments) == expected


def check_names_of_captured_tensors_do_not_tell_how_much_a_rank_has_done():
    for _ in range(10 * hvd.rank()):
        tf.ones([2]) + 1
    first, second = tf.ones([512]), tf.fill([512], 2.0)
    results = tf.function(lambda: [hvd.allreduce(each, op=hvd.Sum) for each in (first, second)])()
    for result, value in zip(results, (1, 2), strict=True):
        np.testing.assert_allclose(result.numpy(), np.full(512, value * hvd.size()))


def check_shapes():
    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        known = tf.ensure_shape(x, [4, 3])
        assert hvd.allreduce(known).shape == [4, 3]
        assert hvd.broadcast(known, 0).shape == [4, 3]
        assert [each.shape for each in hvd.grouped_allreduce([known, known[0]])] == [[4, 3], [3]]
        for result in (hvd.allgather(known), hvd.reducescatter(known), hvd.grouped_allgather([known])[0]):
            assert result.shape.as_list() == [None, 3]
        output, received = hvd.alltoall(known, tf.zeros([hvd.size()], tf.int32))
        assert output.shape.as_list() == [None, 3]
        assert received.shape.as_list() == [None]
        assert hvd.allreduce(x).shape.as_list() == [None, 3]
        assert hvd.size_op().shape == []
        return hvd.join()

    step.get_concrete_function()


def check_sessions():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        source = tf.compat.v1.placeholder(tf.float32, [2])
        total, (part,) = hvd.allreduce(source, op=hvd.Sum), hvd.grouped_allreduce([source * 2])
        slope = tf.gradients(total, source)[0]
        assert total.shape == [2]
        values = session.run([total, part, slope, hvd.rank_op()], {source: [1.0, 2.0]})
    np.testing.assert_allclose(values[0], np.array([1.0, 2.0]) * hvd.size())
    np.testing.assert_allclose(values[1], [2.0, 4.0])
    np.testing.assert_allclose(values[2], np.full(2, hvd.size()))
    assert values[3] == hvd.rank()


def check_compilation_is_refused_where_it_is_not_wanted():
    def step(x):
        return hvd.allreduce(x, op=hvd.Sum)

    inside = tf.function(step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(basics._process, "allows_xla", False)
        for compiled in (step, inside, lambda x: hvd.rank_op() + tf.cond(x[0] > 0, lambda: 1, lambda: 2)):
            with pytest.raises(NotImplementedError, match="HOROVOD_ENABLE_XLA_OPS is 0; leave jit_compile=True out of"):
                tf.function(compiled, jit_compile=True)(tf.ones([2]))
    around = tf.function(lambda x: inside(double(x)))
    double = tf.function(lambda x: 2 * x, jit_compile=True)
    assert around(tf.ones([2])).numpy().tolist() == [2 * hvd.size()] * 2
    # It is traced now: only TensorFlow sees it in a function that is compiled.
    with pytest.raises(tf.errors.InvalidArgumentError, match="HorovodAllreduce"):
        tf.function(lambda x: inside(x) + 1, jit_compile=True)(tf.ones([2]))


def check_vectorized_loops_are_refused_and_others_work():
    def squares(x):
        return hvd.allreduce(x * x)

    def jacobian(x, **options):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = squares(x)
        return tape.jacobian(y, x, **options)

    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    for call in (jacobian, tf.function(jacobian)):
        with pytest.raises(
            NotImplementedError, match=r"cannot vectorize HorovodAllreduce.*experimental_use_pfor=False"
        ):
            call(x[0])
    with pytest.raises(NotImplementedError, match=r"cannot vectorize HorovodAllreduce.*use tf\.map_fn"):
        tf.function(lambda rows: tf.vectorized_map(squares, rows))(x)
    for call in (jacobian, tf.function(jacobian)):
        found = call(x[0], experimental_use_pfor=False)
        np.testing.assert_allclose(found, [[2.0, 0.0], [0.0, 4.0]])
    np.testing.assert_allclose(tf.function(lambda rows: tf.map_fn(squares, rows))(x), x * x)


def check_an_exported_function_has_only_what_was_traced():
    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None])])
        def serve(self, x):
            return x * 2

        @tf.function(input_signature=[tf.TensorSpec([None])])
        def train(self, x):
            return hvd.allreduce(self.serve(x))

    model = Model()
    model.train(tf.ones([2]))
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(model, folder, signatures=model.serve)
        assert b"HorovodAllreduce" not in b"".join(
            function.SerializeToString()
            for function in tf.saved_model.load(folder).signatures["serving_default"].graph.as_graph_def().node
        )


@each_check(globals(), check_operations_overlap_and_fuse_in_any_order, check_timeline)
def test_graph(ranks, check):
    ranks.run(check)


@pytest.fixture(scope="module")
def narrow():
    """Two ranks in which TensorFlow has one thread between nodes."""
    pool = Pool(2, None, {"TF_NUM_INTEROP_THREADS": "1"})
    pool.run(hvd.init)
    yield pool
    pool.close()


def test_operations_overlap_and_fuse_in_any_order(narrow):
    narrow.run(check_operations_overlap_and_fuse_in_any_order)
    narrow.run(check_timeline)
    narrow.run(check_all_are_in_flight_before_the_first_ends)
