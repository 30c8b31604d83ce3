"""The training of a LightningEstimator on ranks, without Spark."""

import copy
import logging
import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

from fake_shards import FakeShard, TwoHeads, line, same  # noqa: E402
from lightning_fits import ONE, TWO, fit_of, line_module, losses, trained, weight  # noqa: E402
from lightning_fits import modules_by_value as modules_by_value  # noqa: E402  a fixture

from hvd_cluster.spark.estimators.run import RunFolder  # noqa: E402
from hvd_cluster.spark.estimators.store import Store  # noqa: E402
from hvd_cluster.spark.lightning.batches import NamedLayout  # noqa: E402
from hvd_cluster.spark.lightning.training import quiet  # noqa: E402
from hvd_cluster.spark.torch.batches import BatchLayout  # noqa: E402
from hvd_cluster.spark.torch.training import TorchFit  # noqa: E402
from hvd_cluster.spark.torch.training import train as train_torch  # noqa: E402

pytestmark = pytest.mark.leaves("environment")  # torch sets a variable with the first step of an optimizer


@ONE
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_one_rank_trains_as_a_loop_by_hand_does(ranks, package):
    pytest.importorskip(package)
    module, shard, expected = line_module(package), line(10), []
    by_hand = copy.deepcopy(module.layer)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for _ in range(2):
        total = torch.zeros(2)
        for (x,), (y,) in shard.torch():
            optimizer.zero_grad()
            error = by_hand(x) - y
            loss = error.square().mean()
            loss.backward()
            optimizer.step()
            total += len(x) * torch.tensor([loss.item(), error.abs().mean().item()])
        expected.append((total / 10).tolist())
    outcome = trained(ranks, fit_of(module, epochs=2), shard)
    found = [[record["train"]["loss"], record["train"]["all_metrics"]["error"]] for record in outcome["history"]]
    assert found == [pytest.approx(values) for values in expected]
    assert weight(outcome) == pytest.approx(by_hand.weight.item())
    assert [(record["epoch"], record["rows"]) for record in outcome["history"]] == [(0, 10), (1, 10)]


@TWO
@pytest.mark.parametrize("empty", [0, 1])
def test_uneven_and_empty_shards(ranks, empty):
    """Also where values are logged with sync_dist, and one rank alone validates."""
    shards = [line(23, validation=line(5)), line(0, validation=line(0))]
    outcome = trained(ranks, fit_of(epochs=4), *(shards[::-1] if empty == 0 else shards))
    assert outcome["history"][0]["rows"] == 23
    assert weight(outcome) == pytest.approx(2, abs=1e-2)
    assert losses(outcome, "validation")[-1] < 1e-3


@TWO
def test_an_empty_rank_validates_with_the_weights_of_this_epoch(ranks):
    """The other rank has one batch, as many as the empty one seems to have."""
    kept_apart = line(4), line(0)
    first, second = (
        losses(trained(ranks, fit_of(epochs=3), line(4, validation=one), line(0, validation=other)), "validation")
        for one, other in (kept_apart, kept_apart[::-1])
    )
    assert first == pytest.approx(second)


@TWO
def test_averages_are_those_of_all_rows(ranks):
    module = line_module(rate=0.0)
    outcome = trained(ranks, fit_of(module), line(3, validation=line(5)), line(20, validation=line(0)))
    for part, name, shards in (("train", "error", [line(3), line(20)]), ("validation", "val_error", [line(5)])):
        pairs = [(x, y) for shard in shards for (x,), (y,) in shard.torch()]
        x, y = (torch.cat(side) for side in zip(*pairs, strict=True))
        error = module(x) - y
        assert losses(outcome, part) == [pytest.approx(error.square().mean().item())]
        assert outcome["history"][0][part]["all_metrics"][name] == pytest.approx(error.abs().mean().item())


@TWO
def test_gradients_that_add_up_and_are_clipped(ranks):
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    outcome = trained(ranks, fit_of(epochs=20, arguments=arguments), line(20), line(12))
    assert weight(outcome) == pytest.approx(2, abs=0.05)
    expected = trained(ranks, fit_of(line_module(rate=0.0)), line(20), line(12))
    still = trained(ranks, fit_of(line_module(rate=0.0), arguments=arguments), line(20), line(12))
    assert losses(still) == pytest.approx(losses(expected))  # Lightning divides the loss of each batch


@pytest.mark.parametrize("verbose", [0, 2])
def test_the_report_of_a_profiler_is_heard_in_a_quiet_fit(verbose):
    profilers, trainer = (logging.getLogger(f"lightning.pytorch.{name}") for name in ("profilers.profiler", "trainer"))
    with quiet(verbose):
        assert profilers.isEnabledFor(logging.INFO)
        assert verbose or not trainer.isEnabledFor(logging.INFO)
    assert logging.getLogger("lightning.pytorch.profilers").level == logging.NOTSET


@ONE
def test_arguments_of_the_trainer(ranks, tmp_path):
    """A logger gets the values of steps and of epochs. The best epoch is one with a validation."""
    from lightning.pytorch.loggers import CSVLogger

    arguments = {"logger": CSVLogger(tmp_path, version=0), "log_every_n_steps": 1, "check_val_every_n_epoch": 2}
    outcome = trained(ranks, fit_of(epochs=3, arguments=arguments), line(8, validation=line(4)))
    assert ["validation" in record for record in outcome["history"]] == [False, True, False]
    assert outcome["best_epoch"] == 1
    lines = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert {"error", "val_error", "val_loss"} <= set(lines[0].split(","))
    assert len(lines) >= 1 + 6  # six steps


@TWO
def test_a_logger_gets_the_value_of_all_ranks_for_an_epoch_with_steps(ranks, tmp_path):
    import csv

    from lightning.pytorch.loggers import CSVLogger

    def training_step(module, batch, batch_idx):
        module.log("v", batch["x"].mean(), on_step=True, on_epoch=True)
        module.log("steps", batch["x"].mean(), on_step=True, on_epoch=False)
        return module.layer.weight.square().sum()

    module = line_module()
    type(module).training_step = training_step
    arguments = {"logger": CSVLogger(tmp_path, version=0), "log_every_n_steps": 1}
    trained(ranks, fit_of(module, arguments=arguments), line(4), line(4, first=4))
    with open(tmp_path / "lightning_logs" / "version_0" / "metrics.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(each["v_epoch"]) for each in lines if each["v_epoch"]] == [pytest.approx(0.35)]
    assert "steps_epoch" not in lines[0]


@ONE
def test_a_loss_that_is_nan_in_the_third_step(ranks):
    shard = line(16)
    shard._sides[1][0][9] = math.nan
    with pytest.raises(FloatingPointError, match=r"the loss is nan in step 3 of epoch 1 on rank 0; look for rows"):
        trained(ranks, fit_of(terminate_on_nan=True, epochs=3), shard)
    assert math.isnan(losses(trained(ranks, fit_of(), shard))[0])


@TWO
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_first_batch_that_is_wrong_on_one_rank_is_an_error_on_all(ranks, wrong):
    shards = [line(4), line(4)]
    shards[wrong] = FakeShard([torch.ones(4, 3)], [torch.ones(4, 1)])
    fit = fit_of(layout=NamedLayout(["x"], ["y"], None, [[-1, 1]]))

    def on_rank(shards):
        from hvd_cluster.core import basics
        from hvd_cluster.spark.lightning.batches import NamedBatches

        with pytest.raises(ValueError, match=r"has the shape \[1\], but it has 3 elements") as caught:
            next(iter(NamedBatches(shards[basics.rank()], fit.layout, torch.float32, None)))
        return str(caught.value)

    texts = ranks.run(on_rank, shards)
    start = f"rank {wrong} has no first batch: ValueError: "
    assert [text.startswith(start) for text in texts] == [rank != wrong for rank in (0, 1)]


@TWO
def test_no_rows(ranks):
    with pytest.raises(ValueError, match="there are no rows to train with"):
        trained(ranks, fit_of(), line(0, validation=line(4)), line(0, validation=line(4)))


@ONE
@pytest.mark.parametrize("validates", [False, True])
def test_a_batch_of_another_class_is_refused(ranks, validates):
    class Pair:
        def __init__(self, batch):
            self.batch = batch

    def changed(module, batch, dataloader_idx):
        return Pair(batch) if module.trainer.validating or not validates else batch

    module = line_module()
    type(module).on_after_batch_transfer = changed
    type(module).training_step = lambda self, batch, batch_idx: self.layer.weight.square().sum()
    with pytest.raises(ValueError, match=r"a batch is a Pair in which .* return a dictionary, a list or a tensor"):
        trained(ranks, fit_of(module), line(8, validation=line(4)))


@ONE
def test_no_rows_for_validation(ranks):
    outcome = trained(ranks, fit_of(epochs=2), line(8, validation=line(0)))
    assert outcome["best_epoch"] == 1
    assert "validation" not in outcome["history"][0]


@ONE
def test_steps_and_batches_of_an_epoch(ranks):
    fit = fit_of(line_module(rate=0.0), train_steps=2, validation_steps=1, validation_batch_size=3)
    outcome = trained(ranks, fit, line(20, validation=line(20)))
    assert outcome["history"][0]["rows"] == 8
    (x,), (y,) = next(line(20, batch_size=3).torch())
    assert losses(outcome, "validation") == pytest.approx([(weight(outcome) * x - y).square().mean().item()])


@TWO
def test_a_model_of_torch_trains_as_in_a_torch_estimator(ranks):
    """With weights of rows, two outputs and metrics; rank 1 has fewer batches."""
    torch.manual_seed(0)
    features = [torch.randn(24, 2), torch.randn(24, 1)]
    labels = [features[0].sum(1, keepdim=True), torch.randint(3, (24, 1))]
    weights = torch.rand(24, dtype=torch.float64)
    shards = []
    for rows in (slice(0, 16), slice(16, 24)):
        sides = [each[rows] for each in features], [each[rows] for each in labels]
        shards.append(FakeShard(*sides, 4, weights[rows], FakeShard(*sides, 4, weights[rows])))
    options = {
        "losses": [torch.nn.functional.mse_loss, torch.nn.CrossEntropyLoss()],
        "loss_weights": [1.0, 0.5],
        "metrics": [[lambda output, label: output.mean(), lambda output, label: label.float().mean()]],
        "epochs": 3,
        "verbose": 0,
    }

    def started():
        torch.manual_seed(1)
        model = TwoHeads()
        return model, torch.optim.Adam(model.parameters(), lr=0.05)

    columns = ["pair", "single"], ["y", "class"], "w"
    model, optimizer = started()
    fit = TorchFit(model, optimizer, BatchLayout(*columns), RunFolder(None, "none"), **options)
    expected = trained(ranks, fit, *shards, train=train_torch)
    model, optimizer = started()
    found = trained(ranks, fit_of(model, layout=NamedLayout(*columns), optimizer=optimizer, **options), *shards)
    for part in ("train", "validation"):
        assert losses(found, part) == pytest.approx(losses(expected, part))
        for one, other in zip(found["history"], expected["history"], strict=True):
            metrics = [one[part]["all_metrics"][f"metric_0_{output}"] for output in range(2)]
            assert metrics == pytest.approx(other[part]["all_metrics"][0])
    assert all(torch.allclose(found["model"][name], value) for name, value in expected["model"].items())
    assert [group["lr"] for group in found["optimizer"]["param_groups"]] == pytest.approx([0.05])
    for name, value in expected["optimizer"]["state"][0].items():
        assert torch.allclose(found["optimizer"]["state"][0][name], value)


@TWO
@pytest.mark.parametrize("options", [{}, {"sharded": True}])
def test_a_rank_without_rows_left_validates_its_own(ranks, options):
    """The validation of a model of torch is a training step."""

    def validated(rows):
        model = torch.nn.Linear(1, 1)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        losses_of = [torch.nn.functional.mse_loss]
        fit = fit_of(model, optimizer=optimizer, losses=losses_of, **options)
        shards = line(rows, validation=line(5)), line(12, validation=line(3, first=7))
        return losses(trained(ranks, fit, *shards), "validation")

    assert validated(0) == validated(4) == validated(12)


def with_metric():
    import lightning
    import torchmetrics

    class Counting(lightning.LightningModule):
        """The share of the rows whose label is above 3: known without a training."""

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
            self.share, self.held_out = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = (self.layer(batch["x"]).reshape(-1) - batch["y"]).square().mean()
            self.manual_backward(loss)
            optimizer.step()
            self.share((batch["y"] > 3).float())
            self.log("share", self.share)
            return loss.detach()

        def validation_step(self, batch, batch_idx):
            self.held_out((batch["y"] > 3).float())
            self.log("held_out", self.held_out)

        def on_validation_epoch_end(self):
            self.log("late", 7.0)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.001)

    return Counting()


@TWO
def test_metric_objects_and_manual_optimization(ranks):
    """Rank 0 has no rows. It gets the running averages of batch norm, and computes the metric of all rows."""
    shards = line(0, validation=line(0)), line(21, validation=line(40))
    outcome = trained(ranks, fit_of(with_metric(), epochs=2), *shards)
    for record in outcome["history"]:
        assert record["train"]["all_metrics"]["share"] == pytest.approx(5 / 21)
        assert record["validation"]["all_metrics"] == pytest.approx({"held_out": 24 / 40, "late": 7.0})
        assert record["rows"] == 21
    assert outcome["model"]["layer.0.num_batches_tracked"] == 10  # those of one row do not count
    assert math.isnan(losses(outcome, "validation")[0])
    assert losses(outcome)[0] > 0


@TWO
def test_a_metric_object_that_setup_makes(ranks):
    import torchmetrics

    def setup(module, stage):
        module.mean = torchmetrics.MeanMetric()

    def training_step(module, batch, batch_idx):
        module.mean(batch["x"])
        module.log("mean", module.mean)
        return module.layer.weight.square().sum()

    module = line_module()
    type(module).setup, type(module).training_step = setup, training_step
    outcome = trained(ranks, fit_of(module), line(4), line(4, first=4))
    assert outcome["history"][0]["train"]["all_metrics"]["mean"] == pytest.approx(0.35)


@TWO
def test_gradients_that_add_up_where_one_rank_is_empty(ranks):
    fit = fit_of(epochs=8, arguments={"accumulate_grad_batches": 2})
    assert weight(trained(ranks, fit, line(0), line(28))) == pytest.approx(2, abs=0.05)


@TWO
def test_batch_norm_of_all_ranks_where_one_is_empty(ranks):
    """It waits for the other rank inside of a step."""
    import lightning

    class Normed(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
            for parameter in self.layers[1].parameters():
                torch.nn.init.constant_(parameter, -2.0)  # far from the best

        def training_step(self, batch, batch_idx):
            return (self.layers(batch["x"])[:, 0] - batch["y"]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)

    fit = fit_of(Normed(), epochs=20, arguments={"sync_batchnorm": True})
    outcome = trained(ranks, fit, line(0), line(24))
    assert losses(outcome)[-1] < losses(outcome)[0] * 0.8
    assert outcome["model"]["layers.0.running_mean"].item() == pytest.approx(1.15, abs=0.3)


@TWO
@pytest.mark.parametrize("hook", ["setup", "configure_model"])
def test_layers_that_come_after_the_start_are_refused(ranks, hook):
    """The module of the caller could not load the state."""

    def add(module, stage=None):
        module.late = torch.nn.Linear(1, 1, bias=False)

    module = line_module()
    setattr(type(module), hook, add)
    with pytest.raises(ValueError, match=r"state_dict: late.weight; .* so make layers in __init__"):
        trained(ranks, fit_of(module), line(4), line(0))


def wide_module():
    """A LightningModule with batch norm, and a scheduler that counts steps."""
    module = line_module(optimizer=torch.optim.AdamW, rate=0.05)
    torch.manual_seed(0)
    module.layer = torch.nn.Sequential(
        torch.nn.Linear(1, 70), torch.nn.BatchNorm1d(70), torch.nn.Tanh(), torch.nn.Linear(70, 1)
    )

    def configure_optimizers(module):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    type(module).configure_optimizers = configure_optimizers
    return {"model": module}


def plain_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 70), torch.nn.Tanh(), torch.nn.Linear(70, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return {"model": model, "optimizer": optimizer, "losses": [torch.nn.functional.mse_loss]}


@TWO
@pytest.mark.parametrize(
    ("place", "make", "rows", "arguments"),
    [
        ("host", wide_module, (8, 8), {"gradient_clip_val": 0.5}),
        ("rank", plain_model, (0, 23), {}),
        ("host", wide_module, (0, 23), {"gradient_clip_val": 0.5}),
        ("host", plain_model, (20, 12), {"accumulate_grad_batches": 2}),
        ("rank", wide_module, (12, 20), {"accumulate_grad_batches": 3}),
    ],
)
def test_a_sharded_fit_has_the_result_of_a_plain_one(ranks, place, make, rows, arguments, tmp_path):
    """Also on uneven and empty shards, with a best epoch in the middle, and after it goes on from a checkpoint."""

    def outcome(sharded, folder):
        run = RunFolder(Store.create(str(tmp_path / folder)), "run")
        for epochs in (3, 2):
            fit = fit_of(run=run, epochs=epochs, sharded=sharded, arguments=dict(arguments), **make())
            found = trained(ranks, fit, *[line(each, validation=line(4)) for each in rows])
        return found

    plain, sharded = outcome(False, "plain"), outcome(place, "sharded")
    for found in (plain, sharded):
        for record in found["history"]:
            del record["seconds"]
    for key in plain:
        assert same(sharded[key], plain[key]), (key, sharded[key], plain[key])
    assert len(sharded["history"]) == 5
