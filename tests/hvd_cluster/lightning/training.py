"""A small regression that ranks train in Lightning, and the same in one process."""

import importlib
import warnings

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
}


def rows(count=32):
    """Inputs of shape (count, 4) and targets of shape (count, 1), the same ones everywhere."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, 4, generator=generator)
    return inputs, (inputs * torch.tensor([1.0, -2.0, 3.0, 0.5])).sum(1, keepdim=True)


def loader(batch, data=None, share=(0, 1)):
    """Batches of ``batch`` rows, in the order of the rows; each ``size``-th one for ``share``, a rank and a size.

    Lightning would shuffle the rows of each rank.
    """
    data = TensorDataset(*(data or rows()))
    rank, size = share
    return DataLoader(data, batch, sampler=DistributedSampler(data, size, rank, shuffle=False))


def regression(package="lightning.pytorch", seed=0, network=None, scheduler=None):
    """A module whose parameters follow from ``seed``, with SGD and momentum."""
    base = importlib.import_module(package).LightningModule

    class Regression(base):
        def __init__(self):
            super().__init__()
            torch.manual_seed(seed)
            self.network = network() if network else perceptron()

        def training_step(self, batch, batch_idx):
            loss = (self.network(batch[0]) - batch[1]).square().mean()
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("error", (self.network(batch[0]) - batch[1]).square().mean(), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch, batch_idx):
            return self.network(batch[0])

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            if scheduler is None:
                return optimizer
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler(optimizer), "interval": "step"}}

    return Regression()


def perceptron():
    """Two layers."""
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def trainer(package="lightning.pytorch", strategy="horovod", **options):
    """A Trainer that says nothing."""
    return importlib.import_module(package).Trainer(strategy=strategy, **{**QUIET, "max_epochs": 2, **options})


def fit(module, *loaders, ckpt_path=None, **options):
    """Train ``module``; the Trainer. A warning of ours is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(backward_passes|changed between|synchronize).*")
        made = trainer(**options)
        made.fit(module, *loaders, ckpt_path=ckpt_path)
    return made


def weights(module):
    """All parameters and buffers, as lists."""
    return {name: value.tolist() for name, value in module.state_dict().items()}


def flat(found):
    """The numbers of :func:`weights` in one list."""
    return torch.cat([torch.tensor(value).flatten().double() for value in found.values()]).tolist()
