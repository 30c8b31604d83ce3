"""The training of a KerasEstimator on two ranks, without Spark; the first tests on each backend of Keras."""

from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest

from hvd_cluster.spark.estimators.columns import FitColumns
from hvd_cluster.spark.estimators.run import RunFolder
from hvd_cluster.spark.estimators.store import Store

if find_spec("keras") is None:
    pytest.skip("Keras is not installed", allow_module_level=True)

from keras_fits import (
    BACKENDS,
    NOT_ON_JAX,
    ON_TORCH,
    ArrayShard,
    elastic_line,
    failing,
    line,
    linear,
    losses,
    outcome_of,
    weight_of,
)
from keras_fits import ranks as ranks  # a fixture


def test_uneven_and_empty_shards(ranks):
    outcome = outcome_of(ranks, [line(0, validation=line(0)), line(23, validation=line(5))], epochs=4, seed=1)
    first = outcome["history"][0]
    assert (first["rows"], first["epoch"], set(first)) == (23, 0, {"epoch", "train", "validation", "rows", "seconds"})
    assert losses(outcome)[-1] < losses(outcome)[0] / 100
    assert losses(outcome, "validation")[-1] < losses(outcome, "validation")[0] / 100
    assert weight_of(outcome) == pytest.approx(2, abs=1e-2)
    assert outcome["optimizer"][1] == pytest.approx(0.1)


def test_a_step_uses_the_batches_of_all_ranks(ranks):
    """With the learning rate times their number. The epoch of the second rank is shorter by one step, of two rows."""
    outcome = outcome_of(ranks, [line(6), line(4)], compiling={"loss": "mse", "metrics": ["mae"]})
    weight, sums = 0.5, [0.0, 0.0]
    for rows, part in ((slice(0, 4), 2), (slice(4, 6), 1)):
        x = (np.arange(6) / 10)[rows]
        sums[0] += ((weight - 2) ** 2 * x**2).sum() * part
        sums[1] += np.abs((weight - 2) * x).sum() * part
        weight -= 0.2 * part / 2 * (2 * (weight - 2) * x**2).mean()
    assert weight_of(outcome) == pytest.approx(weight, abs=1e-5)
    train = outcome["history"][0]["train"]
    assert [train["loss"], train["all_metrics"]["mae"]] == pytest.approx([sums[0] / 10, sums[1] / 10], abs=1e-5)


@pytest.mark.parametrize(
    ("ranks", "rows"), [*((name, (9, 6)) for name in BACKENDS), ("torch", (23, 0))], indirect=["ranks"]
)
def test_the_same_on_ranks_that_may_come_and_go(ranks, rows):
    """Each step is a commit; momentum, a schedule, metrics and validation are as in any other fit."""

    def optimizer():
        import keras

        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)
        return keras.optimizers.SGD(schedule, momentum=0.5)

    def callbacks():
        import keras

        return [keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=100)]

    options = {"optimizer": optimizer, "compiling": {"loss": "mse", "metrics": ["mae"]}, "epochs": 5}
    shards = [line(count, validation=line(5)) for count in rows]
    whole = outcome_of(ranks, shards, callbacks=callbacks, **options)
    shards = [elastic_line(count, number, validation=line(5)) for number, count in enumerate(rows)]
    elastic = outcome_of(ranks, shards, callbacks=callbacks, **options)
    assert len(whole["history"]) == 2
    assert elastic["best_epoch"] == whole["best_epoch"]
    for one, other in zip(elastic["history"], whole["history"], strict=True):
        for part in ("train", "validation"):
            assert one[part]["loss"] == pytest.approx(other[part]["loss"], rel=1e-5)
            assert one[part]["all_metrics"] == pytest.approx(other[part]["all_metrics"], rel=1e-5)
        assert one["rows"] == other["rows"] == sum(rows)
    assert weight_of(elastic) == pytest.approx(weight_of(whole), rel=1e-5)


def normalized():
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((1,)), *layers])


def test_a_change_of_ranks_leaves_no_trace(ranks):
    """In an epoch, and at its last commit. Callbacks hear of each epoch once, and of the steps of a whole epoch."""

    def callbacks(*changes):
        import keras

        import hvd_cluster.keras as hvd

        class Change(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                assert self.params["steps"] == 6

            def on_epoch_begin(self, epoch, logs=None):
                self.epoch = epoch

            def on_train_batch_end(self, batch, logs=None):
                from hvd_cluster.elastic.steps import watchers

                if (self.epoch, batch) in changes:
                    alive = [kept for reference in watchers._snapshots if (kept := reference()) is not None]
                    alive[-1]._parts.__self__.on_hosts_updated(1, 2)

        halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
        return [hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1), halve, Change()]

    shards = [elastic_line(23, 0, validation=line(5)), elastic_line(0, 1, validation=line(5))]
    options = {"make": normalized, "epochs": 3}
    whole = outcome_of(ranks, shards, callbacks=callbacks, **options)
    shards = [elastic_line(23, 0, validation=line(5)), elastic_line(0, 1, validation=line(5))]
    changed = outcome_of(ranks, shards, callbacks=partial(callbacks, (0, 2), (0, 5), (1, 5), (2, 0)), **options)
    assert losses(changed) == pytest.approx(losses(whole), rel=1e-5)
    assert losses(changed, "validation") == pytest.approx(losses(whole, "validation"), rel=1e-5)
    for one, other in zip(changed["model"], whole["model"], strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_the_learning_rate_follows_the_number_of_ranks(ranks):
    """Also in steps that are compiled already, and where a schedule makes it."""

    def steps(schedule):
        import keras

        from hvd_cluster.spark.keras.learning_rate import StepRate

        model = linear(0.0)
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10**6, 0.9) if schedule else 0.1
        model.compile(keras.optimizers.SGD(rate), "mse")
        step_rate, found = StepRate(model, 4), []
        for factor in (4, 1, 2):
            step_rate.restart(factor)
            step_rate.apply()
            model.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0)
            step_rate.remove()
            found.append(model.get_weights()[0].item())
            model.set_weights([np.zeros((1, 1))])
        return found

    for schedule in (False, True):
        for found in ranks.run(steps, schedule):
            assert found == pytest.approx([0.8, 0.2, 0.4], rel=1e-4)


@ON_TORCH
def test_an_elastic_fit_that_has_nothing_left_to_do(ranks, tmp_path):
    run = RunFolder(Store.create(tmp_path), "run")
    shards = [elastic_line(8, 0), elastic_line(8, 1)]
    with pytest.raises(RuntimeError, match="lost"):
        outcome_of(ranks, shards, epochs=4, run=run, callbacks=failing)
    outcome = outcome_of(ranks, [elastic_line(8, 0), elastic_line(8, 1)], epochs=2, run=run)
    assert [record["epoch"] for record in outcome["history"]] == [0, 1]


@NOT_ON_JAX
def test_gradients_of_several_batches(ranks):
    """Three batches with two passes a step: the third one counts half as much as a step has."""

    def compressing():
        import hvd_cluster.keras as hvd

        return hvd.Compression.none

    outcome = outcome_of(ranks, [line(12), line(12)], passes=2, compression=compressing)
    weight, x = 0.5, np.arange(12).reshape(3, 4) / 10
    for group in (x[:2], x[2:]):
        weight -= 0.2 * sum((2 * (weight - 2) * rows**2).mean() for rows in group) / 2
    assert weight_of(outcome) == pytest.approx(weight, abs=1e-5)


@ON_TORCH
def test_batches_that_count_nothing_leave_no_trace(ranks):
    """In the running averages of batch norm, or in those of the history."""

    def make():
        import keras

        return keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.5)])

    outcome = outcome_of(ranks, [line(4, first=1000), line(16)], make, rate=0.0)
    mean = 0.0
    for first in range(0, 16, 4):
        mean = 0.5 * mean + 0.5 * np.arange(first, first + 4).mean() / 10
    assert outcome["model"][2].item() == pytest.approx(mean, abs=1e-5)


@ON_TORCH
def test_a_loss_that_is_no_number(ranks):
    rows = np.arange(12, dtype="float32").reshape(-1, 1)
    shard = ArrayShard([np.where(rows == 6, np.nan, rows)], [rows])
    with pytest.raises(FloatingPointError, match="the loss is nan in step 2 of epoch 1 on rank 0; look for rows"):
        outcome_of(ranks, [shard, shard], terminate_on_nan=True)


@ON_TORCH
def test_a_metric_that_is_a_vector(ranks):
    def make():
        import keras

        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, "sigmoid")])

    def compiling():
        import keras

        return {"loss": "binary_crossentropy", "metrics": [keras.metrics.F1Score(average=None, name="f1")]}

    shard = ArrayShard([np.ones((8, 1))], [np.ones((8, 2))])
    with pytest.raises(ValueError, match=r"the metric 'f1' has values of the shape \[2\], but .*average='macro'"):
        outcome_of(ranks, [shard, shard], make, compiling=compiling)


@ON_TORCH
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_first_batch_that_is_wrong_on_one_rank_is_an_error_on_all(ranks, wrong):
    """Rank 0 has the most batches, so its first one is for all ranks."""
    shards = [line(8), line(4)]
    shards[wrong] = ArrayShard([np.ones((8, 3))], [np.ones((8, 1))])

    def on_rank(shards):
        import keras

        from hvd_cluster.core import basics
        from hvd_cluster.spark.estimators.run import RunFolder
        from hvd_cluster.spark.keras.layout import KerasLayout
        from hvd_cluster.spark.keras.training import KerasFit, KerasTraining

        layout = KerasLayout.of(linear(), FitColumns(["x"], ["y"]))
        fit = KerasFit(linear(), keras.optimizers.SGD(0.1), layout, RunFolder(None, "none"))
        with pytest.raises(ValueError, match=r"has the shape \[1\] in a row, but a row has 3 elements") as caught:
            KerasTraining(fit, shards[basics.rank()]).run()
        return str(caught.value)

    texts = ranks.run(on_rank, shards)
    start = f"rank {wrong} has no first batch: ValueError: "
    assert [text.startswith(start) for text in texts] == [rank != wrong for rank in (0, 1)]


@ON_TORCH
def test_the_dtype_of_floats_is_that_of_the_driver(ranks):
    """In the batches, in the loss and in a model that makes its layers itself."""

    def on_rank(shards):
        import keras

        from hvd_cluster.core import basics
        from hvd_cluster.spark.estimators.run import RunFolder
        from hvd_cluster.spark.keras.devices import floats_of
        from hvd_cluster.spark.keras.layout import KerasLayout
        from hvd_cluster.spark.keras.payload import packed
        from hvd_cluster.spark.keras.training import KerasFit, train

        class Own(keras.Model):
            def __init__(self, **options):
                super().__init__(**options)
                self.layer = keras.layers.Dense(1, use_bias=False)

            def call(self, inputs):
                return self.layer(inputs)

        def loss(label, output):
            assert keras.ops.dtype(output) == keras.ops.dtype(label) == "float64"
            return keras.losses.mean_squared_error(label, output)

        with floats_of(("float64", "float64")):
            layout = KerasLayout.of(model := Own(), FitColumns(["x"], ["y"]))
            run = RunFolder(None, "none")
            data = packed(KerasFit(model, keras.optimizers.SGD(0.1), layout, run, {"loss": loss}, verbose=0))
        outcome = train(shards[basics.rank()], keras.backend.backend(), ("float64", "float64"), None, True, data)
        assert (keras.config.floatx(), keras.config.dtype_policy().name) == ("float32", "float32")
        return outcome

    outcome, _ = ranks.run(on_rank, [line(8), line(4)])
    assert [outcome["model"][0].dtype, outcome["inputs"].dtype] == ["float64", "float64"]


@ON_TORCH
def test_no_rows(ranks):
    with pytest.raises(ValueError, match="there are no rows to train with"):
        outcome_of(ranks, [line(0), line(0)])


@NOT_ON_JAX
def test_several_inputs_and_outputs_by_name(ranks):
    """Weights of rows, loss weights, a transformation; a model whose variables Keras makes late."""

    def make():
        import keras

        first, second = keras.Input((2,), name="b"), keras.Input((), name="a", dtype="int32")
        pair = keras.layers.Dense(1, name="y")(first)
        kind = keras.layers.Dense(2, activation="softmax", name="z")(keras.layers.Embedding(3, 4)(second))
        return keras.Model({"b": first, "a": second}, {"y": pair, "z": kind})

    numbers = np.random.default_rng(0)
    a, b = numbers.integers(0, 3, (32, 1)), numbers.normal(size=(32, 2))
    sides = [a, b], [a % 2, b.sum(1, keepdims=True)]
    shards = [ArrayShard(*[[each[rows] for each in side] for side in sides], 8, weights=np.ones(len(a[rows])) * 2)
              for rows in (slice(0, 20), slice(20, 32))]  # fmt: skip
    compiling = {
        "loss": {"y": "mse", "z": "sparse_categorical_crossentropy"},
        "loss_weights": {"y": 0.25, "z": 0.75},
        "metrics": {"z": ["accuracy"]},
    }
    outcome = outcome_of(
        ranks,
        shards,
        make,
        FitColumns(["a", "b"], ["z", "y"], "w"),
        epochs=12,
        compiling=compiling,
        rate=0.2,
        layout={"transformation": lambda batch: batch | {"y": batch["y"] + 1}},
    )
    last = outcome["history"][-1]["train"]
    assert last["loss"] < losses(outcome)[0] / 3
    assert last["all_metrics"]["z_accuracy"] == 1
    parts = last["all_metrics"]
    assert last["loss"] == pytest.approx(0.25 * parts["y_loss"] + 0.75 * parts["z_loss"], rel=0.05)


def test_scores_of_rows(ranks):
    """Of any number, on each backend."""

    def on_rank():
        import keras

        from hvd_cluster.spark.keras import KerasModel
        from hvd_cluster.spark.keras.model import load_predict

        model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)])
        predict = load_predict(KerasModel(model=model, feature_columns=["x"], label_columns=["y"])._payload(), None)
        x = np.arange(100.0).reshape(50, 2)
        found = [predict([x[:rows]])[0] for rows in (1, 32, 33, 50)]
        expected = model.predict_on_batch(x)
        return [each.shape for each in found], [np.abs(each - expected[: len(each)]).max() for each in found]

    for shapes, errors in ranks.run(on_rank):
        assert shapes == [(1, 3), (32, 3), (33, 3), (50, 3)]
        assert max(errors) < 1e-4


@ON_TORCH
def test_a_model_without_an_input(ranks):
    def make():
        import keras

        return keras.Sequential([keras.layers.Dense(1, use_bias=False)])

    def scheduled():
        import keras

        return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1000, 0.9))

    outcome = outcome_of(ranks, [line(8), line(20)], make, optimizer=scheduled, epochs=10, seed=4)
    assert weight_of(outcome) == pytest.approx(2, abs=0.02)
    assert outcome["inputs"].shape == (1, 1)


@ON_TORCH
def test_keras_that_runs_on_another_backend_than_in_the_driver(ranks):
    def on_rank():
        from hvd_cluster.spark.keras.training import train

        return train(None, "tensorflow", ("float32", "float32"), None, True, b"")

    with pytest.raises(RuntimeError, match=r"'torch' in this worker, but on 'tensorflow' in the driver.*executorEnv"):
        ranks.run(on_rank)


def texts():
    """A number for each word, and y for the sum of the words."""
    import keras

    inputs = keras.Input((1,), dtype="string")
    words = keras.layers.TextVectorization(vocabulary=["one", "two", "drei"], output_sequence_length=2)(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.CategoryEncoding(6, output_mode="count")(words)))


@pytest.mark.parametrize("ranks", ["tensorflow"], indirect=True)
def test_strings_for_a_layer_of_the_model(ranks):
    words = np.array([["one two"], ["drei"], ["two"], ["übrig"], ["one"]], object)
    labels = np.array([[3.0], [3.0], [2.0], [0.0], [1.0]], "float32")
    shards = [ArrayShard([words], [labels]), ArrayShard([words[:1]], [labels[:1]])]
    outcome = outcome_of(ranks, shards, texts, epochs=3, columns=FitColumns(["words"], ["y"]))
    assert losses(outcome)[2] < losses(outcome)[0]


@ON_TORCH
def test_strings_that_stay_strings(ranks):
    def check():
        from hvd_cluster.spark.keras.layout import as_tensor

        with pytest.raises(ValueError, match=r"such as 'one', of which torch has no tensors; let transformation_fn"):
            as_tensor(np.array([["one"], ["two"]], object))

    ranks.run(check)
