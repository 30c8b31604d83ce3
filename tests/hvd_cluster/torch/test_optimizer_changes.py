"""DistributedOptimizer: gradients that are replaced, transposed, or absent between backward and the step."""

import pytest
import torch

import hvd_cluster.torch as hvd
from hvd_cluster.torch.compression import Compressor
from hvd_cluster.torch.optimizer.transfers import _own
from tests.checks import each_check
from tests.hvd_cluster.torch.training import agreed, with_and_without_a_core_to_spare

LARGE = 300


class Doubled(Compressor):
    @staticmethod
    def compress(tensor):
        return tensor * 2, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor / 2


def check_gradients_keep_no_memory():
    """Also with compressors, which make results of their own."""

    def check():
        for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.powersgd, Doubled):
            parameters = [torch.nn.Parameter(torch.zeros(LARGE, LARGE)) for _ in range(2)]
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), compression=compression)
            for _ in range(5):
                optimizer.zero_grad()
                sum(each.sum() for each in parameters).backward()
                optimizer.step()
            unused = optimizer._combiner.spares._unused.values()
            assert sum(map(len, unused)) <= len(parameters)

    with_and_without_a_core_to_spare(check)


def check_a_gradient_of_two_parameters_travels_as_copies():
    """One of them could be overwritten before the other is sent."""
    first, second = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    first.sum().backward()
    assert _own(first.grad) is first.grad
    second.grad = first.grad
    assert _own(first.grad) is not first.grad


def check_a_gradient_that_is_transposed():
    """By other strides for the same memory."""

    def check():
        parameters = [torch.nn.Parameter(torch.zeros(LARGE, LARGE)) for _ in range(3)]
        optimizer = agreed(hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum))
        rows = torch.arange(float(LARGE)).expand(LARGE, LARGE)
        sum((each * rows).sum() for each in parameters).backward()
        parameters[2].grad.data = parameters[2].grad.data.t()
        optimizer.step()
        assert torch.equal(parameters[1], -hvd.size() * rows)
        assert torch.equal(parameters[2], -hvd.size() * rows.t())

    with_and_without_a_core_to_spare(check)


def check_a_parameter_that_is_trained_again_before_the_step():
    """On all ranks, in two modes at once: rank 0 sends nothing ahead after a change."""

    def check():
        parameters = [torch.nn.Parameter(torch.ones(size)) for size in (40_000, 3, 5, 40_000)]
        inner = torch.optim.SGD(parameters, lr=1.0, weight_decay=0.5)
        optimizer = agreed(hvd.DistributedOptimizer(inner, op=hvd.Sum))
        with torch.no_grad():
            for each in parameters:
                each.fill_(1.0)
        for step in range(3):
            optimizer.zero_grad()
            parameters[2].requires_grad_(False)
            sum(each.sum() for each in parameters).backward()
            parameters[2].requires_grad_(True)
            if step == 0 and hvd.rank() == 0:
                parameters[3].grad.data.mul_(1.5)
            optimizer.step()
        assert parameters[2].tolist() == [0.125] * 5

    with_and_without_a_core_to_spare(check)


def check_a_gradient_whose_place_another_one_takes():
    """Python gives the new tensor the address of the one that is gone; that is no further pass."""

    def check():
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
        optimizer = agreed(hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum))
        for _ in range(10):
            sum(each.square().sum() for each in parameters).backward()
            for each in parameters:
                each.grad = None
                each.grad = torch.zeros(3)
            sum(each.sum() for each in parameters).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(each.tolist() == [1.0 - 10 * hvd.size()] * 3 for each in parameters)

    with_and_without_a_core_to_spare(check)


def check_a_sparse_gradient_grows_after_the_step():
    """Without zero_grad(), after a step in which the ranks had one row, or none."""
    for rows in (0, 1):
        weight = torch.nn.Parameter(torch.zeros(5, 2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
        for count in (2, rows if hvd.rank() == 0 else 0, 2):
            if count:
                torch.nn.functional.embedding(torch.arange(count), weight, sparse=True).sum().backward()
            optimizer.step()
            if count == 2:
                optimizer.zero_grad()
        assert weight.grad is None


def check_sparse_gradients_that_are_sent_again():
    """A rank that must send again has another order of sending: all ranks wait for sparse gradients in one order."""

    def check():
        layers = [torch.nn.Embedding(4, 2, sparse=True), torch.nn.Embedding(5, 2, sparse=True)]
        dense = torch.nn.Parameter(torch.zeros(40_000))
        groups = [[layers[0].weight], [dense], [layers[1].weight]]
        parameters = [each for group in groups for each in group]
        for each in parameters:
            torch.nn.init.zeros_(each)
        optimizer = agreed(hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum, groups=groups))
        for step in range(4):
            optimizer.zero_grad()
            (sum(layer(torch.tensor([1])).sum() for layer in layers) + dense.sum()).backward()
            if step == 3 and hvd.rank() == 0:
                dense.grad.data.mul_(2)
            optimizer.step()
        assert [layer.weight[1].tolist() for layer in layers] == [[-4.0 * hvd.size()] * 2] * 2
        assert set(dense.tolist()) == {-4.0 * hvd.size() - 1}

    with_and_without_a_core_to_spare(check)


@each_check(globals())
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)
