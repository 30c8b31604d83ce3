"""Limits and failures of compiled functions: all ranks have our text, and the function may run again."""

import threading

import pytest
import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from collectives import HorovodInternalError, InvalidRequestError, MismatchError
from hvd_cluster.tensorflow.errors import engine_error, engine_errors
from tests.checks import each_check

SIZES = pytest.mark.parametrize("ranks", [3], indirect=True)


def compiled(function, **options):
    return tf.function(function, jit_compile=True, autograph=False, **options)


def raised(function, *args):
    with pytest.raises(tf.errors.OpError) as info:
        function(*args)
    return info.value


def check_other_shapes_on_other_ranks():
    step = compiled(lambda x: hvd.allreduce(x, name="uneven") + 1)
    error = raised(step, tf.ones([2 + hvd.rank() % 2]))
    assert isinstance(error, tf.errors.InternalError)
    assert "tensor 'allreduce.uneven': the ranks disagree about the shape: (2,) on ranks 0, 2; (3,) on rank 1" in str(
        error
    )
    assert isinstance(engine_error(error), MismatchError)
    assert step(tf.ones([2])).numpy().tolist() == [2, 2]


def check_elastic_code_gets_the_error_of_the_engine():
    step = compiled(lambda x: hvd.allreduce(x, name="elastic"))
    with pytest.raises(HorovodInternalError, match="disagree"), engine_errors():
        step(tf.ones([2 + hvd.rank() % 2]))


def check_one_of_several_fails_and_nothing_is_left_in_flight():
    def step(x):
        return (
            hvd.allreduce(tf.ones([3]), name="first"),
            hvd.allreduce(x, name="second"),
            hvd.broadcast(tf.ones([4]), 0, "third"),
        )

    both = compiled(step)
    for _ in range(3):
        assert "second" in str(raised(both, tf.ones([2 + hvd.rank() % 2])))
        assert both(tf.ones([5]))[1].numpy().tolist() == [1] * 5


def check_uneven_rows_of_an_allgather():
    step = compiled(lambda x: hvd.allgather(x, name="rows"))
    error = raised(step, tf.ones([1 + hvd.rank() % 2, 2]))
    assert "for 3 ranks that give as many rows as this one; give equal numbers of rows" in str(error)
    assert isinstance(engine_error(error), InvalidRequestError)
    assert step(tf.ones([2, 2])).shape == [6, 2]


def check_rows_that_do_not_divide():
    error = raised(compiled(lambda x: hvd.alltoall(x, name="shares")), tf.ones([4]))
    assert "3 ranks must be able to share the 4 rows of the tensor evenly" in str(error)


def check_a_rank_that_refuses_its_call():
    """The others hear of it."""
    shape = [4] if hvd.rank() == 1 else [3]
    error = raised(compiled(lambda x: hvd.alltoall(x, name="refused") + hvd.allreduce(x, name="later")), tf.ones(shape))
    assert "refused" in str(error)
    assert compiled(lambda x: hvd.allreduce(x, name="later"))(tf.ones([2])).numpy().tolist() == [1, 1]


def check_a_function_compiled_for_another_number_of_ranks():
    """As after ranks have changed."""
    gather, reduce = (compiled(lambda x, run=run: run(x)) for run in (hvd.allgather, hvd.allreduce))
    from hvd_cluster.tensorflow.xla import handlers

    assert gather(tf.ones([2])).shape == [6]
    assert reduce(tf.ones([2])).shape == [2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handlers, "size_of_set", lambda id: 4)
        assert "was compiled for 3 ranks, and there are 4 now" in str(raised(gather, tf.ones([2])))
        assert reduce(tf.ones([2])).shape == [2]


def check_what_xla_cannot_compile():
    x = tf.ones([3])
    refused = {
        "HorovodAlltoall: shapes must be known": lambda x: hvd.alltoall(x, splits=[1, 1, 1]),
        "HorovodJoin: it has no tensor": lambda x: hvd.join(),
        "HorovodBarrier: it has no tensor": lambda x: hvd.barrier(),
    }
    for text, function in refused.items():
        with pytest.raises(NotImplementedError, match=f"XLA cannot compile {text}.*leave jit_compile=True out"):
            compiled(function)(x)
    unknown = compiled(hvd.allreduce, input_signature=[tf.TensorSpec(None)])
    with pytest.raises(NotImplementedError, match="number of dimensions of the tensor is not known"):
        unknown(x)
    with pytest.raises(ValueError, match="Tensor type string is not supported"):
        compiled(lambda: hvd.allreduce(tf.constant("text")))()


def check_where_the_library_is_unknown():
    from hvd_cluster.tensorflow.native import xla_registry as registry
    from hvd_cluster.tensorflow.xla import nodes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "REGISTER", "_no_such_function")
        assert "does not export what is needed" in registry.register(nodes.handle)
        patch.setattr(registry, "is_known", lambda: False)
        assert "it is tested with TensorFlow 2.18 to" in registry.register(nodes.handle)
        patch.setattr(nodes, "_why_not_registered", lambda: "no such function")
        with pytest.raises(NotImplementedError, match="XLA cannot compile HorovodAllreduce: no such function; leave"):
            compiled(hvd.allreduce)(tf.ones([2]))


def check_a_second_function_is_not_taken():
    from hvd_cluster.tensorflow.native import xla_registry as registry

    compiled(hvd.allreduce)(tf.ones([2]))
    other = registry.as_function(lambda *_: None, str)
    assert registry.register(other) == "another function is registered with XLA by the name 'hvd_cluster'"
    assert compiled(lambda x: hvd.allreduce(x, op=hvd.Sum))(tf.ones([2])).numpy().tolist() == [3, 3]


def check_texts_of_any_length():
    """Short ones are in the status itself, long ones in memory that XLA frees."""
    from hvd_cluster.tensorflow.xla import handlers

    asked = compiled(hvd.size_op)
    assert asked().numpy() == 3
    for length in (1, 15, 16, 17, 5000):

        def fail(id, length=length):
            raise ValueError("x" * length)

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(handlers.NUMBERS, "HorovodSize", fail)
            assert f"{'x' * length} [hvd-cluster error" in str(raised(asked))
    assert asked().numpy() == 3


def check_an_interrupt_does_not_pass_xla():
    from hvd_cluster.tensorflow.xla import handlers

    def interrupt(id):
        raise KeyboardInterrupt

    asked = compiled(hvd.size_op)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(handlers.NUMBERS, "HorovodSize", interrupt)
        assert isinstance(engine_error(raised(asked)), KeyboardInterrupt)


def check_threads_do_not_end_each_other():
    """One function fails again and again while another one runs on a thread of its own."""
    good, bad = (compiled(lambda x, name=name: hvd.allreduce(x, name=name, op=hvd.Sum)) for name in ("good", "bad"))
    results = []

    def train():
        results.extend([good(tf.ones([1000])).numpy()[0] for _ in range(20)])

    thread = threading.Thread(target=train)
    thread.start()
    for _ in range(10):
        raised(bad, tf.ones([2 + hvd.rank() % 2]))
    thread.join()
    assert results == [3] * 20


@SIZES
@each_check(globals())
def test_errors(ranks, check):
    ranks.run(check)


def before_init():
    with pytest.raises(ValueError, match=r"use hvd\.init\(\)"):
        compiled(hvd.allreduce)(tf.ones([2]))


def after_shutdown():
    hvd.init()
    step = compiled(lambda x: hvd.allreduce(x, name="kept", op=hvd.Sum))
    assert step(tf.ones([2])).numpy().tolist() == [2, 2]
    hvd.shutdown()
    assert "use hvd.init()" in str(raised(step, tf.ones([2])))
    hvd.init()
    assert step(tf.ones([2])).numpy().tolist() == [2, 2]
    hvd.shutdown()


def test_before_init_and_after_shutdown(fresh_pool):
    pool = fresh_pool(2)
    pool.run(before_init)
    pool.run(after_shutdown)
