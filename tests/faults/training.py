"""The training of a campaign: ``training.py FOLDER MODEL SAMPLES EPOCHS``.

MODEL is one of MODELS; SAMPLES is ``sampler``, an ElasticSampler, or ``batches``, GlobalBatches. Each worker
appends to ``FOLDER/<worker>`` a line of JSON for each step that it finishes, with the samples of all ranks and a digest
of the parameters. It ends after EPOCHS, or when ``FOLDER/end`` exists.
"""

import json
import os
import sys
import time
from hashlib import blake2b
from pathlib import Path

import numpy as np

from collectives.handshake import hello
from hvd_cluster.core import basics
from hvd_cluster.elastic.batches import GlobalBatches
from hvd_cluster.elastic.handlers import HandledState, SamplerStateHandler, StateDictHandler
from hvd_cluster.elastic.loop import run
from hvd_cluster.elastic.sampler import ElasticPartition
from hvd_cluster.ops.objects import allgather_object

STEP_SECONDS = 0.01
# Any number of ranks up to 4 divides it, so no sample is repeated to make shares equal.
BATCH = 12
SAMPLES = 40 * BATCH
WIDTH = 8
# Of gradients that are reduce-scattered, because they have more than 128 KB.
BALLAST = 20_000
RATE = 0.05
MOMENTUM = 0.9


def dataset():
    """Samples and labels, float64, of shapes (SAMPLES, WIDTH) and (SAMPLES, 1)."""
    generator = np.random.RandomState(7)
    return generator.standard_normal((SAMPLES, WIDTH)), generator.standard_normal((SAMPLES, 1))


class Regression:
    """Linear regression without a framework; ``values`` are the weights and their momentum."""

    def __init__(self):
        self.images, self.labels = dataset()
        self.values = np.zeros((2, WIDTH, 1))

    def state(self, **samples):
        registry = [(ElasticPartition, SamplerStateHandler), (GlobalBatches, StateDictHandler)]
        return HandledState(registry, values=self.values, steps=0, **samples)

    def gradient(self, state, indices):
        error = self.images[indices] @ state.values[0] - self.labels[indices]
        return self.images[indices].T @ error * (2 / len(indices))

    def step(self, state, indices, weight):
        gradients = allgather_object(self.gradient(state, indices) * weight, "gradients")
        self.descend(state, sum(gradients) / len(gradients))

    def descend(self, state, gradient):
        momentum = MOMENTUM * state.values[1] + gradient
        state.values = np.stack([state.values[0] - RATE * momentum, momentum])

    def parameters(self, state):
        return state.values

    def look(self):
        """All ranks call it before a training ends."""


class TorchRegression:
    """The same with torch."""

    sharded = False

    def __init__(self):
        import torch

        import hvd_cluster.torch as hvd

        torch.set_num_threads(1)
        self.torch, self.hvd = torch, hvd
        self.images, self.labels = map(torch.from_numpy, dataset())
        self.model = torch.nn.Linear(WIDTH, 1, bias=False).double()
        torch.nn.init.zeros_(self.model.weight)
        self.prepare()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=MOMENTUM)
        named = self.model.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, sharded=self.sharded)

    def prepare(self):
        """Change the model before the optimizer sees it."""

    def look(self):
        """All ranks call it before a training ends."""

    def state(self, **samples):
        if "sampler" in samples:
            samples = {"sampler": self.hvd.elastic.ElasticSampler(range(SAMPLES))}
        return self.hvd.elastic.TorchState(self.model, self.optimizer, steps=0, **samples)

    def step(self, state, indices, weight):
        self.optimizer.zero_grad()
        self.loss(indices, weight).backward()
        self.optimizer.step()

    def loss(self, indices, weight):
        return (self.model(self.images[indices]) - self.labels[indices]).square().mean() * weight

    def parameters(self, state):
        momentum = [entry.get("momentum_buffer") for entry in self.optimizer.state.values()]
        found = [self.model.weight, *filter(lambda each: each is not None, momentum)]
        return np.stack([each.detach().numpy().reshape(WIDTH, 1) for each in found])


class ShardedRegression(TorchRegression):
    """Each rank updates a part of the parameters, most of which are equal numbers with equal gradients."""

    sharded = True
    momentum = None

    def prepare(self):
        self.model.ballast = self.torch.nn.Parameter(self.torch.zeros(BALLAST).double())

    def loss(self, indices, weight):
        return super().loss(indices, weight) + self.model.ballast.sum()

    def step(self, state, indices, weight):
        super().step(state, indices, weight)
        self.look()

    def look(self):
        found = self.optimizer.state_dict()["state"]
        for tensors in (self.model.ballast, *(found[key]["momentum_buffer"] for key in found if key)):
            assert (tensors == tensors[0]).all(), "a part is of another step"
        self.momentum = found[0]["momentum_buffer"] if found else None

    def parameters(self, state):
        found = [self.model.weight, *([] if self.momentum is None else [self.momentum])]
        return np.stack([each.detach().numpy().reshape(WIDTH, 1) for each in found])


MODELS = {"numpy": Regression, "torch": TorchRegression, "sharded": ShardedRegression}


class Sampler:
    """Each rank's batches of its share of an epoch."""

    def __init__(self):
        self.name, self.samples = "sampler", ElasticPartition(range(SAMPLES))

    def batches(self, state):
        own = list(state.sampler)
        return (own[begin : begin + BATCH] for begin in range(0, len(own), BATCH))

    def epoch(self, state):
        return state.sampler.epoch

    def weight(self, state):
        return 1.0

    def advance(self, state, count):
        """Whether the epoch is over."""
        state.sampler.record_batch(0, count)
        if state.sampler.processed_num >= SAMPLES:
            state.sampler.set_epoch(state.sampler.epoch + 1)
            return True
        return False


class Batches:
    """The same batch of all ranks together, whatever their number is."""

    def __init__(self):
        self.name, self.samples = "batches", GlobalBatches(range(SAMPLES), BATCH + 1, seed=3)

    def batches(self, state):
        return iter(state.batches)

    def epoch(self, state):
        return state.batches.epoch

    def weight(self, state):
        return state.batches.weight

    def advance(self, state, count):
        """Whether the epoch is over."""
        state.batches.advance()
        return state.batches.step == 0


class Worker:
    """One worker, which says at once that it is there."""

    def __init__(self, folder, epochs):
        self.folder, self.epochs = folder, epochs
        self.name = os.environ["HOROVOD_WORKER_ID"]
        self.file = os.open(folder / self.name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.note(pid=os.getpid())

    def begin(self, model, samples):
        basics.init()
        self.model = MODELS[model]()
        self.samples = {"sampler": Sampler, "batches": Batches}[samples]()
        return self.model.state(**{self.samples.name: self.samples.samples})

    def note(self, **fields):
        """One write, so that a kill leaves no half line."""
        os.write(self.file, f"{json.dumps(fields)}\n".encode())

    def train(self, state):
        while self.samples.epoch(state) < self.epochs:
            for indices in self.samples.batches(state):
                if self.step(state, list(map(int, indices))):
                    return
                over = self.samples.advance(state, len(indices))
                state.commit()
                if over:
                    break

    def step(self, state, indices):
        """Whether the training shall end before this step."""
        time.sleep(STEP_SECONDS)
        parts = allgather_object((self.name, indices, (self.folder / "end").exists()), "parts")
        if any(ends for _, _, ends in parts):
            self.model.look()
            return True
        epoch = self.samples.epoch(state)
        self.model.step(state, indices, self.samples.weight(state))
        state.steps += 1
        digest = blake2b(self.model.parameters(state).tobytes(), digest_size=8).hexdigest()
        self.note(
            time=time.monotonic(),
            step=state.steps,
            round=basics.worlds().round,
            epoch=epoch,
            digest=digest,
            workers=[worker for worker, _, _ in parts],
            samples=[samples for _, samples, _ in parts],
        )
        return False


LARGE = "large"
"""A file with this name in the folder of a job: its worlds count as large."""


def train(folder, model, samples, epochs):
    if Path(folder, LARGE).exists():
        hello.MOST_DIRECT = 1
    worker = Worker(Path(folder), int(epochs))
    state = worker.begin(model, samples)
    run(worker.train)(state)
    worker.note(result=worker.model.parameters(state).ravel().tolist(), step=state.steps)


if __name__ == "__main__":
    train(*sys.argv[1:])
