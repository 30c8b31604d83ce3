"""The models that the jobs of a campaign train: one regression, by hand and with each framework."""

import os

import numpy as np

from hvd_cluster.elastic.batches import GlobalBatches
from hvd_cluster.elastic.handlers import HandledState, SamplerStateHandler, StateDictHandler
from hvd_cluster.elastic.loop import run
from hvd_cluster.elastic.sampler import ElasticPartition
from hvd_cluster.ops.objects import allgather_object

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
    """Linear regression without a framework; ``values`` are the weights and their momentum.

    ``run`` decorates the training function.
    """

    run = staticmethod(run)

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

    run = staticmethod(run)
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


class KerasRegression:
    """The same with Keras, on its backend for torch."""

    def __init__(self):
        os.environ["KERAS_BACKEND"] = "torch"
        import keras

        import hvd_cluster.keras as hvd

        keras.backend.set_floatx("float64")
        self.hvd, self.run = hvd, hvd.elastic.run
        self.images, self.labels = dataset()
        layers = [keras.layers.Input((WIDTH,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        self.model = keras.Sequential(layers)
        self.optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=MOMENTUM))
        self.model.compile(self.optimizer, loss="mse")
        self.optimizer.build(self.model.trainable_variables)

    def look(self):
        """All ranks call it before a training ends."""

    def state(self, **samples):
        return self.hvd.elastic.KerasState(self.model, steps=0, **samples)

    def step(self, state, indices, weight):
        weights = np.full(len(indices), weight)
        self.model.train_on_batch(self.images[indices], self.labels[indices], sample_weight=weights)

    def parameters(self, state):
        """Keras has the momentum times the rate, with another sign."""
        [weights], [*_, momentum] = self.model.get_weights(), self.optimizer.variables
        return np.stack([weights, np.asarray(momentum.numpy()) / -RATE])


MODELS = {"numpy": Regression, "torch": TorchRegression, "sharded": ShardedRegression, "keras": KerasRegression}
