"""A fit on three ranks, of which two die: ``hvdrun -np 3 --min-np 1 python elastic_lightning_job.py FOLDER``."""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from fake_shards import elastic_line, line
from lightning_fits import fit_of, line_module

from hvd_cluster.core import basics
from hvd_cluster.spark.lightning.training import training_for


class Deaths(pl.Callback):
    """Rank 2 dies in a step of the second epoch, and rank 0 in the validation of the third."""

    batches = 0
    begun = 0

    def __init__(self, number):
        self.number = number

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state_dict):
        self.batches = state_dict["batches"]

    def die(self, number):
        if number == self.number:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_start(self, trainer, pl_module):
        self.begun += 1

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.current_epoch == 1 and trainer.fit_loop.epoch_loop.batch_idx == 3:
            self.die(2)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if trainer.current_epoch == 2:
            self.die(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    basics.init()
    number = basics.rank()
    deaths = Deaths(number)
    fit = fit_of(line_module(optimizer=torch.optim.Adam), epochs=4, elastic=True, callbacks=[deaths])
    with tempfile.TemporaryDirectory() as folder:
        training = training_for(fit)(fit, elastic_line(20, number, validation=line(6)), folder)
        outcome = training.run()
    assert outcome is not None, "the last rank is rank 0"
    found = {
        "rows": [record["rows"] for record in outcome["history"]],
        "losses": [record["validation"]["loss"] for record in outcome["history"]],
        "batches": deaths.batches,
        "begun": deaths.begun,
        "steps": training.trainer.global_step,
        "rate": training.module.configure_optimizers().param_groups[0]["lr"],
        "rates": [group["lr"] for group in training.trainer.optimizers[0].param_groups],
        "training": all(each.training for each in training.module.modules()),
        "unsafe": training.state._snapshots.is_unsafe,
    }
    Path(sys.argv[1], "found.json").write_text(json.dumps(found))
