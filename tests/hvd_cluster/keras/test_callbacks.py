"""Callbacks, values, evaluation and saved models, on two ranks and every backend."""

import tempfile
from unittest.mock import patch

import keras
import numpy as np
import pytest

import hvd_cluster.keras as hvd
from collectives.api import MismatchError
from hvd_cluster.keras import learning_rate
from hvd_cluster.keras.evaluation import _rows
from hvd_cluster.keras.learning_rate import _scale_momentums
from hvd_cluster.keras.optimizer.distributed import Distributed
from hvd_cluster.keras.variables import copied
from tests.checks import each_check

WARM_RATE, STEPS = 0.6, 4


def model_of(seed=0, momentum=0.0, metrics=(), rate=0.1):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=momentum))
    model.compile(optimizer, loss="mse", metrics=list(metrics))
    return model


def rows(count, seed=1):
    random = np.random.RandomState(seed)
    x = random.randn(count, 3).astype("float32")
    return x, (x.sum(axis=1, keepdims=True) > 0).astype("float32")


def values(variables):
    return [copied(variable) for variable in variables]


def fit(model, callbacks, epochs=1, x_y=None):
    x, y = x_y or rows(8 * STEPS, seed=hvd.rank())
    return model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)


class Notes(keras.callbacks.Callback):
    """The learning rate of each step."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_end(self, batch, logs=None):
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        self.rates.append(float(copied(self.model.optimizer.learning_rate)))


def check_values():
    size, rank = hvd.size(), hvd.rank()
    assert hvd.allreduce(float(rank), op=hvd.Sum) == sum(range(size))
    assert hvd.allreduce([rank, 2.0]).tolist() == [(size - 1) / 2, 2.0]
    compressed = hvd.allreduce(np.ones((2, 3), np.float32), compression=hvd.Compression.fp16)
    assert (compressed.shape, compressed.dtype, compressed.tolist()) == ((2, 3), np.float32, [[1.0] * 3] * 2)
    assert hvd.allgather(np.full((rank, 2), rank)).tolist() == [[r, r] for r in range(size) for _ in range(r)]
    assert hvd.broadcast(rank + 5, root_rank=1) == 6
    tensor = keras.ops.convert_to_tensor([[float(rank)]] * size)
    assert hvd.reducescatter(tensor, op=hvd.Sum).tolist() == [[sum(range(size))]]


def traced(function, *arguments):
    """The results of ``function``, which the backend traces."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function)(*arguments)
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)(*arguments)
    return function(*arguments)


def check_values_in_a_function_that_is_traced():
    """Nodes of a graph on TensorFlow, and an error that says what to do on JAX. Torch has values at any time."""
    size, rank = hvd.size(), hvd.rank()
    tensor = keras.ops.convert_to_tensor(np.full((size, 2), rank + 1.0, "float32"))
    variable = keras.Variable(np.full((3,), rank + 1.0, "float32"))
    total = sum(range(1, size + 1))
    calls = [
        (lambda x: hvd.allreduce(x, op=hvd.Sum, name="sum"), np.full((size, 2), total)),
        (lambda x: hvd.allreduce(x, name="mean", compression=hvd.Compression.bf16), np.full((size, 2), total / size)),
        (lambda x: hvd.allreduce(x, average=False, name="half", prescale_factor=0.5), np.full((size, 2), total / 2)),
        (lambda x: hvd.allgather(x, name="rows"), np.repeat(np.arange(1, size + 1), 2 * size).reshape(-1, 2)),
        (lambda x: hvd.broadcast(x, 1, name="sent"), np.full((size, 2), 2)),
        (lambda x: hvd.reducescatter(x, op=hvd.Sum, name="part"), np.full((1, 2), total)),
        (lambda x: hvd.allreduce([x, x], op=hvd.Sum, name="list"), np.full((2, size, 2), total)),
    ]
    for call, wanted in calls:
        if keras.backend.backend() == "jax":
            with pytest.raises(NotImplementedError, match=r"JAX traces this function.*\.MetricAverageCallback"):
                traced(call, tensor)
        else:
            result = traced(call, tensor)
            np.testing.assert_allclose(np.asarray(result, "float32"), wanted)
    if keras.backend.backend() == "tensorflow":
        for call in (lambda: hvd.allreduce(variable, op=hvd.Sum, name="variable"), lambda: hvd.allgather([rank + 1])):
            assert float(sum(traced(call))) == total * (3 if len(traced(call)) == 3 else 1)
            assert keras.ops.is_tensor(traced(call))


class CombinesInItsStep(keras.Sequential):
    """Its metric is that of all ranks, from a collective in ``train_step``."""

    def train_step(self, *arguments):
        if keras.backend.backend() == "jax":
            logs, state = super().train_step(*arguments)
            return {"total": hvd.allreduce(logs["loss"], op=hvd.Sum, name="total")}, state
        logs = super().train_step(*arguments)
        return {"total": hvd.allreduce(logs["loss"], op=hvd.Sum, name="total"), "own": logs["loss"]}


def check_a_collective_in_a_train_step():
    x, y = rows(8, seed=hvd.rank())
    model = CombinesInItsStep([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    if keras.backend.backend() == "jax":
        with pytest.raises(NotImplementedError, match="JAX traces this function, such as a train_step"):
            model.fit(x, y, verbose=0)
        return
    logs = model.fit(x, y, batch_size=8, epochs=3, verbose=0).history
    np.testing.assert_allclose(logs["total"], np.sum(hvd.allgather(np.array([logs["own"]])), axis=0), rtol=1e-5)


class Subclassed(keras.Model):
    """Without a ``build()`` of its own: Keras marks it as built when somebody calls that, and its layers are not."""

    def __init__(self, unused=False):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)
        if unused:
            self.never_called = keras.layers.Dense(1)

    def call(self, inputs):
        return self.out(self.hidden(inputs))


def subclassed(kind, seed):
    """Built not at all, by name only, in part, or by a call that does not reach all of its layers."""
    keras.utils.set_random_seed(seed)
    model = Subclassed(unused=kind == "unused")
    if kind in ("marked", "part"):
        with pytest.warns(UserWarning, match="unbuilt state") if kind == "marked" else pytest.warns():
            if kind == "part":
                model.hidden.build((None, 3))
            model.build((None, 3))
    elif kind in ("called", "unused"):
        model(np.zeros((1, 3), "float32"))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
    return model


def check_models_that_are_built_later_are_broadcast_then():
    for kind in ("not", "marked", "part", "called", "unused"):
        model = subclassed(kind, seed=hvd.rank())
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        fit(model, [callback], epochs=2)
        assert callback.broadcast_done
        fit(model, [callback])
        for weights in (model.get_weights(), values(model.optimizer.variables)):
            flat = np.concatenate([each.reshape(-1).astype("float32") for each in weights])
            every = hvd.allgather(flat[None], name="weights")
            np.testing.assert_array_equal(every[0], every[-1])


def check_a_model_that_only_one_rank_has_built():
    """As one that rank 0 has loaded: it waits with the others until theirs is built, too."""
    model = subclassed("called" if hvd.rank() == 0 else "marked", seed=hvd.rank())
    fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    every = hvd.allgather(model.get_weights()[0][None], name="weights")
    np.testing.assert_array_equal(every[0], every[-1])


def check_a_broadcast_of_a_model_without_its_variables_is_refused():
    """It would do nothing, or leave a part out."""
    for kind in ("not", "marked", "part"):
        with pytest.raises(ValueError, match=r"has no variables yet, or not all, because .* call it on a batch first"):
            hvd.broadcast_global_variables(0, subclassed(kind, seed=0))
    for kind in ("called", "unused"):
        hvd.broadcast_global_variables(0, subclassed(kind, seed=0))


def check_broadcast_of_a_model_but_for_local_variables():
    model = model_of(seed=hvd.rank())
    bias = model.layers[-1].bias
    bias.assign([float(hvd.rank())])
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=[bias])
    seen = []
    notes = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: seen.extend(values(model.trainable_variables)))
    fit(model, [callback, notes])
    assert float(seen[-1][0]) == hvd.rank()
    expected = values(model_of(seed=1).trainable_variables)
    assert all(np.array_equal(a, b) for a, b in zip(seen[:-1], expected[:-1], strict=True))
    with pytest.raises(ValueError, match=r"is not a keras\.Variable"):
        callback.register_local_var(3)


def check_broadcast_global_variables():
    models = []
    for seed in (hvd.rank(), hvd.size() - 1):
        keras.utils.set_random_seed(seed)
        layers = [keras.layers.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1, dtype="bfloat16")]
        models.append(keras.Sequential(layers))
    hvd.broadcast_global_variables(hvd.size() - 1, models[0])
    seeds = [[each for each in model.variables if each.name == "seed_generator_state"] for model in models]
    own, wanted = (values(model.weights) for model in models)
    assert len(own) == 2
    [[seed], [other]] = map(values, seeds)
    assert np.array_equal(seed, other) is (hvd.rank() == hvd.size() - 1)  # ranks drop other units
    assert [each.tolist() for each in own] == [each.tolist() for each in wanted]
    with pytest.raises(ValueError, match="give the model"):
        hvd.broadcast_global_variables(0)


def check_average_of_metrics():
    logs = {"loss": float(hvd.rank()), "acc": 1.0, "name": "x"}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": (hvd.size() - 1) / 2, "acc": 1.0, "name": "x"}


def check_averages_of_different_metrics_are_refused():
    """Not averaged because there are as many of them."""
    logs = {"loss": 1.0, "val_loss" if hvd.rank() == 0 else "acc": 1.0}
    with pytest.raises(ValueError, match=r"\['loss', 'val_loss'\] on rank 0, but \['acc', 'loss'\] on rank 1"):
        hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)


def check_staircase_schedule():
    model, notes = model_of(), Notes()
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.2, 0.5, start_epoch=1, end_epoch=3)
    history = fit(model, [schedule, notes], epochs=4)
    np.testing.assert_allclose(notes.rates[::STEPS], [0.1, 0.2, 0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(history.history["lr"], [0.1, 0.2, 0.1, 0.1], rtol=1e-6)
    with pytest.raises(ValueError, match="initial_lr is None"):
        hvd.callbacks.LearningRateScheduleCallback(None, 0.5)


def check_warmup():
    model, notes = model_of(), Notes()
    fit(model, [hvd.callbacks.LearningRateWarmupCallback(WARM_RATE, warmup_epochs=2), notes], epochs=3)
    size, steps = hvd.size(), np.arange(1, 2 * STEPS + 1)
    expected = WARM_RATE / size * (1 + (size - 1) * steps / (2 * STEPS))
    np.testing.assert_allclose(notes.rates, [*expected, *[WARM_RATE] * STEPS], rtol=1e-6)


def check_momentum_correction():
    """A change of the rate from 0.1 to 0.02 in the second epoch scales the momentum once."""
    x, y = rows(16, seed=4)
    model = model_of(momentum=0.9)
    model.optimizer.build(model.trainable_variables)
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1.0 if epoch < 1 else 0.2)
    before = []
    notes = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: before.extend(values(model.optimizer.momentums)),
        on_train_batch_begin=lambda batch, logs: before.extend(values(model.optimizer.momentums)),
    )
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[schedule, notes])
    count = len(model.optimizer.momentums)
    ended, begun = before[count : 2 * count], before[2 * count : 3 * count]
    for old, new in zip(ended, begun, strict=True):
        np.testing.assert_allclose(new, old * 0.2, rtol=1e-6)
    assert any(old.any() for old in ended)


def check_momentum_correction_is_for_sums_of_steps():
    variable = keras.Variable(np.ones(2, "f"))
    optimizers = [
        (keras.optimizers.SGD(0.1, momentum=0.9), True),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop(0.1, momentum=0.9)), True),
        (keras.optimizers.Nadam(0.1), False),
    ]
    if hasattr(keras.optimizers, "Muon"):
        optimizers.append((keras.optimizers.Muon(0.1), False))
    for optimizer, is_scaled in optimizers:
        optimizer.build([variable])
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        kept = getattr(inner, "momentums", None) or inner._momentums
        for each in kept:
            each.assign([1.0, 2.0])
        _scale_momentums(optimizer, 0.5)
        assert [copied(each).tolist() for each in kept] == [[0.5, 1.0] if is_scaled else [1.0, 2.0]]


def check_a_rate_that_stays_is_left_alone():
    """Keras keeps 0.1 as a float32, which is another number."""
    model = model_of(momentum=0.9)
    with patch.object(learning_rate, "_scale_momentums", side_effect=AssertionError):
        fit(model, [hvd.callbacks.LearningRateScheduleCallback(0.1, 1.0)])


def check_evaluation_of_uneven_parts():
    """Also an AUC, which no average of the ranks' results gives; a rank may have nothing."""
    model = model_of(metrics=[keras.metrics.AUC(name="auc"), "mae"])
    x, y = rows(30, seed=7)
    weights = np.linspace(0.5, 2, 30).astype("float32")
    expected = model.evaluate(x, y, sample_weight=weights, batch_size=4, verbose=0, return_dict=True)
    for bounds in ([0, 23, 30], [0, 30, 30]):
        part = slice(*bounds[hvd.rank() : hvd.rank() + 2])
        found = hvd.evaluate(model, x[part], y[part], sample_weight=weights[part], batch_size=4)
        assert sorted(found) == sorted(expected)
        np.testing.assert_allclose([found[name] for name in expected], list(expected.values()), rtol=1e-5)
    with pytest.raises(ValueError, match="no rank has data"):
        hvd.evaluate(model, x[:0], y[:0])


def check_evaluation_of_other_data():
    """Of a length that is not known, and a dict of arrays."""
    inputs = keras.Input((3,), name="x")
    model = keras.Model({"x": inputs}, keras.layers.Dense(1)(inputs))
    model.compile(loss="mse")
    x, y = rows(12, seed=9)
    expected = model.evaluate({"x": x}, y, verbose=0, return_dict=True)["loss"]
    part = slice(0, 12 if hvd.rank() == 0 else 0)
    assert hvd.evaluate(model, {"x": x[part]}, y[part])["loss"] == pytest.approx(expected, rel=1e-5)

    class Endless:
        def __len__(self):
            raise TypeError("infinite")

    assert [_rows(x), _rows({"x": [x[:2]]}), _rows([]), _rows(Endless()), _rows(iter(x))] == [12, 2, 0, None, None]


def check_evaluation_as_a_callback():
    model = model_of(metrics=["mae"])
    x, y = rows(12, seed=8)
    part = slice(hvd.rank() * 2, hvd.rank() * 2 + 2 if hvd.rank() + 1 < hvd.size() else None)
    history = fit(model, [hvd.callbacks.EvaluateCallback(x[part], y[part])], epochs=2)
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    for name, value in expected.items():
        np.testing.assert_allclose(history.history[f"val_{name}"][-1], value, rtol=1e-5)
    assert len(history.history["val_mae"]) == 2


def check_saved_models_are_wrapped_again(folder):
    model = model_of(momentum=0.9)
    fit(model, [])
    path = f"{folder}/{keras.backend.backend()}-{hvd.rank()}.keras"
    model.save(path)
    plain = keras.models.load_model(path)
    assert not isinstance(plain.optimizer, Distributed)
    loaded = hvd.load_model(path, compression=hvd.Compression.fp16)
    assert isinstance(loaded.optimizer, Distributed)
    for own, wanted in zip(values(loaded.optimizer.variables), values(model.optimizer.variables), strict=True):
        np.testing.assert_array_equal(own, wanted)
    fit(loaded, [])  # gradients of the ranks differ; their average does not
    digests = hvd.allgather(np.concatenate([each.reshape(1, -1) for each in values(loaded.trainable_variables)], 1))
    assert (digests == digests[0]).all()
    with pytest.raises(ValueError, match="no legacy optimizers"):
        hvd.load_model(path, legacy_opts=True)


def check_best_model(folder):
    path = f"{folder}/best-{keras.backend.backend()}-{hvd.rank()}.keras"
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ValueError, match="has no filepath"):
        fit(model_of(), [best])
    best.filepath = path
    model = model_of()
    fit(model, [best])
    for own, wanted in zip(values(keras.models.load_model(path).weights), values(model.weights), strict=True):
        np.testing.assert_array_equal(own, wanted)


def check_a_model_that_only_one_rank_loads():
    """Its variables have other paths: all ranks go on from it."""
    trained = model_of(seed=5 + hvd.rank(), momentum=0.5)
    if hvd.rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            trained.save(f"{folder}/model.keras")
            trained = hvd.load_model(f"{folder}/model.keras")
    start = trained.get_weights()
    for rate in (0.0, 0.1):
        trained.optimizer.learning_rate = rate
        fit(trained, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        weights = [hvd.broadcast(np.array(each), 0) for each in (trained.get_weights() if rate else start)]
        for own, roots in zip(trained.get_weights(), weights, strict=True):
            np.testing.assert_allclose(own, roots, rtol=1e-6)


def check_other_models():
    """In training and in a broadcast all ranks hear of the first difference."""
    for head in (4, None):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Input((3,)), keras.layers.Dense(4, name="body"), keras.layers.Dense(1, name="out")]
        if hvd.rank() == 0:
            layers.insert(2, keras.layers.Dense(head or 4, name="head", use_bias=head is None))
        trained = keras.Sequential(layers)
        trained.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        said = "head/kernel', float32 of shape .4, 4., is on rank 0 only, and not on rank 1"
        with pytest.raises(MismatchError, match=said):
            hvd.broadcast_global_variables(0, trained)
        with pytest.raises(Exception, match=said):  # its class is that of the backend
            str(fit(trained, []).history)  # JAX raises when the loss is read
        assert hvd.allreduce(1.0, op=hvd.Sum) == hvd.size()


@each_check(globals())
def test_on_two_ranks(ranks, check, tmp_path):
    ranks.run(check, *([str(tmp_path)] if check.__code__.co_argcount else []))
