"""Learn handwritten digits with Lightning, on one process or on many.

::

    python examples/lightning_digits.py
    hvdrun -np 2 python examples/lightning_digits.py

The network and the data are those of ``digits.py``. One argument makes the training a distributed one:
``strategy="horovod"``. All ranks validate together, and stop together when the held-out images get no better.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import lightning
import torch
from digits import RATE, Digits, Options, add_options, check, fingerprint, model
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hvd_cluster.lightning
import hvd_cluster.torch as hvd

assert hvd_cluster.lightning  # its import makes the strategy known


class Network(lightning.LightningModule):
    """The network of ``digits.py``, with its losses."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.network = model()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch of this rank."""
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The part of a batch that the network gets right."""
        right = (self.network(batch[0]).argmax(dim=1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        """Rank 0 prints the result of the epoch, of all ranks together."""
        found = self.trainer.callback_metrics
        if self.trainer.is_global_zero:
            text = f"loss {found['loss']:.4f}   held-out accuracy {found['accuracy']:.4f}"
            print(f"epoch {self.current_epoch + 1:2}   {text}", flush=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """SGD with a rate that falls along a cosine."""
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)
        epochs = self.trainer.max_epochs or 1
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs),
        }


def train(options: Options) -> nn.Module:
    """Train on every rank."""
    data = Digits(options.seed)
    batches = DataLoader(TensorDataset(*data.training), options.batch_size, shuffle=True)
    held_out = DataLoader(TensorDataset(*data.held_out), 60)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="horovod",
        max_epochs=options.epochs,
        gradient_clip_val=5.0,
        callbacks=[EarlyStopping("accuracy", mode="max", patience=5)],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    network = Network(RATE * trainer.world_size)  # each step sees the batches of all ranks, so it may be longer
    trainer.fit(network, batches, held_out)
    return network.network


def main() -> None:
    """Train and check that all ranks end with the same parameters."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits with Lightning.")
    add_options(parser)
    options = Options(**vars(parser.parse_args()))
    warnings.filterwarnings("ignore", module="lightning.*")  # about workers for data, which are few here
    hvd.init()
    torch.set_num_threads(1)
    lightning.seed_everything(options.seed, verbose=False)
    check(fingerprint(train(options)))


if __name__ == "__main__":
    main()
