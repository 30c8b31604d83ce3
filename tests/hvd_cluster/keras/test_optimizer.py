"""DistributedOptimizer on every backend of Keras: two ranks train as one process does on the joined batches."""

import copy
import pickle
from unittest import TestCase

import keras
import numpy as np
import pytest

import hvd_cluster.keras as hvd
from hvd_cluster.keras.backends import backend
from hvd_cluster.keras.optimizer.distributed import targets_of
from hvd_cluster.ops.objects import allgather_object
from tests.checks import each_check
from tests.hvd_cluster.keras.training import (
    ROWS,
    STEPS,
    examples,
    fit_alone,
    fit_together,
    identical,
    model,
    same,
    sgd,
    sgd_alone,
)


def values(variables):
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


def check_fit():
    for options in ({}, {"groups": 2}, {"gradient_predivide_factor": 2.0}):
        same(fit_together(hvd.DistributedOptimizer(sgd(), **options)), sgd_alone())
    same(fit_together(hvd.DistributedOptimizer(sgd(), op=hvd.Sum)), fit_alone(keras.optimizers.SGD(0.2, 0.9)), 1e-3)


def check_options_of_the_optimizer_act_on_combined_gradients():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 4, 0.5)
    for options in (
        {"global_clipnorm": 0.1},
        {
            "clipvalue": 0.001,
            "weight_decay": 0.01,
            "use_ema": True,
            "ema_momentum": 0.5,
            "ema_overwrite_frequency": 3,
        },
        {"gradient_accumulation_steps": 2},
    ):
        alone, together = keras.optimizers.SGD(schedule, **options), keras.optimizers.SGD(schedule, **options)
        trained, wanted = fit_together(hvd.DistributedOptimizer(together)), fit_alone(alone)
        same(trained, wanted)
        assert int(trained.optimizer.iterations) == int(wanted.optimizer.iterations)


def check_compression():
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        wrapped = hvd.DistributedOptimizer(sgd(), compression=compression)
        same(fit_together(wrapped), sgd_alone(), rtol=0.1, atol=0.02)


def check_backward_passes_per_step():
    if keras.backend.backend() == "jax":
        with pytest.raises(ValueError, match="gradient_accumulation_steps=2"):
            hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2)
        return
    wrapped = hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2, average_aggregated_gradients=True)
    trained = fit_together(wrapped)
    same(trained, sgd_alone(gradient_accumulation_steps=2))
    assert int(trained.optimizer.iterations) == 12
    summed = fit_together(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, 0.9), backward_passes_per_step=2))
    same(summed, sgd_alone(gradient_accumulation_steps=2), 1e-3)


def check_a_variable_without_a_gradient_in_the_last_pass():
    """As where each pass trains another head: its gradient of an earlier pass counts."""
    if keras.backend.backend() == "jax":
        return
    always, first = keras.Variable([1.0]), keras.Variable([1.0])
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    gradient = keras.ops.convert_to_tensor([0.25])
    for gradients in ([gradient, gradient], [gradient, None]):
        wrapped.apply(gradients, [always, first])
    np.testing.assert_allclose(values([always, first]), [[0.5], [0.75]])


def check_the_wrapper_shares_the_state():
    plain = sgd()
    wrapped = hvd.DistributedOptimizer(plain, name="ours")
    trained = fit_together(wrapped)
    assert isinstance(wrapped, keras.optimizers.SGD)
    assert type(wrapped).__name__ == "SGD"
    assert wrapped.name == "ours"
    assert wrapped.variables[0] is plain.variables[0]
    assert len(wrapped.variables) == 2 + len(trained.trainable_variables)
    wrapped.learning_rate = 0.25
    assert float(plain.learning_rate) == 0.25
    identical(values(wrapped.variables))


def check_it_is_saved_as_the_optimizer_that_it_wraps(folder):
    trained = fit_together(hvd.DistributedOptimizer(sgd()))
    path = f"{folder}/{hvd.rank()}.keras"
    trained.save(path)
    loaded = keras.saving.load_model(path)
    assert type(loaded.optimizer) is type(sgd())
    assert keras.saving.serialize_keras_object(loaded.optimizer) == keras.saving.serialize_keras_object(
        trained.optimizer
    )
    for one, other in zip(values(loaded.optimizer.variables), values(trained.optimizer.variables), strict=True):
        np.testing.assert_array_equal(one, other)


def check_a_deep_copy_is_distributed_too():
    plain = keras.optimizers.SGD(1.0)
    wrapped = hvd.DistributedOptimizer(plain, name="ours", op=hvd.Sum)
    local = keras.Variable([0.0])
    wrapped.register_local_var(local)
    copied = copy.deepcopy(wrapped)
    assert type(copied) is not type(plain)
    assert copied.name == "ours"
    shared = keras.Variable([0.0])
    copied.apply([keras.ops.convert_to_tensor([1.0 + hvd.rank()])] * 2, [shared, local])
    np.testing.assert_allclose(values([shared, local]), [[-3.0], [-(1.0 + hvd.rank()) / 2]])
    assert int(copied.iterations) == 1
    assert int(wrapped.iterations) == 0


def check_a_deep_copy_adds_up_passes_of_its_own():
    if keras.backend.backend() == "jax":
        return
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    gradient, first, second = keras.ops.convert_to_tensor([1.0]), keras.Variable([0.0]), keras.Variable([0.0])
    wrapped.apply([gradient], [first])
    copied = copy.deepcopy(wrapped)
    copied.apply([gradient], [second])
    wrapped.apply([gradient], [first])
    np.testing.assert_allclose(values([first, second]), [[-2.0], [0.0]])


def check_a_deep_copy_of_a_model_trains_like_the_original():
    """With the gradients of all ranks, the state of the optimizer, and variables that are local."""
    for scale in (lambda optimizer: optimizer, keras.optimizers.LossScaleOptimizer):
        original, wrapped = model(), hvd.DistributedOptimizer(sgd())
        wrapped.register_local_var(original.layers[-1].bias)
        original.compile(scale(wrapped), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = examples([hvd.rank()])
        original.fit(x, y, verbose=0)
        with TestCase().assertNoLogs("hvd_cluster.keras.optimizer"):
            copied = copy.deepcopy(original)
        for each in (original, copied):
            each.fit(x, y, shuffle=False, verbose=0)
        found = [values(each.variables) for each in (original, copied)]
        for one, other in zip(*found, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
        *shared, bias = values(copied.trainable_variables)
        identical(shared)
        assert len({str(each) for each in allgather_object(bias)}) == 2


def check_copies_by_pickle_warn_that_they_are_not_distributed():
    wrapped, inside = hvd.DistributedOptimizer(sgd()), hvd.DistributedOptimizer(sgd())
    compiled = model()
    compiled.compile(hvd.DistributedOptimizer(sgd()), loss="mse")
    compiled.optimizer.build(compiled.trainable_variables)
    for original in (wrapped, compiled, keras.optimizers.LossScaleOptimizer(inside)):
        with TestCase().assertLogs("hvd_cluster.keras.optimizer") as caught:
            copied = pickle.loads(pickle.dumps(original))
        assert len(caught.output) == 1
        assert "without its distribution" in caught.output[0]
        optimizer = getattr(copied, "optimizer", copied)
        assert type(getattr(optimizer, "inner_optimizer", optimizer)) is type(sgd())


def check_a_gradient_that_one_rank_does_not_have():
    variables = [keras.Variable(np.ones(2, "f")), keras.Variable(np.ones((200, 200), "f"))]
    gradients = [keras.ops.ones(2), keras.ops.ones((200, 200)) if hvd.rank() == 0 else None]
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    wrapped.apply(gradients, variables)
    for found, wanted in zip(values(variables), (np.zeros(2), np.full((200, 200), 0.5)), strict=True):
        np.testing.assert_allclose(found, wanted)


def check_ranks_may_have_built_different_numbers_of_models():
    """Keras numbers all layers, and variables without a name, that a process has made."""
    others = [model() for _ in range(hvd.rank())]
    variables = [*model().trainable_variables, keras.Variable(np.zeros(2, "f"))]
    assert len(others) == hvd.rank()
    names = allgather_object([target.name for target in targets_of(variables)])
    assert names[0] == names[1]
    assert len(set(names[0])) == len(variables)


def check_process_sets():
    """Each rank trains alone."""
    alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    wanted = fit_together(sgd())
    for members in alone:
        trained = fit_together(hvd.DistributedOptimizer(sgd(), process_set=members))
        for one, other in zip(trained.get_weights(), wanted.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    for members in alone:
        hvd.remove_process_set(members)


def check_bfloat16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("bfloat16")
    try:
        trained = model(seed=hvd.rank())
        hvd.broadcast_global_variables(0, trained)
        start = values(trained.trainable_variables)
        wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        gradients = [keras.ops.ones(each.shape, "bfloat16") * (hvd.rank() + 0.5) for each in start]
        wrapped.apply(gradients, trained.trainable_variables)
    finally:
        keras.config.set_dtype_policy(before)
    for one, other in zip(start, values(trained.trainable_variables), strict=True):
        assert keras.backend.standardize_dtype(one.dtype) in ("bfloat16", "float32")  # NumPy cannot hold torch's
        np.testing.assert_allclose(one.astype("f") - other.astype("f"), np.ones(one.shape), atol=1e-2)
    identical([each.astype("f") for each in values(trained.trainable_variables)])


def check_uneven_shards():
    """Rank 1 has half a batch less in its last step; ``steps_per_epoch`` makes the numbers of steps equal."""
    optimizer = hvd.DistributedOptimizer(sgd())
    trained = model()
    trained.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    images, labels = examples([hvd.rank()])
    rows = len(images) - ROWS // 2 * hvd.rank()
    trained.fit(images[:rows], labels[:rows], batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 2 * STEPS
    identical(trained.get_weights())
    longer = rows + 3 * ROWS * hvd.rank()
    more = [np.concatenate([each, each])[:longer] for each in (images, labels)]
    trained.fit(*more, batch_size=ROWS, steps_per_epoch=STEPS, shuffle=False, verbose=0)
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 3 * STEPS
    identical(trained.get_weights())


def check_local_layers():
    trained = model()
    first = trained.layers[0]
    wrapped = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=[first])
    before = values(trained.trainable_variables)
    gradients = [keras.ops.ones(variable.shape) * (1 + hvd.rank()) for variable in before]
    wrapped.apply(gradients, trained.trainable_variables)
    for number, (start, end) in enumerate(zip(before, values(trained.trainable_variables), strict=True)):
        np.testing.assert_allclose(start - end, (1 + hvd.rank()) / 2 if number < 2 else 1.5, rtol=1e-5)


def check_local_gradients_follow_the_number_of_ranks_in_compiled_functions():
    if keras.backend.backend() != "jax":
        return  # which alone computes with the number of the moment of compilation, unless it asks
    import jax

    class Members:
        size = staticmethod(lambda: 2)

    members = Members()
    share = jax.jit(lambda gradient: backend().lists("", "").share(gradient, members))
    assert float(share(8.0 * keras.ops.ones(()))) == 4.0
    members.size = lambda: 4
    assert float(share(8.0 * keras.ops.ones(()))) == 2.0


def check_embeddings():
    def build():
        keras.utils.set_random_seed(2)
        return keras.Sequential(
            [keras.Input((6,)), keras.layers.Embedding(50, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
        )

    def train(optimizer, ranks):
        trained = build()
        trained.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        images, labels = examples(ranks)
        words = np.abs(images * 10).astype("int32") % 50
        trained.fit(words, labels, batch_size=4 * len(ranks), shuffle=False, verbose=0)
        return trained

    for dense in (False, True):
        wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), sparse_as_dense=dense)
        same(train(wrapped, [hvd.rank()]), train(keras.optimizers.SGD(0.1), range(hvd.size())))


def check_wrong_arguments():
    wrapped = hvd.DistributedOptimizer(sgd())
    cases = [
        ((7,), {}, "cannot wrap"),
        ((wrapped,), {}, "not wrapped yet"),
        ((keras.optimizers.LossScaleOptimizer(wrapped),), {}, "distributed already"),
        ((sgd(),), {"op": hvd.Adasum}, "op Adasum is not available.*use Average or Sum"),
        ((sgd(),), {"groups": [["kernel"]]}, "lists of variables, not of str"),
        ((sgd(),), {"backward_passes_per_step": 0}, "at least 1"),
        ((sgd(),), {"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=Average, not Sum"),
        ((sgd(),), {"compression": 7}, "compression=7"),
        ((sgd(),), {"sharded": "host"}, "sharded='host' is not there for optimizers of Keras"),
    ]
    for args, options, text in cases:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(*args, **options)
    marked = keras.Sequential([keras.layers.Dense(2)])
    marked.built = True  # as Keras does it for a subclass without a build() of its own
    for layer in (keras.layers.Dense(2), marked):
        with pytest.raises(ValueError, match="has no variables yet"):
            hvd.PartialDistributedOptimizer(sgd(), local_layers=layer)


@each_check(globals(), check_it_is_saved_as_the_optimizer_that_it_wraps)
def test_optimizer(ranks, check):
    ranks.run(check)


def test_saving(ranks, tmp_path):
    ranks.run(check_it_is_saved_as_the_optimizer_that_it_wraps, str(tmp_path))
