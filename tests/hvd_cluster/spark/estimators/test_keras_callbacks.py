"""Callbacks, learning rates and checkpoints in the training of a KerasEstimator on two ranks, without Spark."""

import math
from importlib.util import find_spec

import numpy as np
import pytest

from hvd_cluster.spark.estimators.run import RunFolder
from hvd_cluster.spark.estimators.store import Store

if find_spec("keras") is None:
    pytest.skip("Keras is not installed", allow_module_level=True)

from keras_fits import ON_TORCH, failing, line, linear, losses, outcome_of, scripted, weight_of
from keras_fits import ranks as ranks  # a fixture


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


def after(rates, rows=4):
    """The weight after steps of these rates on all rows."""
    weight, x = 0.5, np.arange(rows) / 10
    for rate in rates:
        weight -= rate * (2 * (weight - 2) * x**2).mean()
    return weight


def multiplied():
    import hvd_cluster.keras as hvd

    return hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=lambda epoch: 0.5**epoch)


def absolute():
    import keras

    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: [0.1, 0.05, rate][epoch])


def least():
    import keras

    return keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=1e9, min_lr=0.05)


@ON_TORCH
@pytest.mark.parametrize(
    ("make", "rates", "last"),
    [
        (multiplied, [0.2, 0.1, 0.05], 0.025),
        (absolute, [0.2, 0.1, 0.1], 0.05),
        (least, [0.2, 0.2, 0.1], 0.05),
    ],
)
def test_callbacks_set_the_learning_rate_of_the_user(ranks, make, rates, last):
    """A step has it times the number of ranks."""
    outcome = outcome_of(ranks, [line(4), line(4)], epochs=3, callbacks=lambda: [make()])
    assert weight_of(outcome) == pytest.approx(after(rates), abs=1e-5)
    assert outcome["optimizer"][1] == pytest.approx(last)


@pytest.mark.parametrize("schedule", [False, True])
def test_files_have_the_learning_rate_of_the_user(ranks, tmp_path, schedule):
    """A number or a schedule, after a batch or an epoch; Keras alone loads them."""

    def optimizer():
        import keras

        rate = keras.optimizers.schedules.PolynomialDecay(0.1, 4, 0.05) if schedule else 0.1
        return keras.optimizers.SGD(rate)

    def callbacks():
        import keras

        return [
            keras.callbacks.ModelCheckpoint(tmp_path / f"{frequency}.keras", save_freq=frequency)
            for frequency in ("epoch", 2)
        ]

    outcome = outcome_of(ranks, [line(4), line(4)], callbacks=callbacks, optimizer=optimizer, epochs=2)
    rates = [0.2, 0.2 - 0.1 / 4] if schedule else [0.2, 0.2]
    assert weight_of(outcome) == pytest.approx(after(rates), abs=1e-5)

    def check():
        import zipfile

        import keras

        for name in ("epoch.keras", "2.keras"):
            with zipfile.ZipFile(tmp_path / name) as file:
                assert b"hvd_cluster" not in file.read("config.json")
            optimizer = keras.models.load_model(tmp_path / name).optimizer
            if schedule:
                assert optimizer._learning_rate.initial_learning_rate == 0.1
            else:
                assert float(optimizer.learning_rate) == pytest.approx(0.1)

    ranks.run(check)


@ON_TORCH
def test_moving_averages_of_weights_are_the_result(ranks):
    """Also where an epoch is kept for its validation; Keras puts them in the place of the weights at the end."""

    def averaging():
        import keras

        return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)

    def swapping():
        import keras

        return [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]

    options = {"optimizer": averaging, "epochs": 3}
    last = weight_of(outcome_of(ranks, [line(4), line(4)], **options))
    assert after([0.2] * 3) - last > 0.01
    for callbacks in ([], swapping):
        kept = outcome_of(ranks, [line(4, validation=line(4))] * 2, callbacks=callbacks, **options)
        assert kept["best_epoch"] == 2
        assert weight_of(kept) == pytest.approx(last, abs=1e-6)


@ON_TORCH
def test_callbacks_hear_of_the_validation(ranks):
    """So that it may see other weights, such as moving averages."""

    def callbacks():
        import keras

        class Right(keras.callbacks.Callback):
            def on_test_begin(self, logs=None):
                self.kept = self.model.get_weights()
                self.model.set_weights([np.full((1, 1), 2.0)])

            def on_test_end(self, logs=None):
                self.model.set_weights(self.kept)

        return [Right()]

    outcome = outcome_of(ranks, [line(4, validation=line(4))] * 2, callbacks=callbacks)
    assert losses(outcome, "validation") == [pytest.approx(0, abs=1e-9)]
    assert weight_of(outcome) == pytest.approx(after([0.2]), abs=1e-5)


@ON_TORCH
def test_early_stopping(ranks):
    def callbacks():
        import keras

        return [*scripted(), keras.callbacks.EarlyStopping("loss", patience=0, restore_best_weights=True)]

    outcome = outcome_of(ranks, [line(8), line(3)], rate=0.0, epochs=3, callbacks=callbacks)
    assert len(outcome["history"]) == 3
    assert weight_of(outcome) == 2


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


@ON_TORCH
def test_a_fit_that_exchanges_weights_for_averages_goes_on_with_the_weights(ranks, tmp_path):
    """A checkpoint at the end of an epoch has the averages in the place of the weights."""

    def averaging():
        import keras

        return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)

    def swapping():
        import keras

        return [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]

    run, options = RunFolder(Store.create(tmp_path), "run"), {"optimizer": averaging, "epochs": 4}
    whole = outcome_of(ranks, [line(4), line(4)], callbacks=swapping, **options)
    with pytest.raises(RuntimeError, match="lost"):
        outcome_of(ranks, [line(4), line(4)], run=run, callbacks=lambda: [*swapping(), *failing()], **options)
    outcome = outcome_of(ranks, [line(4), line(4)], run=run, callbacks=swapping, **options)
    assert losses(outcome) == pytest.approx(losses(whole), rel=1e-5)
    assert weight_of(outcome) == pytest.approx(weight_of(whole), rel=1e-5)


def test_a_fit_goes_on_with_the_checkpoint(ranks, tmp_path):
    """Where a fit failed, the next does what is left; where it was complete, it adds epochs."""

    def adam():
        import keras

        return keras.optimizers.Adam(0.1)

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
def test_the_checkpoint_of_another_optimizer_or_model_is_refused(ranks):
    """The state of Adamax has the same shapes as that of Adam, but another meaning."""

    def reasons(shard):
        import keras

        from hvd_cluster.spark.keras.payload import arrays_of
        from hvd_cluster.spark.keras.training import KerasFit, KerasTraining, compile_with

        model, optimizer = linear(), keras.optimizers.Adamax()
        compile_with(model, optimizer, {"loss": "mse"})
        training = KerasTraining(KerasFit(model, optimizer, None, RunFolder(None, "run")), shard)
        arrays, found = arrays_of(model), []
        training._load(arrays, {"optimizer_class": "Adamax"})
        for given, name in ((arrays, "Adam"), ({**arrays, "model": []}, "Adamax")):
            try:
                training._load(given, {"optimizer_class": name})
            except ValueError as error:
                found.append(str(error))
        return found

    start = "run_id is 'run', but the checkpoint of that run is of another model or optimizer:"
    for optimizer, model in ranks.run(reasons, line(4)):
        assert optimizer.startswith(f"{start} its optimizer was Adam, and now it is Adamax; give another run_id")
        assert model.startswith(f"{start} there are 0 arrays for the model, which do not fit its 1 variables; give")
