"""Callbacks, learning rates and checkpoints in the training of a LightningEstimator on ranks, without Spark."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

from fake_shards import line  # noqa: E402
from lightning_fits import ONE, TWO, fit_of, line_module, losses, trained, weight  # noqa: E402
from lightning_fits import modules_by_value as modules_by_value  # noqa: E402  a fixture

from hvd_cluster.spark.estimators.run import RunFolder  # noqa: E402
from hvd_cluster.spark.estimators.store import Store  # noqa: E402
from hvd_cluster.spark.lightning.training import checkpoint_of  # noqa: E402

pytestmark = pytest.mark.leaves("environment")  # torch sets a variable with the first step of an optimizer


def overshooting(package="lightning.pytorch"):
    import importlib

    class Overshoot(importlib.import_module(package).Callback):
        """Makes the second epoch the best one."""

        def on_train_epoch_start(self, trainer, pl_module):
            weights = [5.0, 2.0, 7.0]
            pl_module.layer.weight.data.fill_(weights[trainer.current_epoch])

    return Overshoot()


@TWO
def test_the_best_epoch_is_kept(ranks):
    from lightning.pytorch.callbacks import ModelCheckpoint

    def fit(*callbacks):
        return fit_of(line_module(rate=0.0), epochs=3, callbacks=[overshooting(), *callbacks])

    with_rows, without = [line(8, validation=line(4))] * 2, [line(8)] * 2
    best, last = trained(ranks, fit(), *with_rows), trained(ranks, fit(), *without)
    assert (weight(best), best["best_epoch"], losses(best, "validation")[1]) == (2, 1, 0)
    assert (weight(last), last["best_epoch"]) == (7, 2)
    worst = trained(ranks, fit(ModelCheckpoint(monitor="val_error", mode="max")), *with_rows)
    assert (weight(worst), worst["best_epoch"]) == (7, 2)
    train_loss = trained(ranks, fit(ModelCheckpoint(monitor="error")), *without)
    assert (weight(train_loss), train_loss["best_epoch"]) == (2, 1)


def logging_between(package="lightning.pytorch"):
    """Logs, outside of steps, what falls on rank 0 and rises faster on rank 1; a schedule and a callback follow it."""
    import importlib

    from hvd_cluster.core import basics
    from hvd_cluster.ops.objects import allgather_object

    base = line_module(package)

    class Between(type(base)):
        def on_validation_epoch_end(self):
            epoch = self.trainer.current_epoch + 1
            self.log("score", float(10 * epoch if basics.rank() else -epoch))

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "score"}}

    class Same(importlib.import_module(package).Callback):
        def on_validation_end(self, trainer, pl_module):
            assert float(trainer.callback_metrics["score"]) == 4.5 * (trainer.current_epoch + 1)

        def on_train_end(self, trainer, pl_module):
            rate, weight = trainer.optimizers[0].param_groups[0]["lr"], float(pl_module.layer.weight)
            assert len(set(allgather_object((rate, weight), "rates"))) == 1
            assert rate < 0.02  # the mean rises

    return Between(), Same()


@TWO
def test_what_is_logged_outside_of_steps_is_the_mean_of_all_ranks(ranks):
    from lightning.pytorch.callbacks import ModelCheckpoint

    module, same = logging_between()
    fit = fit_of(module, epochs=3, callbacks=[same, ModelCheckpoint(monitor="score", mode="min")])
    found = trained(ranks, fit, line(8, validation=line(4)), line(8, validation=line(4)))
    assert found["best_epoch"] == 0
    assert [record["validation"]["all_metrics"]["score"] for record in found["history"]] == [4.5, 9.0, 13.5]


@ONE
def test_a_fit_without_validation_after_one_with_it_keeps_its_last_epoch(ranks, tmp_path):
    run = RunFolder(Store.create(tmp_path), "mine")
    trained(ranks, fit_of(run=run, epochs=2, measure="validation: 0.2"), line(8, validation=line(4)))
    found = trained(ranks, fit_of(run=run, epochs=2, measure="validation: None"), line(8))
    assert found["best_epoch"] == 3
    assert weight(found) != weight(trained(ranks, fit_of(epochs=2), line(8)))


@TWO
def test_early_stopping_on_values_of_all_ranks(ranks):
    from lightning.pytorch.callbacks import EarlyStopping

    fit = fit_of(line_module(rate=0.0), epochs=9, callbacks=[EarlyStopping("val_loss", patience=2)])
    assert len(losses(trained(ranks, fit, line(8, validation=line(4)), line(0, validation=line(0))))) == 3


class StopOnRank:
    """One rank alone wants to stop."""

    def on_train_epoch_end(self, trainer, pl_module):
        from hvd_cluster.core import basics

        trainer.should_stop = basics.rank() == 1 and trainer.current_epoch == 1


@TWO
def test_all_ranks_stop_when_one_does(ranks):
    from lightning.pytorch.callbacks import Callback

    callback = type("Stop", (StopOnRank, Callback), {})()
    assert len(losses(trained(ranks, fit_of(epochs=9, callbacks=[callback]), line(8), line(8)))) == 2


def failing(at):
    from lightning.pytorch.callbacks import Callback

    class Fail(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == at:
                raise OSError("the disk is gone")

    return Fail()


@TWO
def test_a_failed_fit_goes_on_from_its_checkpoint(ranks, tmp_path):
    run, shards = RunFolder(Store.create(tmp_path), "mine"), (line(8, validation=line(4)), line(20, validation=line(4)))

    def fit(**options):
        return fit_of(line_module(rate=0.05, optimizer=torch.optim.Adam, scheduler=schedule), **options)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    whole = trained(ranks, fit(epochs=5), *shards)
    with pytest.raises(OSError, match="the disk is gone"):
        trained(ranks, fit(run=run, epochs=5, callbacks=[failing(3)]), *shards)
    kept = checkpoint_of(run.read())
    assert len(kept["hvd_cluster"]["history"]) == 3
    assert kept["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.025)
    assert kept["lr_schedulers"][0]["base_lrs"] == [pytest.approx(0.05)]
    rest = trained(ranks, fit(run=run, epochs=5), *shards)
    assert losses(rest) == pytest.approx(losses(whole))
    assert weight(rest) == pytest.approx(weight(whole))
    more = trained(ranks, fit(run=run, epochs=2), *shards)
    assert [record["epoch"] for record in more["history"]] == list(range(7))


@ONE
def test_the_checkpoint_of_another_estimator_is_refused(ranks, tmp_path):
    from hvd_cluster.spark.torch.payload import checkpoint_bytes

    run = RunFolder(Store.create(tmp_path), "mine")
    for data in (checkpoint_bytes({"model": {}, "optimizer": {}}), b"rubbish"):
        run.write(data, [])
        with pytest.raises(
            ValueError, match=r"is damaged, or was not written by a LightningEstimator.*; remove it, or"
        ):
            trained(ranks, fit_of(run=run), line(8))


@TWO
def test_learning_rates_are_multiplied_by_the_number_of_ranks(ranks):
    """Two ranks with the same batch take the step of one rank with twice the rate."""
    module = line_module()
    start = copy.deepcopy(module.layer)
    outcome = trained(ranks, fit_of(module), line(4), line(4))
    (x,), (y,) = next(line(4).torch())
    torch.nn.functional.mse_loss(start(x), y).backward()
    assert weight(outcome) == pytest.approx((start.weight - 0.2 * start.weight.grad).item())


@TWO
@pytest.mark.parametrize(
    ("limit", "arguments", "steps"),
    [
        (None, {}, 15),
        (None, {"accumulate_grad_batches": 2}, 9),
        (2, {}, 6),
        (None, {"max_steps": 4}, 4),
    ],
)
def test_the_number_of_steps_is_known_to_a_module_that_asks(ranks, limit, arguments, steps):
    """The rank with the most rows has 5 batches in each of 3 epochs."""

    def configure_optimizers(module):
        assert module.trainer.estimated_stepping_batches == steps
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    module = line_module()
    type(module).configure_optimizers = configure_optimizers
    outcome = trained(ranks, fit_of(module, epochs=3, train_steps=limit, arguments=arguments), line(20), line(8))
    assert losses(outcome)[-1] <= losses(outcome)[0]


def averaging(kind, rate):
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    if kind == "stochastic":
        return callbacks.StochasticWeightAveraging(swa_lrs=rate, swa_epoch_start=2, annealing_epochs=1)
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("this Lightning has no EMAWeightAveraging")
    return callbacks.EMAWeightAveraging(decay=0.5)


@pytest.mark.parametrize("kind", ["stochastic", "exponential"])
def test_averages_of_weights_are_the_result(pools, kind):
    """Also where an epoch is kept for its validation. One rank with twice the rate takes the steps of two ranks."""

    def averaged(size, shard):
        factor = 2 / size
        callbacks = [averaging(kind, 0.01 * factor)]
        fit = fit_of(line_module(rate=0.05 * factor), epochs=5, callbacks=callbacks)
        return trained(pools(size), fit, *[shard] * size)

    kept = averaged(2, line(4, validation=line(4)))
    assert weight(kept) == pytest.approx(weight(averaged(2, line(4))))
    assert weight(kept) == pytest.approx(weight(averaged(1, line(4))))
    raw = trained(pools(2), fit_of(line_module(rate=0.05), epochs=5), line(4), line(4))
    assert abs(weight(kept) - weight(raw)) > 0.01
    assert (kept["best_epoch"], len(kept["history"])) == (4, 5)


@ONE
def test_the_checkpoint_of_another_optimizer_or_module_is_refused(ranks, tmp_path):
    run, shards = RunFolder(Store.create(tmp_path), "mine"), (line(8),)
    trained(ranks, fit_of(run=run), *shards)
    with pytest.raises(ValueError, match=r"run_id has the state of SGD, but the optimizers are Adam now; give another"):
        trained(ranks, fit_of(line_module(optimizer=torch.optim.Adam), run=run), *shards)
    wider = line_module()
    wider.layer = torch.nn.Linear(2, 1, bias=False)
    text = (
        r"run_id is 'mine', .* another model or optimizer: layer.weight had the shape \(1, 1\), and now it has \(1, 2\)"
    )
    with pytest.raises(ValueError, match=text):
        trained(ranks, fit_of(wider, run=run), *shards)
    assert len(trained(ranks, fit_of(run=run), *shards)["history"]) == 2


@TWO
def test_an_average_is_that_of_the_rank_with_the_most_steps(ranks):
    """On all ranks: which of them has more rows is nothing that the result knows."""
    if not hasattr(pytest.importorskip("lightning.pytorch.callbacks"), "EMAWeightAveraging"):
        pytest.skip("this Lightning has no EMAWeightAveraging")
    found = []
    for rows in ((40, 8), (8, 40)):
        fit = fit_of(line_module(rate=0.02), epochs=3, callbacks=[averaging("exponential", 0.9)])
        found.append(weight(trained(ranks, fit, *map(line, rows))))
    plain = weight(trained(ranks, fit_of(line_module(rate=0.02), epochs=3), line(40), line(8)))
    assert found[0] == pytest.approx(found[1])
    assert found[0] != pytest.approx(plain)


@ONE
def test_a_schedule_by_a_value_goes_on_from_a_checkpoint(ranks, tmp_path):
    """Lightning makes its step after all hooks of the epoch, and the checkpoint has it."""

    def configure_optimizers(module):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    def fit(**options):
        module = line_module()
        type(module).configure_optimizers = configure_optimizers
        return fit_of(module, **options)

    shard, run = line(8, validation=line(4)), RunFolder(Store.create(tmp_path), "mine")
    whole = trained(ranks, fit(epochs=4), shard)
    trained(ranks, fit(epochs=2, run=run), shard)
    parts = trained(ranks, fit(epochs=2, run=run), shard)
    assert losses(parts) == pytest.approx(losses(whole))
    assert weight(parts) == pytest.approx(weight(whole))
