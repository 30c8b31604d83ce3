"""LightningModules for tests, in both packages; cloudpickle takes them by value."""

import importlib

import torch


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
