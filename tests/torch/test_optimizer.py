"""DistributedOptimizer: training on many ranks is training on one with all the data."""

import copy
import gc
import warnings

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import DuplicateNameError, InvalidRequestError, MismatchError
from hvd_cluster import basics
from tests.torch.training import (
    BATCH,
    STEPS,
    adam,
    assert_identical_everywhere,
    build,
    data,
    flat,
    loss_of,
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


def check_backward_passes_per_step():
    """Two passes over halves of the batch add up to one pass over twice the loss."""
    model = build()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), backward_passes_per_step=2
    )
    for step in range(STEPS):
        images, labels = (own(rows) for rows in data(step))
        optimizer.zero_grad()
        for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
            loss_of(model, images[half], labels[half]).backward()
        optimizer.step()
    alone = train_alone(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    torch.testing.assert_close(flat(model), flat(alone), rtol=1e-9, atol=1e-12)
    assert_identical_everywhere(model)


def check_too_many_passes():
    def check():
        model = build()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        images, labels = (own(rows) for rows in data(0))
        loss_of(model, images, labels).backward()
        with pytest.raises(AssertionError, match=r"backward_passes_per_step=1 .*synchronize.*requires_grad_\(False\)"):
            loss_of(model, images, labels).backward()
        optimizer.synchronize()
        optimizer.set_backward_passes_per_step(2)
        optimizer.zero_grad()
        loss_of(model, images, labels).backward()
        loss_of(model, images, labels).backward()
        optimizer.step()
        assert_identical_everywhere(model)

    if hvd.size() > 1:
        with_and_without_a_core_to_spare(check)


def check_gradients_that_are_thrown_away():
    """None is in flight unless it travels during backward."""

    def check():
        parameter, optimizer = one_parameter()
        (parameter * 5).sum().backward()
        if hvd.size() > 1 and not basics.engine().patient:
            with pytest.raises(AssertionError, match=r"in flight; call step.*requires_grad_\(False\)"):
                optimizer.zero_grad()
            optimizer.synchronize()
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
        assert parameter.tolist() == [-hvd.size()] * 3

    with_and_without_a_core_to_spare(check)


def check_passes_that_the_model_throws_away():
    """As those of a generator in its discriminator: they are not counted, and there is room for all that follow."""

    def check():
        for set_to_none in (True, False):
            layer = torch.nn.Linear(2, 1, bias=False)
            torch.nn.init.zeros_(layer.weight)
            inner = torch.optim.SGD(layer.parameters(), lr=1.0)
            optimizer = hvd.DistributedOptimizer(inner, backward_passes_per_step=2, op=hvd.Sum)
            for _ in range(3):
                layer.zero_grad(set_to_none)
                for _ in range(2):
                    layer(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                layer(torch.full((1, 2), 5.0)).sum().backward()
            assert layer.weight.tolist() == [[-6.0 * hvd.size()] * 2]
            layer.zero_grad()
            optimizer.zero_grad()

    with_and_without_a_core_to_spare(check)


def check_generator_and_discriminator():
    """The remedy that the message names, in either order of the steps."""

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


def check_gradients_that_are_changed_before_the_step():
    """Lost where they have gone already: an error. Elsewhere they count, with a warning about that."""

    def replace(parameter):
        parameter.grad = parameter.grad * 2

    def forget(parameter):
        parameter.grad = None

    def check():
        for change, factor in ((double, 2), (replace, 2), (forget, 0)):
            parameter, optimizer = one_parameter()
            changed = r"gradient of 'p' was changed .*synchronize\(\).*skip_synchronize\(\)"
            for by_hook in (False, True):
                with torch.no_grad():
                    parameter.zero_()
                optimizer.zero_grad()
                handle = parameter.register_post_accumulate_grad_hook(change) if by_hook else None
                parameter.sum().backward()
                handle.remove() if by_hook else change(parameter)
                if hvd.size() > 1:
                    early = not basics.engine().patient
                    with pytest.raises(InvalidRequestError, match=changed) if early else pytest.warns(match=changed):
                        optimizer.step()
                else:
                    early = False
                    optimizer.step()
                assert parameter.tolist() == [0.0 if early else -factor * hvd.size()] * 3
            for _ in range(2):
                with torch.no_grad():
                    parameter.zero_()
                optimizer.zero_grad()
                parameter.sum().backward()
                optimizer.synchronize()
                change(parameter)
                with optimizer.skip_synchronize():
                    optimizer.step()
                assert parameter.tolist() == [-factor * hvd.size()] * 3

    with_and_without_a_core_to_spare(check)


def double(parameter):
    parameter.grad.mul_(2)


def check_gradients_that_a_hook_changes_in_time():
    """Before they go: by a hook from before the wrapping, or in passes before the last."""

    def check():
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.register_post_accumulate_grad_hook(double)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=hvd.Sum)
        parameter.sum().backward()
        optimizer.step()
        assert parameter.tolist() == [-2.0 * hvd.size()] * 3
        parameter, optimizer = one_parameter()
        optimizer.set_backward_passes_per_step(2)
        parameter.sum().backward()
        parameter.grad.mul_(3)
        parameter.sum().backward()
        optimizer.step()
        assert parameter.tolist() == [-4.0 * hvd.size()] * 3

    with_and_without_a_core_to_spare(check)


def check_one_rank_alone_is_like_the_plain_optimizer():
    """As many passes and as little discipline as the user likes; what has no gradient stays where it is."""
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


def check_clipping_between_synchronize_and_step():
    model, alone = build(), build()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    plain = sgd(alone.parameters())
    for step in range(STEPS):
        images, labels = data(step)
        optimizer.zero_grad()
        plain.zero_grad()
        loss_of(model, own(images), own(labels)).backward()
        loss_of(alone, images, labels).backward()
        optimizer.synchronize()
        for each in (model, alone):
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.step()
    torch.testing.assert_close(flat(model), flat(alone), rtol=1e-9, atol=1e-12)


def check_step_after_synchronize_warns():
    model = build()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    loss_of(model, *(own(rows) for rows in data(0))).backward()
    optimizer.synchronize()
    upstream = (
        r"optimizer\.step\(\) called without optimizer\.skip_synchronize\(\) context after optimizer\.synchronize"
    )
    with pytest.warns(UserWarning, match=upstream):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def check_unused_parameter():
    """A gradient that some ranks, or all, do not have counts as zeros."""
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "rank0": torch.nn.Linear(2, 2)})
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    before = model["rank0"].bias.detach().clone()
    output = model["used"](torch.ones(1, 2))
    if hvd.rank() == 0:
        output = output + model["rank0"](torch.ones(1, 2))
    output.sum().backward()
    optimizer.step()
    torch.testing.assert_close(model["rank0"].bias.detach(), before - 1.0 / hvd.size())


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


def check_names_of_parameters():
    model = build()
    for op in (hvd.Average, hvd.Adasum if hvd.size() != 3 else hvd.Sum):
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), op=op)
        assert optimizer._parameter_names == {parameter: name for name, parameter in model.named_parameters()}
        del optimizer
    unnamed = hvd.DistributedOptimizer(sgd([next(model.parameters())]))
    assert list(unnamed._parameter_names.values()) == ["allreduce.noname.0.0"]


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


def check_param_groups_that_are_exchanged():
    first, second = build(), build()
    both = torch.nn.ModuleList([first, second])
    optimizer = hvd.DistributedOptimizer(sgd(first.parameters()), both.named_parameters())
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": list(second.parameters())})
    loss_of(second, *(own(rows) for rows in data(0))).backward()
    optimizer.step()
    assert not torch.equal(flat(second), flat(build()))
    assert_identical_everywhere(second)


def check_parameters_that_are_removed():
    """They stay where they are; names of new ones, which take their places, are still unique."""

    def check():
        sizes = (3, 40_000, 5, 40_000, 7)
        first, second, third, fourth, fifth = (torch.nn.Parameter(torch.zeros(size)) for size in sizes)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([{"params": [first, second]}, {"params": [third]}], lr=1.0)
        )

        def step(*parameters):
            optimizer.zero_grad()
            for parameter in parameters:
                (parameter * (hvd.rank() + 1)).sum().backward()
            optimizer.step()

        step(first, second, third)
        first.grad = second.grad = None
        del optimizer.param_groups[0]
        optimizer.add_param_group({"params": [fourth]})
        optimizer.add_param_group({"params": [fifth]})
        step(first, second, third, fourth, fifth)
        assert first.grad.tolist() == [hvd.rank() + 1] * 3
        if hvd.size() > 1:
            assert sorted(optimizer._combiner.names.values()) == [f"allreduce.noname.{number}.0" for number in range(3)]
            assert set(optimizer._combiner.buckets) == {third, fourth, fifth}
        mean = (hvd.size() + 1) / 2
        for parameter, steps in ((first, 1), (second, 1), (third, 2), (fourth, 1), (fifth, 1)):
            assert parameter[0].item() == -mean * steps

    with_and_without_a_core_to_spare(check)


def check_nothing_is_in_flight_after_a_mismatch():
    """The tensor that differs is the first to be waited for; the others are large, to take longer than the error."""

    def check():
        odd = 300_000 + hvd.rank()
        parameters = [torch.nn.Parameter(torch.zeros(length)) for length in (400_000, 400_000, odd)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
        for _ in range(3):
            sum(parameter.sum() for parameter in parameters).backward()
            with pytest.raises(MismatchError, match="300000 elements on rank 0, of 300001 elements on rank 1"):
                optimizer.step()

    if hvd.size() > 1:
        with_and_without_a_core_to_spare(check)


def check_parameters_added_and_unfrozen_later():
    first, second, third = (torch.nn.Linear(2, 2) for _ in range(3))
    model = torch.nn.ModuleList([first, second, third])
    hvd.broadcast_parameters(model.state_dict(), 0)
    second.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1))
    second.requires_grad_(True)
    optimizer.add_param_group({"params": list(third.parameters())})
    for step in range(3):
        optimizer.zero_grad()
        third(second(first(torch.full((1, 2), float(hvd.rank() + step))))).sum().backward()
        optimizer.step()
    assert_identical_everywhere(model)


def check_gradients_in_memory_of_the_user():
    """They stay there, whether small or large."""
    for rows in (2, 300):
        flat_gradients = torch.zeros(2 * rows * rows)
        parameters = [torch.nn.Parameter(torch.zeros(rows, rows)) for _ in range(2)]
        for parameter, part in zip(parameters, flat_gradients.split(rows * rows), strict=True):
            parameter.grad = part.view(rows, rows)
        for compression in (hvd.Compression.none, hvd.Compression.fp16):
            inner = torch.optim.SGD(parameters, lr=1.0)
            optimizer = hvd.DistributedOptimizer(inner, compression=compression, op=hvd.Sum)
            flat_gradients.zero_()
            optimizer.zero_grad(set_to_none=False)
            (parameters[0].sum() + 2 * parameters[1].sum()).backward()
            optimizer.synchronize()
            expected = torch.tensor([hvd.size(), 2 * hvd.size()]).repeat_interleave(rows * rows).float()
            assert torch.equal(flat_gradients, expected)
            del optimizer


def check_gradients_that_share_memory():
    """autograd gives both parameters the same memory as gradient, which must not be summed twice."""
    for rows in (2, 300):
        a, b = (torch.nn.Parameter(torch.ones(rows, rows)) for _ in range(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), [("a", a), ("b", b)], op=hvd.Sum)
        weight = torch.arange(float(rows * rows))
        ((a.view(-1) + b.view(-1)) * weight).sum().backward()
        optimizer.synchronize()
        expected = weight.view(rows, rows) * hvd.size()
        assert torch.equal(a.grad, expected)
        assert torch.equal(b.grad, expected)


def one_parameter(op=hvd.Sum):
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], op=op)
    return parameter, agreed(optimizer)


def agreed(optimizer):
    """After a first step, from which on gradients travel during backward."""
    optimizer.synchronize()
    optimizer.zero_grad()
    return optimizer


def check_a_parameter_frozen_after_backward():
    def check():
        parameter, optimizer = one_parameter(hvd.Average)
        (parameter * (hvd.rank() + 1)).sum().backward()
        parameter.requires_grad_(False)
        optimizer.step()
        assert parameter.tolist() == [-(hvd.size() + 1) / 2] * 3

    with_and_without_a_core_to_spare(check)


def check_changing_the_passes_loses_no_gradient():
    def check():
        parameter, optimizer = one_parameter()
        parameter.sum().backward()
        optimizer.set_backward_passes_per_step(1)
        optimizer.step()
        assert parameter.tolist() == [-hvd.size()] * 3

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
    """Whose parameters are called the same; beside one that nobody can reach any more, and a copy on one rank."""

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
    """And wraps it; the earlier model and its optimizer stay in use, or do not."""

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


def check_a_closure_that_synchronizes_itself():
    def check():
        parameter, optimizer = one_parameter()

        def closure():
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.synchronize()
            return parameter.sum()

        with optimizer.skip_synchronize():
            optimizer.step(closure)
        optimizer.step(closure)
        assert parameter.tolist() == [-2.0 * hvd.size()] * 3

    with_and_without_a_core_to_spare(check)


def check_gradients_that_were_combined_and_thrown_away():
    def check():
        parameter, optimizer = one_parameter()
        parameter.sum().backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        parameter.sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        assert parameter.tolist() == [-hvd.size()] * 3

    with_and_without_a_core_to_spare(check)


def check_a_step_that_failed_can_be_repeated():
    def check():
        parameter, optimizer = one_parameter()

        def step():
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.step()

        step()
        with basics.engine()._driver._driving:  # so that the name stays in flight
            handle = hvd.allreduce_async(torch.zeros(3), name="optimizer.gradient.p")
            with pytest.raises(DuplicateNameError):
                step()
        hvd.synchronize(handle)
        step()
        assert parameter.tolist() == [-2 * hvd.size()] * 3

    if hvd.size() > 1:
        with_and_without_a_core_to_spare(check)


def check_state_keeps_its_type():
    """float32 state of bfloat16 parameters."""
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([parameter])
    state = {"step": torch.tensor(1.0), "exp_avg": torch.full((3,), 0.1), "exp_avg_sq": torch.full((3,), 0.001)}
    if hvd.rank() == 0:
        optimizer.state[parameter] = state
    hvd.broadcast_optimizer_state(optimizer, 0)
    for key, value in state.items():
        assert optimizer.state[parameter][key].dtype == value.dtype
        assert torch.equal(optimizer.state[parameter][key], value)


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


@pytest.mark.leaves("environment")  # torch sets TORCHINDUCTOR_CACHE_DIR with its first optimizer
def test_wrapping_before_init():
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.DistributedOptimizer(sgd(build().parameters()))


def check_broadcast_parameters():
    torch.manual_seed(hvd.rank())
    for give in (lambda m: m.state_dict(), lambda m: m.named_parameters(), lambda m: list(m.parameters())):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        hvd.broadcast_parameters(give(model), root_rank=hvd.size() - 1)
        assert_identical_everywhere(model)
    for wrong in (3, torch.ones(2), ["name"]):
        with pytest.raises(InvalidRequestError):
            hvd.broadcast_parameters(wrong, 0)


def check_only_an_optimizer_has_a_state():
    for wrong in (build(), None):
        with pytest.raises(InvalidRequestError, match=r"optimizer is a \w+; give a torch\.optim\.Optimizer"):
            hvd.broadcast_optimizer_state(wrong, 0)


def check_broadcast_optimizer_state():
    """One rank restored, the others fresh, and the other way round."""
    for root in (0, hvd.size() - 1):
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5 if hvd.rank() == root else 0.1)
        if hvd.rank() == root:
            loss_of(model, *data(0)).backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root)
        assert optimizer.param_groups[0]["lr"] == 0.5
        moments = torch.cat([state["exp_avg"].reshape(-1) for state in optimizer.state.values()])
        everybody = hvd.allgather(moments.reshape(1, -1))
        assert all(torch.equal(everybody[root], row) for row in everybody)
        assert [state["step"].item() for state in optimizer.state.values()] == [1.0] * len(list(model.parameters()))
    stateless = torch.optim.SGD(build().parameters(), lr=float(hvd.rank()))
    hvd.broadcast_optimizer_state(stateless, 0)
    assert stateless.param_groups[0]["lr"] == 0.0


@pytest.mark.parametrize(
    "check",
    [value for name, value in sorted(globals().items()) if name.startswith("check_")],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
@pytest.mark.parametrize("ranks", [1, 2, 3], indirect=True)
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
