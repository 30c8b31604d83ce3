"""Fits with Lightning on ranks without Spark: modules in both packages, and the outcome of rank 0."""

import importlib
import sys

import cloudpickle
import fake_shards
import pytest
import torch

from hvd_cluster.spark.estimators.run import RunFolder
from hvd_cluster.spark.lightning.batches import NamedLayout
from hvd_cluster.spark.lightning.modules import package_for
from hvd_cluster.spark.lightning.training import LightningFit, train
from hvd_cluster.spark.torch.payload import packed

ONE, TWO = [pytest.mark.parametrize("ranks", [size], indirect=True) for size in (1, 2)]


@pytest.fixture(autouse=True, scope="module")
def modules_by_value():
    for module in (fake_shards, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in (fake_shards, sys.modules[__name__]):
        cloudpickle.unregister_pickle_by_value(module)


def line_module(package="lightning.pytorch", **options):
    """A module that learns y = 2 x, without a bias."""
    base = importlib.import_module(package).LightningModule

    class Line(base):
        def __init__(self, rate=0.1, logs=True, scheduler=None, optimizer=torch.optim.SGD):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(1, 1, bias=False)
            self.rate, self.logs, self.scheduler, self.optimizer = rate, logs, scheduler, optimizer

        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, batch_idx):
            error = self(batch["x"]).reshape(-1) - batch["y"]
            if self.logs:
                self.log("error", error.abs().mean(), sync_dist=True)
            return error.square().mean()

        def validation_step(self, batch, batch_idx):
            error = self(batch["x"]).reshape(-1) - batch["y"]
            self.log("val_error", error.abs().mean(), sync_dist=True)
            self.log("val_loss", error.square().mean())

        def configure_optimizers(self):
            optimizer = self.optimizer(self.parameters(), lr=self.rate)
            return optimizer if self.scheduler is None else ([optimizer], [self.scheduler(optimizer)])

    return Line(**options)


def fit_of(model=None, run=None, layout=None, **options):
    model = model or line_module()
    options = {"verbose": 0, "arguments": {"logger": False, **options.pop("arguments", {})}, **options}
    layout = layout or NamedLayout(["x"], ["y"])
    return LightningFit(model, package_for(model), layout, run or RunFolder(None, "none"), **options)


def trained(ranks, fit, *shards, train=train):
    """The outcome of rank 0; the others have none."""
    payload = packed(fit)

    def on_rank(shards):
        from hvd_cluster.core import basics

        torch.set_num_threads(1)
        return train(shards[basics.rank()], payload)

    outcome, *others = ranks.run(on_rank, shards)
    assert not any(others)
    return outcome


def losses(outcome, part="train"):
    return [record[part]["loss"] for record in outcome["history"]]


def weight(outcome):
    return outcome["model"]["layer.weight"].item()
