"""DistributedOptimizer: training on many ranks is training on one with all the data."""

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import DuplicateNameError, InvalidRequestError, MismatchError
from hvd_cluster.core import basics
from tests.checks import each_check
from tests.hvd_cluster.torch.training import (
    STEPS,
    adam,
    assert_identical_everywhere,
    build,
    data,
    flat,
    loss_of,
    one_parameter,
    own,
    sgd,
    train_alone,
    train_together,
    with_and_without_a_core_to_spare,
)


def check_equals_one_process_with_all_the_data():
    for make_optimizer in (sgd, adam):
        together, alone = train_together(make_optimizer), train_alone(make_optimizer)
        torch.testing.assert_close(flat(together), flat(alone), rtol=1e-9, atol=1e-12)
        assert_identical_everywhere(together)


def check_bit_identical_in_float32():
    assert_identical_everywhere(train_together(sgd, torch.float32))


def check_sum():
    def scaled(parameters):
        return torch.optim.SGD(parameters, lr=0.1 / hvd.size())

    together = train_together(scaled, op=hvd.Sum)
    torch.testing.assert_close(flat(together), flat(train_together(lambda p: torch.optim.SGD(p, lr=0.1))))


def check_fp16_compression():
    together = train_together(sgd, torch.float32, compression=hvd.Compression.fp16)
    assert_identical_everywhere(together)
    torch.testing.assert_close(flat(together), flat(train_alone(sgd, torch.float32)), rtol=0.05, atol=5e-3)


def check_one_rank_alone_is_like_the_plain_optimizer():
    """Any number of backward passes and zero_grad() calls; a parameter without a gradient does not change."""
    if hvd.size() > 1:
        return
    model, alone = build(), build()
    unused = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*model.parameters(), unused], lr=0.1, weight_decay=0.1))
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, weight_decay=0.1)
    for each, one in ((model, optimizer), (alone, plain)):
        loss_of(each, *data(0)).backward()
        one.zero_grad()
        loss_of(each, *data(0)).backward()
        loss_of(each, *data(1)).backward()
        one.step()
    assert torch.equal(flat(model), flat(alone))
    assert unused.grad is None
    assert torch.equal(unused, torch.ones(2))


def check_closure():
    model, alone = build(), build()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    plain = sgd(alone.parameters())
    images, labels = data(0)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, own(images), own(labels))
        loss.backward()
        return loss

    def plain_closure():
        plain.zero_grad()
        loss = loss_of(alone, images, labels)
        loss.backward()
        return loss

    for _ in range(STEPS):
        assert optimizer.step(closure) is not None
        plain.step(plain_closure)
    torch.testing.assert_close(flat(model), flat(alone), rtol=1e-9, atol=1e-12)


def check_keeps_class_state_and_groups():
    model = build()
    inner = adam(model.parameters())
    loss_of(model, *data(0)).backward()
    inner.step()
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert type(optimizer).__name__ == "AdamW"
    assert optimizer.param_groups is inner.param_groups
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


def check_nothing_is_in_flight_after_a_mismatch():
    """The step waits first for the tensor that differs. The others are large, so they take longer than the error."""

    def check():
        odd = 300_000 + hvd.rank()
        parameters = [torch.nn.Parameter(torch.zeros(length)) for length in (400_000, 400_000, odd)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
        for _ in range(3):
            sum(parameter.sum() for parameter in parameters).backward()
            with pytest.raises(
                MismatchError, match=r"shape \(300000,\) on rank 0, float32 of shape \(300001,\) on rank 1"
            ):
                optimizer.step()

    if hvd.size() > 1:
        with_and_without_a_core_to_spare(check)


def check_a_step_that_failed_can_be_repeated():
    def check():
        parameter, optimizer = one_parameter()

        def step():
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.step()

        step()
        with basics.engine()._progress._driving.lock:  # so that the name stays in flight
            handle = hvd.allreduce_async(torch.zeros(3), name="optimizer.gradient.p")
            with pytest.raises(DuplicateNameError):
                step()
        hvd.synchronize(handle)
        step()
        assert parameter.tolist() == [-2 * hvd.size()] * 3

    if hvd.size() > 1:
        with_and_without_a_core_to_spare(check)


def check_bad_arguments():
    model = build()
    named = list(model.named_parameters())
    optimizer = sgd(model.parameters())
    bad = {
        "pairs, .*, not int": {"named_parameters": 5},
        "pairs, .*, not Parameter": {"named_parameters": list(model.parameters())},
        "more than once": {"named_parameters": [("same", parameter) for _, parameter in named]},
        "not in named_parameters": {"named_parameters": named[:2]},
        "backward_passes_per_step=0": {"backward_passes_per_step": 0},
        "Average, Sum or Adasum": {"op": hvd.Max},
        "compression='fp16' has no compress and decompress": {"compression": "fp16"},
    }
    for word, options in bad.items():
        with pytest.raises(InvalidRequestError, match=word):
            hvd.DistributedOptimizer(optimizer, **options)
    for wrong in (None, hvd.DistributedOptimizer(optimizer)):
        with pytest.raises(InvalidRequestError, match="cannot wrap"):
            hvd.DistributedOptimizer(wrong)


@each_check(globals())
@pytest.mark.parametrize("ranks", [1, 3], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)


@pytest.mark.leaves("environment")  # torch sets TORCHINDUCTOR_CACHE_DIR with its first optimizer
def test_wrapping_before_init():
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.DistributedOptimizer(sgd(build().parameters()))
