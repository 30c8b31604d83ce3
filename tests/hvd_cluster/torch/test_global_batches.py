"""GlobalBatches with a DataLoader and a DistributedOptimizer: the training is the same on any number of ranks."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvd_cluster.torch as hvd
from tests.hvd_cluster.torch.training import build, flat, loss_of

SAMPLES = 17


def dataset():
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(SAMPLES, 7, generator=generator).double()
    return TensorDataset(images, torch.randint(0, 3, (SAMPLES,), generator=generator))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(batch_size, load, epochs=2):
    """As the example of the class; the loader is made again in the middle of the first epoch."""
    samples, model = dataset(), build()
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    batches = hvd.elastic.GlobalBatches(samples, batch_size, seed=5)
    state = hvd.elastic.TorchState(model, optimizer, batches=batches)
    state.sync()
    while batches.epoch < epochs:
        for images, labels in load(DataLoader(samples, batch_sampler=batches)):
            batches.weigh(loss_of(model, images, labels)).backward()
            optimizer.step()
            optimizer.zero_grad()
            batches.advance()
            state.commit()
            if (batches.epoch, batches.step) == (0, 2):
                break
    batches.advance()
    state.restore()
    assert (batches.epoch, batches.step) == (epochs, 0)
    return flat(model)


def alone(batch_size, epochs=2):
    samples, model = dataset(), build()
    optimizer = sgd(model)
    batches = hvd.elastic.GlobalBatches(samples, batch_size, seed=5)
    while batches.epoch < epochs:
        optimizer.zero_grad()
        images, labels = samples[batches.samples(batches.step)]
        loss_of(model, images, labels).backward()
        optimizer.step()
        batches.advance()
    return flat(model)


def train_and_compare(batch_size, load):
    torch.testing.assert_close(train(batch_size, load), alone(batch_size), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("batch_size", [5, 2])
def test_training_is_that_of_one_process(ranks, batch_size):
    """17 samples in batches of 5, the last of 2; or of 2, the last of 1, fewer than there may be ranks."""
    ranks.run(train_and_compare, batch_size, iter)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_loaders_may_be_ahead(ranks):
    """As the workers of a loader are, which fetch later steps early; the weight is that of the present one."""
    ranks.run(train_and_compare, 5, list)
