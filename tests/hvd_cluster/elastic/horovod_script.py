"""An elastic script in the style of Horovod's examples, with all names of its API: ``horovod_script.py FOLDER``.

It notes what happens as training.py does, so that a test can follow it.
"""

import hashlib
import os
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

folder = Path(sys.argv[1])
LEARNING_RATE, BATCH_SIZE, SAMPLES = 0.01, 4, 64


def note(text):
    with (folder / os.environ["HOROVOD_WORKER_ID"]).open("a") as file:
        file.write(f"{text}\n")


note(f"pid {os.getpid()}")
hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)

generator = torch.Generator().manual_seed(0)
dataset = TensorDataset(torch.randn(SAMPLES, 8, generator=generator), torch.arange(SAMPLES) % 3)
sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)

model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
optimizer = optim.SGD(model.parameters(), lr=LEARNING_RATE * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none, op=hvd.Average
)


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(state):
    model.train()
    for batch, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        state.batch += 1
        state.sampler.record_batch(batch, BATCH_SIZE)
        note(f"step {state.batch} {hvd.size()}")
        state.commit()
        if state.batch % 10 == 0:
            metric_average(float(loss.detach()), "avg_loss")
    state.sampler.set_epoch(state.epoch + 1)


def is_over():
    return bool(hvd.allreduce(torch.tensor([float((folder / "end").exists())]), op=hvd.Sum, name="over").item())


@hvd.elastic.run
def full_train(state):
    note(f"world {hvd.rank()} of {hvd.size()}")
    while not is_over():
        train(state)
        state.epoch += 1
        state.batch = 0
        state.commit()
    hvd.broadcast_object(state.epoch, root_rank=0)


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * hvd.size()
    note(f"reset {hvd.size()}")


state = hvd.elastic.TorchState(model, optimizer, epoch=1, batch=0, sampler=sampler)
state.register_reset_callbacks([on_state_reset])
full_train(state)

digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
assert len(set(hvd.allgather_object(digest))) == 1
assert optimizer.param_groups[0]["lr"] == LEARNING_RATE * hvd.size()
note(f"result {state.epoch} {state.epoch} {hvd.rank()} {hvd.size()}")
