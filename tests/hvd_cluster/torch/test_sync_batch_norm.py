"""SyncBatchNorm is batch normalization of the joined batch: compared with torch's own on all rows in one process."""

import copy
import io
import warnings

import cloudpickle
import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import InvalidRequestError

CHANNELS = 3
SHAPES = {2: (), 3: (5,), 4: (4, 2), 5: (2, 3, 2)}
CASES = [
    {},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
    {"eps": 0.1, "momentum": 0.5},
]
KINDS = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}


def numbers(seed, *shape):
    """The same on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uneven(size):
    """Rows of each rank: 2, 4... and none on the last, where there are several."""
    return [2 * (position + 1) if position + 1 < size or size == 1 else 0 for position in range(size)]


def shares(whole, counts):
    return torch.split(whole.detach(), counts)


def pair(dimensions, process_set=hvd.global_process_set, **options):
    """A layer, and what it must be equal to, with the same parameters; float64."""
    reference = KINDS[dimensions](CHANNELS, **options).double()
    for seed, parameter in enumerate(reference.parameters()):
        parameter.data.copy_(numbers(seed, CHANNELS))
    return hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(reference), process_set), reference


def compare(layer, reference, whole, counts, position):
    """Forward and backward of ``layer`` on this rank's share of ``whole``, of ``reference`` on all of it."""
    factors = numbers(99, *whole.shape).to(whole)
    mine = shares(whole, counts)[position].clone(memory_format=torch.preserve_format).requires_grad_()
    whole = whole.detach().requires_grad_()
    expected, output = reference(whole), layer(mine)
    (expected * factors).sum().backward()
    (output * shares(factors, counts)[position]).sum().backward()
    torch.testing.assert_close(output, shares(expected, counts)[position])
    torch.testing.assert_close(mine.grad, shares(whole.grad, counts)[position])
    torch.testing.assert_close(dict(layer.named_buffers()), dict(reference.named_buffers()))
    return output


def assert_gradients_add_up(layer, reference, process_set=hvd.global_process_set):
    for own, expected in zip(layer.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(hvd.allreduce(own.grad, op=hvd.Sum, process_set=process_set), expected.grad)


def check_equals_the_joined_batch():
    counts = uneven(hvd.size())
    for dimensions, rest in SHAPES.items():
        for options in CASES:
            layer, reference = pair(dimensions, **options)
            for seed in range(3):
                whole = numbers(seed, sum(counts), CHANNELS, *rest) * 5 + 3
                compare(layer, reference, whole, counts, hvd.rank())
            assert_gradients_add_up(layer, reference)


def check_a_mean_far_from_zero():
    """Where sums of squares in float32 have no digit left."""
    counts = [8] * hvd.size()
    layer, reference = pair(4)
    whole = numbers(0, sum(counts), CHANNELS, 4, 2) + 1e4
    expected = reference(whole)
    output = layer.float()(shares(whole, counts)[hvd.rank()].float())
    torch.testing.assert_close(output.double(), shares(expected, counts)[hvd.rank()], atol=3e-3, rtol=0)
    torch.testing.assert_close(layer.running_var.double(), reference.running_var, atol=0, rtol=1e-4)


def check_the_average_of_gradients_trains_like_one_process():
    """Losses are averages over each rank's rows, as usual, of the same number on each."""
    counts, size = [4] * hvd.size(), hvd.size()
    torch.manual_seed(0)
    reference = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).double()
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(reference))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    single = torch.optim.SGD(reference.parameters(), lr=0.5)
    for seed in range(4):
        whole = numbers(seed, 4 * size, 4)
        for each, network, rows in (
            (single, reference, whole),
            (optimizer, model, shares(whole, counts)[hvd.rank()]),
        ):
            each.zero_grad()
            network(rows).square().mean().backward()
            each.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


class Branches(torch.nn.Module):
    """Two layers side by side, of which one runs twice, and whose backward passes interleave."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.BatchNorm1d(CHANNELS).double() for _ in range(2))

    def forward(self, rows):
        left, right = self.first(rows), self.second(rows.tanh())
        return self.first(left * right) + left.sigmoid()


def check_several_layers_in_flight():
    counts = uneven(hvd.size())
    reference = Branches()
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(reference))
    for seed in range(3):
        compare(model, reference, numbers(seed, sum(counts), CHANNELS), counts, hvd.rank())
    assert_gradients_add_up(model, reference)


def check_channels_last():
    counts = uneven(hvd.size())
    layer, reference = pair(4)
    whole = numbers(0, sum(counts), CHANNELS, 4, 2).to(memory_format=torch.channels_last)
    output = compare(layer, reference, whole, counts, hvd.rank())
    assert output.is_contiguous(memory_format=torch.channels_last)


def check_autocast():
    counts = [4] * hvd.size()
    layer, reference = pair(4)
    layer.float(), reference.float()
    convolution = torch.nn.Conv2d(2, CHANNELS, 1)
    with torch.no_grad():
        convolution.weight.copy_(numbers(1, CHANNELS, 2, 1, 1))
        convolution.bias.copy_(numbers(2, CHANNELS))
    whole = numbers(0, sum(counts), 2, 4, 2).float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = reference(convolution(whole).float())
        output = layer(convolution(shares(whole, counts)[hvd.rank()]))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, shares(expected, counts)[hvd.rank()].bfloat16())
    torch.testing.assert_close(dict(layer.named_buffers()), dict(reference.named_buffers()))
    output.float().square().sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


def check_16_bit_parameters():
    counts = [4] * hvd.size()
    for dtype in (torch.bfloat16, torch.float16):
        layer, reference = pair(2)
        layer.to(dtype)
        whole = numbers(0, sum(counts), CHANNELS).to(dtype)
        rows = shares(whole, counts)[hvd.rank()].requires_grad_()
        output = layer(rows)
        output.sum().backward()
        close = {"atol": 0.05, "rtol": 0.05}
        torch.testing.assert_close(output.double(), shares(reference(whole.double()), counts)[hvd.rank()], **close)
        assert {rows.grad.dtype, *(each.grad.dtype for each in layer.parameters())} == {dtype}


def check_evaluation_and_one_member_are_plain():
    rows = numbers(hvd.rank(), 6, CHANNELS)
    layer, reference = pair(2)
    compare(layer.eval(), reference.eval(), rows, [6], 0)
    assert torch.equal(layer(rows), reference(rows))
    alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())] if hvd.size() > 1 else [hvd.global_process_set]
    layer, reference = pair(2, alone[hvd.rank()])
    compare(layer, reference, rows, [6], 0)
    assert torch.equal(layer(rows), reference(rows))
    if hvd.size() > 1:
        other, _ = pair(2, alone[hvd.rank() - 1])
        with pytest.raises(InvalidRequestError, match="not a member"):
            other(rows)
    for each in alone:
        hvd.remove_process_set(each)


def check_process_sets():
    if hvd.size() < 3:
        return
    pairs = [hvd.add_process_set(members) for members in ([0, 2], [1, 2])]
    for made in pairs:
        layer, reference = pair(3, made)
        whole = numbers(0, 5, CHANNELS, 2)
        if made.included():
            compare(layer, reference, whole, [2, 3], made.rank())
            assert_gradients_add_up(layer, reference, made)
        else:
            with pytest.raises(InvalidRequestError, match="not a member"):
                layer(whole)
    assert [hvd.remove_process_set(made) for made in pairs] == [True, True]
    with pytest.raises(InvalidRequestError, match="not registered"):
        layer(whole)


def check_ranks_that_have_joined():
    layer, reference = pair(2)
    for step in range(hvd.rank() + 1):
        left = hvd.size() - step
        compare(layer, reference, numbers(step, 4 * left, CHANNELS), [4] * left, hvd.rank() - step)
    assert hvd.join() == hvd.size() - 1


def check_no_rank_has_rows():
    layer, reference = pair(2)
    compare(layer, reference, numbers(0, 0, CHANNELS), [0] * hvd.size(), hvd.rank())


def check_input_that_needs_no_gradient():
    layer, reference = pair(2)
    whole = numbers(0, 4 * hvd.size(), CHANNELS)
    layer(shares(whole, [4] * hvd.size())[hvd.rank()]).square().sum().backward()
    reference(whole).square().sum().backward()
    assert_gradients_add_up(layer, reference)


def check_bad_input():
    layer, _ = pair(2)
    if hvd.size() > 1:
        for wrong in (torch.ones(CHANNELS), torch.ones(4, CHANNELS + 1)):
            with pytest.raises(InvalidRequestError, match=r"needs input of shape \(N, 3, ...\)"):
                layer(wrong)
        with pytest.raises(InvalidRequestError, match="more than one value for each channel"):
            layer(numbers(0, 1 if hvd.rank() == 0 else 0, CHANNELS))
    assert layer.num_batches_tracked == 0
    check_channels_last()


def check_conversion():
    shared = torch.nn.BatchNorm2d(CHANNELS, eps=0.5, momentum=None)
    inner = torch.nn.Sequential(shared, torch.nn.BatchNorm1d(CHANNELS, affine=False, track_running_stats=False).eval())
    model = torch.nn.ModuleList([inner, shared, shared, torch.nn.InstanceNorm1d(CHANNELS), torch.nn.SyncBatchNorm(2)])
    before = model.state_dict()
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(model) is model
    assert all(left is right for left, right in zip(before.values(), model.state_dict().values(), strict=True)) or all(
        torch.equal(before[key], value) for key, value in model.state_dict().items()
    )
    kinds = [type(module) for module in (*inner, *model[1:])]
    assert kinds == [hvd.SyncBatchNorm] * 4 + [torch.nn.InstanceNorm1d, hvd.SyncBatchNorm]
    assert inner[0] is model[1] is model[2]
    assert inner[0].weight is shared.weight
    assert inner[0].running_mean is shared.running_mean
    assert (inner[0].eps, inner[0].momentum, inner[1].affine, inner[1].training) == (0.5, None, False, False)


def check_lazy_layers():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(CHANNELS), torch.nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="run the model once"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(model[0]) is torch.nn.BatchNorm1d
    model(torch.zeros(2, CHANNELS))
    assert type(hvd.SyncBatchNorm.convert_sync_batchnorm(model)[1]) is hvd.SyncBatchNorm


def check_copies_and_pickles():
    layer, reference = pair(2)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    copies = [copy.deepcopy(layer), cloudpickle.loads(cloudpickle.dumps(layer)), torch.load(saved, weights_only=False)]
    counts = [4] * hvd.size()
    for each in copies:
        assert each.process_set is hvd.global_process_set
        compare(each, copy.deepcopy(reference), numbers(0, sum(counts), CHANNELS), counts, hvd.rank())
    if hvd.size() > 1:
        made = hvd.add_process_set([0])
        layer, _ = pair(2, made)
        assert copy.deepcopy(layer).process_set is made
        unpickled = cloudpickle.loads(cloudpickle.dumps(made))
        assert (unpickled.ranks, unpickled.process_set_id) == ([0], None)
        hvd.remove_process_set(made)


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("ranks", [1, 3], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)


@pytest.mark.parametrize(
    "check", [check_equals_the_joined_batch, check_ranks_that_have_joined], ids=lambda check: check.__name__
)
def test_between_hosts(two_hosts, check):
    two_hosts.run(check)


def train_compiled():
    counts = [4] * hvd.size()
    layer, reference = pair(2)
    layer, reference = (torch.nn.Sequential(each, torch.nn.Tanh()) for each in (layer, reference))
    layer.compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as those about what torch cannot trace
        for seed in range(3):
            compare(layer, reference, numbers(seed, sum(counts), CHANNELS), counts, hvd.rank())
    assert_gradients_add_up(layer, reference)


@pytest.mark.leaves("shared_memory")  # torch's compiler keeps semaphores for as long as the ranks live
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_compiled(ranks):
    ranks.run(train_compiled)
