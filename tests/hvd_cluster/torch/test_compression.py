"""Compressors: what they send, and that training with them learns as much."""

from functools import partial
from typing import ClassVar

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import InvalidRequestError
from hvd_cluster.core import memory
from hvd_cluster.gradients.compression import GradientCompressor
from hvd_cluster.torch.compression import Compressor
from hvd_cluster.torch.powersgd import PowerSGD
from tests.checks import each_check
from tests.hvd_cluster.torch.training import (
    assert_identical_everywhere,
    build,
    flat,
    sgd,
    train_alone,
    train_together,
    with_and_without_a_core_to_spare,
)

EPOCHS = 12
BATCH = 32
HELD_OUT = 597


def digits():
    """1,200 images of digits for training, and others for testing."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(1))
    images, labels = torch.tensor(bunch.data, dtype=torch.float32)[order] / 16, torch.tensor(bunch.target)[order]
    return (images[HELD_OUT:], labels[HELD_OUT:]), (images[:HELD_OUT], labels[:HELD_OUT])


def accuracy_with(compression):
    """The accuracy, on unseen digits, of a network that all ranks trained."""
    torch.manual_seed(2)
    layers = [torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model.named_parameters(),
        compression=compression,
    )
    (images, labels), (others, answers) = digits()
    for epoch in range(EPOCHS):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for part in order[hvd.rank() :: hvd.size()].split(BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[part]), labels[part]).backward()
            optimizer.step()
    assert_identical_everywhere(model)
    return (model(others).argmax(dim=1) == answers).float().mean().item()


class Halves(Compressor):
    """A user's compressor: not elementwise, so it gets each gradient on its own; float64 travels as float32."""

    shapes: ClassVar = []

    @staticmethod
    def compress(tensor):
        Halves.shapes.append(tuple(tensor.shape))
        return tensor.float(), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


class Signs(GradientCompressor):
    """The compressor of the documentation: it sends the signs, and adds the error to the next gradient."""

    def __init__(self, parameter):
        self.error = torch.zeros_like(parameter)

    def rounds(self, gradient):
        wanted = gradient + self.error
        sent = wanted.sign() * wanted.abs().mean()
        self.error = wanted - sent
        return (yield sent)


class Nothing(GradientCompressor):
    """Sends nothing at all."""

    def __init__(self, parameter):
        pass

    def rounds(self, gradient):
        return torch.zeros_like(gradient)
        yield


def digits_are_learned_as_well():
    plain = accuracy_with(hvd.Compression.none)
    assert plain > 0.94
    for compression in (
        hvd.Compression.fp16,
        hvd.Compression.bf16,
        hvd.Compression.powersgd,
        partial(PowerSGD, rank=2),
    ):
        assert accuracy_with(compression) > plain - 0.01, compression


def error_feedback_is_needed():
    """The counterpart of the test above: one direction alone, without the error, learns less."""

    class Forgetful(PowerSGD):
        def rounds(self, gradient):
            if self._factor is not None:
                self._error.zero_()
            return super().rounds(gradient)

    assert accuracy_with(partial(Forgetful, rank=1)) < accuracy_with(partial(PowerSGD, rank=1))


def check_sixteen_bits():
    for compression, dtype in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
        small, context = compression.compress(torch.tensor([1.0, -2.0]))
        assert small.dtype == dtype
        assert compression.decompress(small, context).dtype == torch.float32
        integers = torch.tensor([1, 2])
        assert compression.compress(integers)[0] is integers
        tensor = torch.full((3,), hvd.rank() + 1.0)
        assert hvd.allreduce(tensor, compression=compression, op=hvd.Sum).dtype == torch.float32

        def check(compression=compression):
            for options in ({}, {"groups": 2}, {"gradient_predivide_factor": 2.0}):
                together = train_together(sgd, torch.float32, compression=compression, **options)
                assert_identical_everywhere(together)
                torch.testing.assert_close(flat(together), flat(train_alone(sgd, torch.float32)), rtol=0.1, atol=0.02)

        with_and_without_a_core_to_spare(check)


def check_a_compressor_of_the_user():
    Halves.shapes.clear()
    together = train_together(sgd, compression=Halves)
    torch.testing.assert_close(flat(together), flat(train_alone(sgd)), rtol=1e-4, atol=1e-5)
    assert set(Halves.shapes) == {tuple(parameter.shape) for parameter in build().parameters()}


def check_a_compressor_with_state():
    together = train_together(sgd, compression=Signs)
    assert_identical_everywhere(together)
    assert not torch.equal(flat(together), flat(build()))
    assert torch.equal(flat(train_together(sgd, compression=Nothing)), flat(build()))


def matrix_of(seed, rank):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(20, rank, generator=generator, dtype=torch.float64) @ torch.randn(
        rank, 30, generator=generator, dtype=torch.float64
    )


def powersgd_steps(gradients, **options):
    """The results of PowerSGD for the average of the ranks' gradients, step by step."""
    parameter = torch.nn.Parameter(torch.zeros(20, 30, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], compression=partial(PowerSGD, rank=2), **options
    )
    results = []
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.synchronize()
        results.append(parameter.grad)
    return results


def check_powersgd_is_exact_for_low_rank():
    """A sum of rank 2 is exact at once; a sum of higher rank is exact over time."""
    mean = torch.stack([matrix_of(7, 2) * (rank + 1) for rank in range(hvd.size())]).mean(dim=0)
    (once,) = powersgd_steps([matrix_of(7, 2) * (hvd.rank() + 1)])
    torch.testing.assert_close(once, mean)
    (once,) = powersgd_steps([matrix_of(7, 2) * (hvd.rank() + 1)], op=hvd.Sum)
    torch.testing.assert_close(once, mean * hvd.size())
    steps = powersgd_steps([matrix_of(hvd.rank(), 8)] * 200)
    whole = torch.stack([matrix_of(rank, 8) for rank in range(hvd.size())]).mean(dim=0)
    assert (torch.stack(steps).mean(dim=0) - whole).norm() < 0.1 * whole.norm()
    assert (steps[0] - whole).norm() > 0.3 * whole.norm()


def check_powersgd_recovers():
    """After gradients of zeros, and after infinite ones, which leave no error behind."""
    good, bad = matrix_of(7, 2), torch.full((20, 30), torch.inf if hvd.rank() == 0 else 1.0, dtype=torch.float64)
    zeros, broken, *rest = powersgd_steps([torch.zeros_like(good), bad, good, good])
    assert not zeros.any()
    assert not broken.isfinite().any()
    for result in rest:
        torch.testing.assert_close(result, good)


def check_powersgd_recovers_from_an_overflow_of_either_factor():
    """The earlier error, perhaps of another scale, is dropped; the factor stays."""
    parameter = torch.nn.Parameter(torch.zeros(20, 30))
    good = matrix_of(7, 2).float()
    compressor = PowerSGD(parameter, rank=2)
    factor = compressor._factor
    for broken_round in (0, 1):
        compressor._error.fill_(1.0)
        rounds = compressor.rounds(good)
        sent = next(rounds)
        for _ in range(broken_round):
            sent = rounds.send(sent)
        with pytest.raises(StopIteration) as end:
            rounds.send(torch.full_like(sent, torch.inf))
        assert not end.value.value.isfinite().any()
        assert not compressor._error.any()
        assert compressor._factor is factor


def check_loading_a_state_drops_the_error_of_compression():
    parameter = torch.nn.Parameter(torch.zeros(20, 30))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), compression=PowerSGD)
    parameter.grad = matrix_of(7, 8).float()
    optimizer.synchronize()
    assert optimizer._combiner.inventory.compressors[parameter]._error.any()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer._combiner.inventory.compressors[parameter]._error.any()


def check_powersgd_leaves_small_tensors_alone():
    parameters = [torch.zeros(40), torch.zeros(()), torch.zeros(5, 6), torch.zeros(0, 3), torch.zeros(8, 4, 3, 3)]
    compressors = [PowerSGD(torch.nn.Parameter(each)) for each in parameters]
    assert [each._factor is None for each in compressors] == [True, True, True, True, False]
    together = train_together(sgd, torch.bfloat16, compression=partial(PowerSGD, rank=1))
    assert_identical_everywhere(together)
    for rank in (0, True, 1.5):
        with pytest.raises(InvalidRequestError, match="rank="):
            PowerSGD(torch.zeros(3, 3), rank=rank)
    with pytest.raises(InvalidRequestError, match="has no compress"):
        hvd.allreduce(torch.zeros(3), compression=hvd.Compression.powersgd)


@each_check(globals())
@pytest.mark.parametrize("ranks", [3], indirect=True)  # one alone has nothing to compress
def test_on_all_ranks(ranks, check):
    ranks.run(check)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_learning_digits(ranks):
    for train in (digits_are_learned_as_well, error_feedback_is_needed):
        ranks.run(train)


@pytest.fixture
def kept_memory_goes():
    """The thread that keeps memory ends with the test, as in shutdown(), and not some seconds after it."""
    yield
    memory.results.close()


@pytest.mark.usefixtures("kept_memory_goes")
@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_memory_of_large_tensors_is_used_again(compression):
    def address(value):
        tensor = torch.full((1 << 20,), value)
        small, context = compression.compress(tensor)
        assert torch.equal(compression.decompress(small, context), tensor)
        return small.data_ptr()

    assert address(1.5) == address(2.5)


def test_a_compressed_tensor_keeps_its_layout_and_its_gradient():
    last = torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert hvd.Compression.fp16.compress(last)[0].is_contiguous(memory_format=torch.channels_last)
    recorded = torch.ones(1 << 20, requires_grad=True)
    hvd.Compression.fp16.compress(recorded)[0].sum().backward()
    assert torch.equal(recorded.grad, torch.ones(1 << 20))
