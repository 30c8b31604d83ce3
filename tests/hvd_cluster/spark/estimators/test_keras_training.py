"""The training of a KerasEstimator on two ranks, without Spark; the first tests on each backend of Keras."""

import math
from importlib.util import find_spec

import cloudpickle
import keras_shards
import numpy as np
import pytest
from keras_shards import ArrayShard, line

from hvd_cluster.spark.estimators.checkpoints import RunFolder
from hvd_cluster.spark.estimators.columns import FitColumns
from hvd_cluster.spark.estimators.store import Store
from tests.pool import pools_of

if find_spec("keras") is None:
    pytest.skip("Keras is not installed", allow_module_level=True)

from tests.hvd_cluster.keras.pool import Pool

BACKENDS = [name for name in ("tensorflow", "torch", "jax") if find_spec(name)]


@pytest.fixture(autouse=True, scope="module")
def modules_by_value():
    cloudpickle.register_pickle_by_value(keras_shards)
    yield
    cloudpickle.unregister_pickle_by_value(keras_shards)


@pytest.fixture(scope="module", params=BACKENDS)
def ranks(request):
    """Two ranks on each backend."""
    with pools_of(Pool.on(request.param)) as get:
        yield get(2)


ON_TORCH = pytest.mark.parametrize("ranks", ["torch"], indirect=True)  # which compiles nothing


def linear(weight=0.5, **options):
    """y = weight * x; SGD."""
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.array([[weight]], "float32")])
    return model


def outcome_of(ranks, shards, make=linear, columns=None, run=None, rate=0.1, seed=None, layout=None, **options):
    """The result of rank 0 of a fit of the model that ``make`` makes on ``shards``; the others return nothing."""
    columns = columns or FitColumns(["x"], ["y"])
    folder = run or RunFolder(None, "none")

    def on_rank(shards):
        import keras

        from hvd_cluster.core import basics
        from hvd_cluster.spark.keras.layout import KerasLayout
        from hvd_cluster.spark.keras.payload import packed
        from hvd_cluster.spark.keras.training import KerasFit, train

        model = make()
        settings = {name: value() if callable(value) else value for name, value in options.items()}
        settings = {"compiling": {"loss": "mse"}, "verbose": 0, **settings}
        settings.setdefault("optimizer", keras.optimizers.SGD(rate))
        fit = KerasFit(model, layout=KerasLayout.of(model, columns, **(layout or {})), run=folder, **settings)
        return train(shards[basics.rank()], keras.backend.backend(), seed, True, packed(fit))

    outcome, *others = ranks.run(on_rank, shards)
    assert not any(others)
    return outcome


def losses(outcome, part="train"):
    return [record[part]["loss"] for record in outcome["history"]]


def weight_of(outcome):
    return outcome["model"][0].item()


def test_uneven_and_empty_shards(ranks):
    outcome = outcome_of(ranks, [line(0, validation=line(0)), line(23, validation=line(5))], epochs=30, seed=1)
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


@pytest.mark.parametrize("ranks", [name for name in BACKENDS if name != "jax"], indirect=True)
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


def scripted():
    """Sets the weight at the beginning of each epoch, and writes down what the logs say."""
    import keras

    class Scripted(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.set_weights([np.array([[{0: 5.0, 1: 2.0, 2: 7.0}[epoch]]], "float32")])

    return [Scripted()]


@ON_TORCH
def test_the_best_epoch_is_kept(ranks):
    shards = [line(8, validation=line(4)), line(8, validation=line(4))]
    best = outcome_of(ranks, shards, rate=0.0, epochs=3, callbacks=scripted)
    last = outcome_of(ranks, [line(8), line(8)], rate=0.0, epochs=3, callbacks=scripted)
    assert (weight_of(best), best["best_epoch"], losses(best, "validation")[1]) == (2, 1, 0)
    assert (weight_of(last), last["best_epoch"]) == (7, 2)

    def largest():
        import keras

        return keras.callbacks.ModelCheckpoint("x.keras", monitor="mae", mode="max", save_best_only=True)

    compiling = {"loss": "mse", "metrics": ["mae"]}
    options = {"rate": 0.0, "epochs": 3, "callbacks": scripted, "compiling": compiling}
    found = outcome_of(ranks, shards, checkpoint_callback=largest, **options)
    assert (weight_of(found), found["best_epoch"]) == (7, 2)

    def unknown():
        import keras

        return keras.callbacks.ModelCheckpoint("x.keras", monitor="val_auc", save_best_only=True)

    with pytest.raises(ValueError, match=r"checkpoint_callback monitors 'val_auc', but an epoch has \['loss', 'mae'"):
        outcome_of(ranks, shards, checkpoint_callback=unknown, **options)


@ON_TORCH
def test_all_ranks_stop_when_one_does(ranks):
    """Also in the middle of an epoch, which they go through to its end."""

    def stopping():
        import keras

        from hvd_cluster.core import basics

        class Stop(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                self.epoch = epoch

            def on_train_batch_end(self, batch, logs=None):
                self.model.stop_training = (basics.rank(), self.epoch, batch) == (1, 1, 0)

        return [Stop()]

    outcome = outcome_of(ranks, [line(8), line(8)], epochs=9, callbacks=stopping)
    assert [record["rows"] for record in outcome["history"]] == [16, 16]


@ON_TORCH
def test_a_schedule_of_the_learning_rate(ranks):
    """Its rates are those of the user, and multiplied as that of the optimizer."""

    def callbacks():
        import hvd_cluster.keras as hvd

        return [hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=lambda epoch: 0.5**epoch)]

    outcome = outcome_of(ranks, [line(4), line(4)], epochs=2, callbacks=callbacks)
    x = np.arange(4) / 10
    weight = 0.5
    for rate in (0.2, 0.1):
        weight -= rate * (2 * (weight - 2) * x**2).mean()
    assert weight_of(outcome) == pytest.approx(weight, abs=1e-5)
    assert outcome["optimizer"][1] == pytest.approx(0.05)


@ON_TORCH
def test_early_stopping(ranks):
    def callbacks():
        import keras

        return [*scripted(), keras.callbacks.EarlyStopping("loss", patience=0, restore_best_weights=True)]

    outcome = outcome_of(ranks, [line(8), line(3)], rate=0.0, epochs=3, callbacks=callbacks)
    assert len(outcome["history"]) == 3
    assert weight_of(outcome) == 2


def test_a_fit_goes_on_with_the_checkpoint(ranks, tmp_path):
    """Where a fit failed, the next does what is left; where it was complete, it adds epochs."""

    def adam():
        import keras

        return keras.optimizers.Adam(0.1)

    def failing():
        import keras

        class Fail(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 2:
                    raise RuntimeError("lost")

        return [Fail()]

    run = RunFolder(Store.create(tmp_path), "run")
    shards = [line(8, validation=line(4)), line(5, validation=line(0))]
    whole = outcome_of(ranks, shards, epochs=4, optimizer=adam)
    with pytest.raises(RuntimeError, match="lost"):
        outcome_of(ranks, shards, epochs=4, optimizer=adam, run=run, callbacks=failing)
    outcome = outcome_of(ranks, shards, epochs=4, optimizer=adam, run=run)
    assert [record["epoch"] for record in outcome["history"]] == [0, 1, 2, 3]
    assert losses(outcome) == pytest.approx(losses(whole), rel=1e-4)
    assert weight_of(outcome) == pytest.approx(weight_of(whole), rel=1e-4)
    more = outcome_of(ranks, shards, epochs=1, optimizer=adam, run=run)
    assert [record["epoch"] for record in more["history"]] == [0, 1, 2, 3, 4]
    assert int(more["optimizer"][0]) == 10
    assert more["optimizer"][1] == pytest.approx(0.1)


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
def test_no_rows(ranks):
    with pytest.raises(ValueError, match="there are no rows to train with"):
        outcome_of(ranks, [line(0), line(0)])


@pytest.mark.parametrize("ranks", [name for name in BACKENDS if name != "jax"], indirect=True)
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

    outcome = outcome_of(ranks, [line(8), line(20)], make, optimizer=scheduled, epochs=40, seed=4)
    assert weight_of(outcome) == pytest.approx(2, abs=0.02)
    assert outcome["inputs"].shape == (1, 1)


@ON_TORCH
def test_keras_that_runs_on_another_backend_than_in_the_driver(ranks):
    def on_rank():
        from hvd_cluster.spark.keras.training import train

        return train(None, "tensorflow", None, True, b"")

    with pytest.raises(RuntimeError, match=r"'torch' in this worker, but on 'tensorflow' in the driver.*executorEnv"):
        ranks.run(on_rank)


@ON_TORCH
def test_a_file_of_a_callback_is_written_by_one_rank(ranks, tmp_path):
    def callbacks():
        import keras

        from hvd_cluster.core import basics

        class Loss(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                (tmp_path / f"{basics.rank()}.{math.floor(logs['loss'] * 1e5)}").touch()

        return [keras.callbacks.CSVLogger(tmp_path / "log.csv", append=True), Loss()]

    outcome_of(ranks, [line(8), line(3)], callbacks=callbacks)
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 2
    seen = sorted(path.name for path in tmp_path.glob("?.*"))
    assert [name[0] for name in seen] == ["0", "1"]
    assert seen[0][1:] == seen[1][1:]


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
