"""Several DistributedOptimizers in one process: beside each other, and one after the other."""

import copy
import gc

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import InvalidRequestError
from tests.checks import each_check
from tests.hvd_cluster.torch.training import (
    BATCH,
    assert_identical_everywhere,
    build,
    data,
    flat,
    loss_of,
    one_parameter,
    own,
    sgd,
    with_and_without_a_core_to_spare,
)


def own_rows():
    return slice(hvd.rank() * BATCH, (hvd.rank() + 1) * BATCH)


def adversaries(distribute):
    torch.manual_seed(7)
    models = [torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()]
    models.append(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double())
    optimizers = [sgd(model.parameters()) for model in models]
    if distribute:
        optimizers = [
            hvd.DistributedOptimizer(optimizer, [(f"{place}.{name}", each) for name, each in model.named_parameters()])
            for place, (optimizer, model) in enumerate(zip(optimizers, models, strict=True))
        ]
    return *models, *optimizers


def check_generator_and_discriminator():
    """The remedy of the error message works."""

    def check():
        (together, alone), rows = (adversaries(distribute=True), adversaries(distribute=False)), BATCH * hvd.size()
        for step in range(4):
            noise = torch.randn(rows, 3, generator=torch.Generator().manual_seed(step)).double()
            for (generator, discriminator, of_generator, of_discriminator), batch in ((together, own), (alone, list)):
                given = noise[own_rows() if batch is own else slice(None)]
                made = generator(given)
                of_discriminator.zero_grad()
                (discriminator(made.detach()) - discriminator(given)).square().mean().backward()
                of_discriminator.step()
                of_generator.zero_grad()
                discriminator.requires_grad_(False)
                discriminator(made).square().mean().backward()
                discriminator.requires_grad_(True)
                of_generator.step()
        for one, other in zip(together[:2], alone[:2], strict=True):
            torch.testing.assert_close(flat(one), flat(other), rtol=1e-9, atol=1e-12)

    with_and_without_a_core_to_spare(check)


def check_scheduler_made_before_wrapping():
    model = build()
    inner = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, 0)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, *(own(rows) for rows in data(0))).backward()
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert len(calls) == 2
    assert_identical_everywhere(model)


def check_wrappers_that_replace_each_other():
    """The scheduler's ``step`` is in the attributes of all of them and must keep none alive."""

    def check():
        model = build()
        for _ in range(3):
            inner = sgd(model.parameters())
            schedule = torch.optim.lr_scheduler.StepLR(inner, 1)
            optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
            loss_of(model, *(own(rows) for rows in data(0))).backward()
            optimizer.step()
            schedule.step()
        assert_identical_everywhere(model)
        del optimizer
        before = flat(model)
        inner.step()
        assert not torch.equal(flat(model), before)

    with_and_without_a_core_to_spare(check)


def check_a_replaced_optimizer_that_one_rank_keeps():
    """Its model, with the same names, was replaced as well: a sweep over learning rates that keeps the best one."""

    def check():
        kept = []
        for step in range(4):
            model = build()
            optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
            loss_of(model, *(own(rows) for rows in data(step))).backward()
            optimizer.step()
            assert_identical_everywhere(model)
            if hvd.rank() == step % 2:
                kept.append((model, optimizer))

    with_and_without_a_core_to_spare(check)


def check_another_wrapper():
    def check():
        parameter, optimizer = one_parameter()
        inner = torch.optim.SGD([parameter], lr=1.0)
        optimizer = hvd.DistributedOptimizer(inner, [("p", parameter)], op=hvd.Sum)
        with pytest.raises(InvalidRequestError, match="not wrapped yet"):
            hvd.DistributedOptimizer(inner, [("p", parameter)])
        del optimizer
        optimizer = hvd.DistributedOptimizer(inner, [("p", parameter)], op=hvd.Sum)
        for _ in range(2):
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.step()
        assert parameter.tolist() == [-2.0 * hvd.size()] * 3

    with_and_without_a_core_to_spare(check)


def check_optimizers_side_by_side():
    """Their parameters have equal names. One rank also has copies that are not in use any more."""

    def check():
        for named in (True, False):
            layers = [torch.nn.Linear(2, 2, bias=False) for _ in range(2)]
            optimizers = []
            for layer in layers:
                torch.nn.init.ones_(layer.weight)
                names = layer.named_parameters() if named else None
                inner = torch.optim.SGD(layer.parameters(), lr=1.0)
                optimizers.append(hvd.DistributedOptimizer(inner, names, op=hvd.Sum))
                if hvd.rank() == 0:
                    copied = copy.deepcopy((layer, optimizers[-1]))
                    garbage = [copied]
                    garbage.append(garbage)
                    del copied, garbage
            for _ in range(3):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                held = [*layers] if hvd.rank() == 0 else layers[::-1]
                sum((place + 1) * layer.weight.sum() for place, layer in enumerate(held)).backward()
                for optimizer in optimizers:
                    optimizer.step()
            first = sum(1 if rank == 0 else 2 for rank in range(hvd.size()))
            second = sum(2 if rank == 0 else 1 for rank in range(hvd.size()))
            for layer, total in zip(layers, (first, second), strict=True):
                assert layer.weight.tolist() == [[1.0 - 3 * total] * 2] * 2

    gc.disable()
    try:
        with_and_without_a_core_to_spare(check)
    finally:
        gc.enable()


class Trained:
    """A small and a large parameter with an optimizer; each has the same names."""

    def __init__(self):
        self.named = [("small", torch.nn.Parameter(torch.zeros(3))), ("large", torch.nn.Parameter(torch.zeros(40_000)))]
        self.wrap()

    def wrap(self):
        self.optimizer = None
        inner = torch.optim.SGD([parameter for _, parameter in self.named], lr=1.0)
        self.optimizer = hvd.DistributedOptimizer(inner, self.named, op=hvd.Sum)

    def step(self):
        self.optimizer.zero_grad()
        sum(parameter.sum() for _, parameter in self.named).backward()
        self.optimizer.step()
        assert all(bool((parameter.grad == hvd.size()).all()) for _, parameter in self.named)


def check_one_rank_alone_wraps_its_model_again():
    """The others go on with the optimizer that they have, beside another one or not."""

    def check():
        for others in (0, 1):
            trained = [Trained() for _ in range(1 + others)]
            for step in range(4):
                if step == 2 and hvd.rank() == 0:
                    trained[-1].wrap()
                for each in trained:
                    each.step()

    with_and_without_a_core_to_spare(check)


def check_one_rank_alone_makes_its_model_again():
    """The earlier model and its optimizer stay in use, or do not."""

    def check():
        for keeps in (False, True):
            kept, trained = [], [Trained(), Trained()]
            for step in range(4):
                if step == 2 and hvd.rank() == 0:
                    kept += trained if keeps else []
                    trained[-1] = Trained()
                for each in trained:
                    each.step()

    with_and_without_a_core_to_spare(check)


def check_optimizers_of_the_same_parameters():
    def check():
        parameter, first = one_parameter()
        second = hvd.DistributedOptimizer(torch.optim.Adam([parameter]), [("q", parameter)])
        parameter.sum().backward()
        with pytest.raises(InvalidRequestError, match=r"parameter '.' is in two DistributedOptimizers"):
            second.step()
        del second
        first.synchronize()
        first.zero_grad()
        parameter.sum().backward()
        first.step()
        assert parameter.tolist() == [-hvd.size()] * 3

    if hvd.size() > 1:
        with_and_without_a_core_to_spare(check)


def check_a_shallow_copy():
    _, optimizer = one_parameter()
    with pytest.raises(InvalidRequestError, match=r"copy\.deepcopy"):
        copy.copy(optimizer)


@each_check(globals())
@pytest.mark.parametrize("ranks", [1, 3], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)


def test_a_new_rank_beside_survivors(fresh_pool):
    """In a new world survivors keep an optimizer that is not their first one; the new rank has only that one."""

    def make():
        model = build()
        return model, hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())

    def train(model, optimizer):
        loss_of(model, *(own(rows) for rows in data(0))).backward()
        optimizer.step()
        gradients = torch.cat([parameter.grad.reshape(1, -1) for parameter in model.parameters()], 1)
        assert hvd.allgather(gradients).unique(dim=0).shape[0] == 1

    def worlds():
        hvd.init()
        first, second = make(), make()
        train(*first)
        train(*second)
        is_new = hvd.rank() == 1
        del first
        if is_new:
            del second
        hvd.shutdown()
        hvd.init()
        if is_new:
            second = make()
        for _ in range(2):
            train(*second)

    fresh_pool(2).run(worlds)
