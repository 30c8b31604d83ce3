"""The training of a campaign: ``python -m tests.faults.jobs FOLDER MODEL SAMPLES EPOCHS``.

MODEL is one of MODELS; SAMPLES is ``sampler``, an ElasticSampler, or ``batches``, GlobalBatches. Each worker
appends to ``FOLDER/<worker>`` a line of JSON for each step that it finishes, with the samples of all ranks and a digest
of the parameters. It ends after EPOCHS, or when ``FOLDER/end`` exists.
"""

import json
import os
import time
from hashlib import blake2b
from pathlib import Path

from collectives.handshake import hello
from collectives.store import client
from hvd_cluster.core import basics
from hvd_cluster.elastic.batches import GlobalBatches
from hvd_cluster.elastic.sampler import ElasticPartition
from hvd_cluster.ops.objects import allgather_object
from tests.faults.jobs.models import BATCH, MODELS, SAMPLES
from tests.faults.jobs.traps import Traps, install_once
from tests.faults.points import OF_RANKS

STEP_SECONDS = 0.03


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
        hello.MOST_DIRECT = client.MOST_READERS = 1
    install_once(Traps(Path(folder), os.environ["HOROVOD_WORKER_ID"], _round), OF_RANKS)
    worker = Worker(Path(folder), int(epochs))
    state = worker.begin(model, samples)
    worker.model.run(worker.train)(state)
    result = worker.model.parameters(state).ravel().tolist()
    worker.note(result=result, step=state.steps, round=_round(), size=basics.size())


def _round():
    worlds = basics.worlds()
    return -1 if worlds is None else worlds.round
