"""A fit whose ranks die, or that gets one more: ``hvdrun ... python elastic_lightning_job.py FOLDER deaths|growth``."""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from fake_shards import elastic_line, line
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_fits import fit_of, line_module

from hvd_cluster.core import basics
from hvd_cluster.spark.lightning.training import training_for

SECONDS = 60
FOLDER, MODE = Path(sys.argv[1]), sys.argv[2]


class Counts(pl.Callback):
    """A callback with a state."""

    batches = 0
    begun = 0

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state_dict):
        self.batches = state_dict["batches"]

    def on_train_start(self, trainer, pl_module):
        self.begun += 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1


class Deaths(Counts):
    """Rank 2 dies in a step of the second epoch, and rank 0 in the validation of the third."""

    def __init__(self, number):
        self.number = number

    def die(self, number):
        if number == self.number:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.current_epoch == 1 and trainer.fit_loop.epoch_loop.batch_idx == 3:
            self.die(2)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if trainer.current_epoch == 2:
            self.die(0)


class Growth(Counts):
    """Asks for a second rank in the second epoch, and waits until it has started. Steps are slow until it is there."""

    def __init__(self, number):
        self.is_new = number == 1

    def on_fit_start(self, trainer, pl_module):
        if self.is_new:
            (FOLDER / "ready").touch()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.current_epoch == 1 and batch_idx == 1:
            (FOLDER / "grow").touch()
            end = time.monotonic() + SECONDS
            while not (FOLDER / "ready").exists() and time.monotonic() < end:
                time.sleep(0.05)
        if basics.size() == 1 and trainer.current_epoch > 0:
            time.sleep(1)


def module_that_logs():
    """In steps, and in hooks; sums and metrics, too."""
    from torchmetrics import MeanMetric

    module = line_module(optimizer=torch.optim.Adam)
    kind, step = type(module), type(module).training_step

    def training_step(self, batch, batch_idx):
        self.log("count", float(len(batch["x"])), reduce_fx="sum", on_step=False, on_epoch=True)
        self.mean(torch.full((1,), 3.0))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return step(self, batch, batch_idx)

    kind.training_step = training_step
    kind.on_train_epoch_start = lambda self: self.log("epoch_starts", 1.0, sync_dist=True)
    kind.on_validation_epoch_end = lambda self: self.log("validations", 1.0, sync_dist=True)
    module.mean = MeanMetric()
    return module


if __name__ == "__main__":
    torch.set_num_threads(1)
    basics.init()
    number = basics.rank()
    counts = (Deaths if MODE == "deaths" else Growth)(number)
    callbacks = [counts, ModelCheckpoint(monitor="val_loss")]
    arguments = {"accumulate_grad_batches": 2}
    fit = fit_of(module_that_logs(), epochs=4, elastic=True, callbacks=callbacks, arguments=arguments)
    with tempfile.TemporaryDirectory() as folder:
        training = training_for(fit)(fit, elastic_line(20, number, validation=line(6)), folder)
        outcome = training.run()
    history = [] if outcome is None else outcome["history"]
    found = {
        "rows": [record["rows"] for record in history],
        "losses": [record["validation"]["loss"] for record in history],
        "values": [{**record["train"]["all_metrics"], **record["validation"]["all_metrics"]} for record in history],
        "batches": counts.batches,
        "begun": counts.begun,
        "steps": training.trainer.global_step,
        "rate": training.module.configure_optimizers().param_groups[0]["lr"],
        "rates": [group["lr"] for group in training.trainer.optimizers[0].param_groups],
        "training": all(each.training for each in training.module.modules()),
        "unsafe": training.state._snapshots.is_unsafe,
        "weight": training.module.layer.weight.item(),
    }
    (FOLDER / f"found-{basics.rank()}.json").write_text(json.dumps(found))
