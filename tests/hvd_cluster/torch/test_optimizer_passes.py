"""DistributedOptimizer: gradients between backward and the step."""

import warnings
from contextlib import nullcontext
from itertools import product

import pytest
import torch

import hvd_cluster.torch as hvd
from hvd_cluster.core import basics
from tests.checks import each_check
from tests.hvd_cluster.torch.training import (
    BATCH,
    STEPS,
    agreed,
    assert_identical_everywhere,
    build,
    data,
    flat,
    loss_of,
    one_parameter,
    own,
    sgd,
    train_alone,
    with_and_without_a_core_to_spare,
)


def double(parameter):
    parameter.grad.mul_(2)


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
    """By the optimizer or by the model, on all ranks or on one; most of them are in flight during backward."""

    def throw(by_model, parameters, optimizer, set_to_none):
        if not by_model:
            optimizer.zero_grad(set_to_none)
        for parameter in parameters if by_model else ():
            parameter.grad = None

    def check():
        for by_model, everywhere, set_to_none in product((False, True), repeat=3):
            parameters, optimizer = several_parameters()
            (sum(each.sum() for each in parameters) * 5).backward()
            assert optimizer._combiner.is_in_flight == (hvd.size() > 1 and not basics.engine().patient)
            if everywhere or hvd.rank() == 0:
                throw(by_model, parameters, optimizer, set_to_none)
                sum(each.sum() for each in parameters).backward()
            optimizer.step()
            own = 1.0 if everywhere else 5.0
            assert values(parameters) == [-1.0 - own * (hvd.size() - 1)] * len(parameters)
            for _ in range(2):
                optimizer.zero_grad()
                sum(each.sum() for each in parameters).backward()
                optimizer.step()
            assert values(parameters) == [-1.0 - own * (hvd.size() - 1) - 2 * hvd.size()] * len(parameters)

    with_and_without_a_core_to_spare(check)


def several_parameters():
    """In several buckets, of which all but that of the first parameter travel during backward."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (40_000, 3, 80_000, 40_000, 5)]
    return parameters, agreed(hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum))


def values(parameters):
    assert all(bool((each == each[0]).all()) for each in parameters)
    return [each[0].item() for each in parameters]


def replace(parameter):
    parameter.grad = parameter.grad * 2


def replace_data(parameter):
    parameter.grad.data = parameter.grad.data * 2


def double_data(parameter):
    parameter.grad.data.mul_(2)


def double_in_numpy(parameter):
    parameter.grad.numpy()[:] *= 2


def double_a_view(parameter):
    parameter.grad.data.view(-1).detach()[:].mul_(2)


def check_each_change_counts_with_and_without_a_core_to_spare():
    """Also of one parameter of many, on one rank alone, and where the version of the tensor does not show it."""

    def check():
        for change in (double, replace, replace_data, double_data, double_in_numpy, double_a_view):
            for everywhere in (True, False):
                parameters, optimizer = several_parameters()
                chosen = parameters[1::2]
                for _ in range(3):
                    optimizer.zero_grad()
                    sum(each.sum() for each in parameters).backward()
                    assert all(bool((each.grad == 1).all()) for each in parameters)
                    if everywhere or hvd.rank() == 0:
                        for each in chosen:
                            change(each)
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        optimizer.step()
                changed = 2 * hvd.size() if everywhere else hvd.size() + 1
                for each in parameters:
                    expected = changed if any(each is one for one in chosen) else hvd.size()
                    assert values([each]) == [-3.0 * expected]

    with_and_without_a_core_to_spare(check)


def check_gradients_clipped_without_synchronize():
    def check():
        parameters, optimizer = several_parameters()
        for _ in range(3):
            optimizer.zero_grad()
            (sum(each.sum() for each in parameters) * 3).backward()
            for each in parameters:
                each.grad.data.clamp_(-1, 1)
            optimizer.step()
        assert values(parameters) == [-3.0 * hvd.size()] * len(parameters)
        optimizer.zero_grad()
        sum(each.sum() for each in parameters).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        assert norm.item() == pytest.approx(sum(each.numel() for each in parameters) ** 0.5, rel=1e-4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        expected = -3.0 * hvd.size() - hvd.size() / (norm.item() + 1e-6)
        assert values(parameters) == pytest.approx([expected] * len(parameters), rel=1e-5)

    with_and_without_a_core_to_spare(check)


def check_passes_that_the_model_throws_away():
    """Such as the passes of a generator through its discriminator: they do not count."""

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


def check_gradients_that_are_changed_before_the_step():
    """The change counts, with a warning."""

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
                with pytest.warns(match=changed) if hvd.size() > 1 else nullcontext():
                    optimizer.step()
                assert parameter.tolist() == [-factor * hvd.size()] * 3
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


def check_gradients_that_a_hook_changes_in_time():
    """A hook that is older than the wrapper, or a change between two passes, comes before the gradient travels."""

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


def check_a_parameter_frozen_after_backward():
    def check():
        parameter, optimizer = one_parameter(hvd.Average)
        (parameter * (hvd.rank() + 1)).sum().backward()
        parameter.requires_grad_(False)
        optimizer.step()
        assert parameter.tolist() == [-(hvd.size() + 1) / 2] * 3

    with_and_without_a_core_to_spare(check)


def check_passes_that_are_left_over():
    """After an epoch of six batches: said once, with the numbers, in the step or where they are thrown away."""

    def train(parameter, passes):
        for _ in range(passes):
            parameter.sum().backward()

    def check():
        numbers = r"2 of backward_passes_per_step=4 backward passes"
        said = (lambda text: pytest.warns(match=text)) if hvd.size() > 1 else (lambda _: nullcontext())
        for is_used in (True, False):
            parameter, optimizer = one_parameter()
            optimizer.set_backward_passes_per_step(4)
            for epoch in range(2):
                train(parameter, 4)
                optimizer.step()
                optimizer.zero_grad()
                train(parameter, 2)
                action = rf"step\(\) combines .*{numbers}" if is_used else rf"zero_grad\(\) throws away .*{numbers}"
                with said(action) if epoch == 0 else nullcontext():
                    optimizer.step() if is_used else optimizer.zero_grad()
                optimizer.zero_grad()
            assert parameter.tolist() == [-2.0 * (6 if is_used else 4) * hvd.size()] * 3
        parameter, optimizer = one_parameter()
        optimizer.set_backward_passes_per_step(4)
        train(parameter, 2)
        parameter.grad = None
        optimizer.zero_grad()

    with_and_without_a_core_to_spare(check)


def check_passes_left_over_that_go_into_the_next_epoch():
    def check():
        parameter, optimizer = one_parameter()
        optimizer.set_backward_passes_per_step(4)
        for _ in range(4):
            parameter.sum().backward()
        with pytest.raises(
            AssertionError, match=r"backward_passes_per_step=4 times .*left over at the end of an epoch"
        ):
            parameter.sum().backward()
        optimizer.synchronize()

    if hvd.size() > 1:
        with_and_without_a_core_to_spare(check)


def check_changing_the_passes_loses_no_gradient():
    def check():
        parameter, optimizer = one_parameter()
        parameter.sum().backward()
        optimizer.set_backward_passes_per_step(1)
        optimizer.step()
        assert parameter.tolist() == [-hvd.size()] * 3

    with_and_without_a_core_to_spare(check)


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


@each_check(globals())
@pytest.mark.parametrize("ranks", [1, 3], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)
