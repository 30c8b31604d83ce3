"""A small training, on one process and on many, and what must come out."""

from unittest import mock

import torch

import hvd_cluster.torch as hvd
from hvd_cluster.core import basics

STEPS = 5
BATCH = 6


def build(dtype=torch.float64):
    torch.manual_seed(5)
    layers = [torch.nn.Linear(7, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)]
    return torch.nn.Sequential(*layers).to(dtype)


def data(step, dtype=torch.float64):
    """The joint batch of all ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    count = BATCH * hvd.size()
    return torch.randn(count, 7, generator=generator).to(dtype), torch.randint(0, 3, (count,), generator=generator)


def own(rows):
    return rows[hvd.rank() * BATCH : (hvd.rank() + 1) * BATCH]


def loss_of(model, images, labels):
    return torch.nn.functional.cross_entropy(model(images), labels)


def train_alone(make_optimizer, dtype=torch.float64):
    model = build(dtype)
    optimizer = make_optimizer(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *data(step, dtype)).backward()
        optimizer.step()
    return model


def train_together(make_optimizer, dtype=torch.float64, **options):
    model = build(dtype)
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(model.parameters()), named_parameters=model.named_parameters(), **options
    )
    for step in range(STEPS):
        images, labels = data(step, dtype)
        optimizer.zero_grad()
        loss_of(model, own(images), own(labels)).backward()
        optimizer.step()
    return model


def flat(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def assert_identical_everywhere(model):
    everybody = hvd.allgather(flat(model).reshape(1, -1))
    assert all(torch.equal(everybody[0], row) for row in everybody)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def with_and_without_a_core_to_spare(check):
    """``check`` run twice: with an engine that moves gradients during backward, and with one that does not."""
    engine = basics.engine()
    for patient in (True, False):
        with mock.patch.object(type(engine._progress), "patient", patient):
            check()


def one_parameter(op=hvd.Sum):
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], op=op)
    return parameter, agreed(optimizer)


def agreed(optimizer):
    """After a first step, from which on gradients travel during backward."""
    optimizer.synchronize()
    optimizer.zero_grad()
    return optimizer
