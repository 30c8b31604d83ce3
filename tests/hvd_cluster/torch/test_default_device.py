"""Under ``torch.set_default_device()`` with another device, tensors of the CPU travel as ever.

The tensors that this package makes for itself lie on the CPU, or beside those of the script. "meta" stands for a GPU.
"""

import pytest
import torch

import hvd_cluster.torch as hvd
from tests.checks import each_check
from tests.hvd_cluster.torch.training import assert_identical_everywhere

ELSEWHERE = torch.device("meta")
COUNT = 1 << 18  # of float32: 1 MB, so that memory is used again


def own(rows):
    return rows.chunk(hvd.size())[hvd.rank()]


def check_collectives():
    ones, rows = torch.ones(COUNT), torch.ones(2 * hvd.size(), requires_grad=True)
    sparse = torch.eye(3).to_sparse()
    with ELSEWHERE:
        total = hvd.allreduce(ones, op=hvd.Sum)
        gathered = hvd.allgather(ones)
        exchanged, splits = hvd.alltoall(rows, splits=[2] * hvd.size())
        summed = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)()
        hvd.broadcast(rows, 0).sum().backward()
        hvd.barrier()
    assert total[-1] == hvd.size()
    assert len(gathered) == COUNT * hvd.size()
    assert len(exchanged) == sum(splits.tolist()) == len(rows)
    assert summed.to_dense()[2, 2] == hvd.size()
    assert rows.grad.eq(float(hvd.rank() == 0)).all()


def check_batch_normalization():
    layer, images = hvd.SyncBatchNorm(3), torch.arange(24.0 * hvd.size()).view(-1, 3, 4)
    with ELSEWHERE:
        layer(own(images)).square().sum().backward()
    assert torch.allclose(layer.running_mean, 0.1 * images.mean((0, 2)))


def train(optimizer, model, images):
    with ELSEWHERE:
        for _ in range(3):
            optimizer.zero_grad()
            model(own(images)).square().mean().backward()
            optimizer.step()
    assert_identical_everywhere(model)


def check_optimizers():
    images = torch.arange(10.0 * 2 * hvd.size()).view(-1, 10)
    for options in ({}, {"compression": hvd.Compression.powersgd}, {"sharded": "host"}, {"sharded": "rank"}):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(10, 300), torch.nn.Linear(300, 200))
        adam = torch.optim.Adam(model.parameters())
        optimizer = hvd.DistributedOptimizer(adam, model.named_parameters(), **options)
        train(optimizer, model, images)
        del optimizer


def check_gradients_that_become_sparse():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    train(optimizer, model, torch.arange(2 * hvd.size()))


def check_a_loss_that_is_a_number():
    torch.manual_seed(1)
    model, images = torch.nn.Linear(3, 1), torch.arange(3.0 * hvd.size()).view(-1, 3) / 10
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), model.named_parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(own(images)).square().mean()
        loss.backward()
        return loss.item()

    with ELSEWHERE:
        optimizer.step(closure)
    assert_identical_everywhere(model)


@each_check(globals())
@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)
