"""DistributedGradientTape: the gradients of all ranks are those of one process for the joined batch."""

from itertools import pairwise

import numpy as np
import pytest
import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from tests.checks import each_check

WIDTHS = [6, 300, 300, 3]  # two gradients of more than 128 KB, the others packed


def variables(seed=1):
    random = np.random.default_rng(seed)
    made = []
    for inputs, outputs in pairwise(WIDTHS):
        made += [tf.Variable(random.normal(size=(inputs, outputs)).astype("f") / 8), tf.Variable(tf.zeros(outputs))]
    return made


def batch(rank, rows=4):
    random = np.random.default_rng(10 + rank)
    return tf.constant(random.normal(size=(rows, WIDTHS[0])), tf.float32)


def loss(model, images):
    for kernel, bias in zip(model[::2], model[1::2], strict=True):
        images = tf.tanh(images @ kernel + bias)
    return tf.reduce_mean(tf.square(images))


def gradients(model, images, **options):
    with tf.GradientTape() as tape:
        value = loss(model, images)
    return hvd.DistributedGradientTape(tape, **options).gradient(value, model)


def expected(model, scale=1.0):
    with tf.GradientTape() as tape:
        value = loss(model, tf.concat([batch(rank) for rank in range(hvd.size())], 0))
    return [gradient * scale for gradient in tape.gradient(value, model)]


def same(actual, wanted, rtol=1e-5, atol=1e-7):
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=rtol, atol=atol)
    flat = tf.concat([tf.reshape(one, [1, -1]) for one in actual], 1)
    everyone = hvd.allgather(tf.bitcast(flat, tf.int32)).numpy()
    assert (everyone == everyone[0]).all(), "the ranks differ"


def both(function, *args):
    yield function(*args)
    yield tf.function(function)(*args)


def check_equality_with_one_process():
    model = variables()
    for options in ({}, {"groups": 2}, {"groups": [model[:3], [model[5]]]}, {"gradient_predivide_factor": 4.0}):
        for found in both(lambda images: gradients(model, images, **options), batch(hvd.rank())):  # noqa: B023
            same(found, expected(model))
    for found in both(lambda images: gradients(model, images, op=hvd.Sum), batch(hvd.rank())):
        same(found, expected(model, hvd.size()))


def check_process_sets():
    """The last rank is no member, and keeps its own gradients."""
    model, members = variables(), list(range(hvd.size() - 1))
    process_set = hvd.add_process_set(members)
    is_member = hvd.rank() in members
    with tf.GradientTape() as tape:
        ranks = members if is_member else [hvd.rank()]
        value = loss(model, tf.concat([batch(rank) for rank in ranks], 0))
    wanted = tape.gradient(value, model)
    for found in both(lambda images: gradients(model, images, process_set=process_set), batch(hvd.rank())):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    hvd.remove_process_set(process_set)


def check_bfloat16():
    model = [tf.Variable(tf.ones([300, 300], tf.bfloat16)), tf.Variable(tf.ones([3], tf.bfloat16))]

    def step(factor):
        with tf.GradientTape() as tape:
            value = sum(tf.reduce_sum(each * factor) for each in model)
        return hvd.DistributedGradientTape(tape).gradient(value, model)

    for found in both(step, tf.constant(2.0 * hvd.rank(), tf.bfloat16)):
        for one in found:
            assert one.dtype == tf.bfloat16
            assert (one.numpy() == hvd.size() - 1).all()


def check_ranks_with_other_numbers_of_steps():
    """Those that have joined add zeros to the gradients of the others."""
    model = variables()

    @tf.function
    def step(images):
        return gradients(model, images, op=hvd.Sum)

    for number in range(2 + hvd.rank()):
        found = step(batch(hvd.rank()))
        if number < 2:
            same(found, expected(model, hvd.size()))
    assert int(hvd.join()) in range(hvd.size())


def check_compression():
    model = variables()
    for compression, rtol in ((hvd.Compression.fp16, 1e-2), (hvd.Compression.bf16, 5e-2)):
        for found in both(lambda images: gradients(model, images, compression=compression), batch(hvd.rank())):  # noqa: B023
            assert all(gradient.dtype == tf.float32 for gradient in found)
            same(found, expected(model), rtol, 1e-3)


def check_a_recording_tape_is_wrapped_and_keeps_its_class():
    class Tape(tf.GradientTape):
        pass

    model = variables()
    with hvd.DistributedGradientTape(Tape(persistent=True)) as tape:
        value = loss(model, batch(hvd.rank()))
    assert isinstance(tape, Tape)
    assert type(tape).__name__ == "Tape"
    wanted = expected(model)
    same(tape.gradient(value, model), wanted)
    same([tape.gradient(value, model[0])], wanted[:1])
    named = tape.gradient(value, {"kernel": model[0], "bias": model[1]}, use_generic_names=True)
    same([named["kernel"], named["bias"]], wanted[:2])


def check_retracing_of_one_rank():
    """A rank that traces again, for a batch of another size, still meets the others."""
    model = variables()
    step = tf.function(lambda images: gradients(model, images))
    for rows in (4, 2 + hvd.rank(), 4):
        found = step(batch(hvd.rank(), rows))
    assert step.experimental_get_tracing_count() >= 1
    same(found, expected(model))


def check_sparse_gradients():
    table = tf.Variable(np.arange(20, dtype="f").reshape(10, 2))

    def run(rows, **options):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(tf.square(tf.gather(table, rows)))
        return hvd.DistributedGradientTape(tape, **options).gradient(value, [table])[0]

    wanted = np.zeros((10, 2))
    for rank in range(hvd.size()):
        for row in (rank, rank, 9):
            wanted[row] += 2 * table.numpy()[row] / hvd.size()
    rows = tf.constant([hvd.rank(), hvd.rank(), 9])
    for options, kind in (({}, tf.IndexedSlices), ({"sparse_as_dense": True}, tf.Tensor)):
        for found in both(lambda rows: run(rows, **options), rows):  # noqa: B023
            assert isinstance(found, kind)
            np.testing.assert_allclose(tf.convert_to_tensor(found), wanted, rtol=1e-6)


def check_a_gradient_that_one_rank_does_not_have():
    used, unused = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([200, 200]))

    def run():
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(used) + (tf.reduce_sum(unused) if hvd.rank() == 0 else 0.0)
        return hvd.DistributedGradientTape(tape).gradient(value, [used, unused])

    for found in both(run):
        same(found, [np.ones(2), np.full((200, 200), 1 / hvd.size())])


def check_local_sources():
    model = variables()
    with tf.GradientTape() as tape:
        value = loss(model, batch(hvd.rank()))
    own = tape.gradient(value, model)[0]
    for scales, factor in ((True, hvd.size()), (False, 1)):
        with hvd.DistributedGradientTape(tf.GradientTape(), scale_local_gradients=scales) as tape:
            value = loss(model, batch(hvd.rank()))
        tape.register_local_source(model[0])
        local, others = tape.get_local_and_global_gradients(value, model)
        assert [variable.shape for variable, _ in local] == [model[0].shape]
        np.testing.assert_allclose(local[0][1], own / factor, rtol=1e-6)
        same([gradient for _, gradient in others], expected(model)[1:])


def check_local_layers():
    layers = [tf.keras.layers.Dense(4), tf.keras.layers.Dense(2)]
    for layer, width in zip(layers, (6, 4), strict=True):
        layer.build((None, width))
        layer.set_weights([np.full_like(weight, 0.1) for weight in layer.get_weights()])
    weights = [weight for layer in layers for weight in layer.trainable_weights]
    with hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=layers[0]) as tape:
        value = tf.reduce_sum(layers[1](layers[0](batch(hvd.rank()))))
    local, others = tape.get_local_and_global_gradients(value, weights)
    assert [variable.path for variable, _ in local] == [weight.path for weight in layers[0].trainable_weights]
    same([gradient for _, gradient in others], [hvd.allreduce(gradient) for _, gradient in others])


def check_wrong_arguments():
    tape = tf.GradientTape()
    cases = [
        ((3,), {}, "cannot wrap"),
        ((hvd.DistributedGradientTape(tape),), {}, "not wrapped yet"),
        ((tape,), {"op": hvd.Max}, "op Max cannot combine gradients"),
        ((tape,), {"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=Average"),
        ((tape,), {"groups": 0}, "positive integer"),
        ((tape,), {"compression": 7}, "compression=7"),
        ((tape,), {"process_set": hvd.ProcessSet([0])}, "not registered"),
    ]
    for args, options, text in cases:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedGradientTape(*args, **options)
    with pytest.raises(ValueError, match="local_layers must be"):
        hvd.PartialDistributedGradientTape(tape, local_layers=[7])


@pytest.mark.parametrize("ranks", [3], indirect=True)
@each_check(globals())
def test_tape(ranks, check):
    ranks.run(check)
