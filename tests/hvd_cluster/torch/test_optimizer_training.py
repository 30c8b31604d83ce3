"""DistributedOptimizer together with what else training uses: AMP, schedulers, checkpoints, compilers, copies."""

import copy
import pickle
import threading
import warnings
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hvd_cluster.torch as hvd
from collectives.api import InvalidRequestError
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
    own,
    sgd,
    train_alone,
    train_together,
    with_and_without_a_core_to_spare,
)


def wrap(model, make_optimizer=sgd, **options):
    return hvd.DistributedOptimizer(make_optimizer(model.parameters()), model.named_parameters(), **options)


def train(model, optimizer, steps=range(STEPS), forward=None):
    for step in steps:
        images, labels = data(step)
        optimizer.zero_grad()
        loss_of(forward or model, own(images), own(labels)).backward()
        optimizer.step()


def assert_trained(model):
    torch.testing.assert_close(flat(model), flat(train_alone(sgd)), rtol=1e-9, atol=1e-12)
    assert_identical_everywhere(model)


def check_grad_scaler():
    """One rank overflows: all skip the step, and all scalers go down."""
    for clip in (False, True):
        for fused in (False, True):
            model = build(torch.float32)
            optimizer = wrap(model, lambda parameters, fused=fused: torch.optim.SGD(parameters, lr=0.1, fused=fused))
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for step in range(3):
                before = flat(model)
                images, labels = (own(rows) for rows in data(step, torch.float32))
                optimizer.zero_grad()
                overflow = 1e38 if step == 1 and hvd.rank() == hvd.size() - 1 else 1.0
                scaler.scale(loss_of(model, images, labels) * overflow).backward()
                if clip:
                    optimizer.synchronize()
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    with optimizer.skip_synchronize():
                        scaler.step(optimizer)
                else:
                    scaler.step(optimizer)
                scaler.update()
                assert torch.equal(flat(model), before) == (step == 1)
                assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)
                assert_identical_everywhere(model)


def check_unscaling_before_gradients_are_combined():
    """Otherwise each rank looks for infinities in its own gradients only."""

    def check():
        model = build(torch.float32)
        optimizer = wrap(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(2):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, *(own(rows) for rows in data(step, torch.float32)))).backward()
            scaler.unscale_(optimizer)
            if hvd.size() > 1:
                with pytest.raises(InvalidRequestError, match=r"unscale_\(\) was called before .*synchronize\(\)"):
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scaler.scale(loss_of(model, *(own(rows) for rows in data(step, torch.float32)))).backward()
            scaler.step(optimizer)
            scaler.update()
        assert_identical_everywhere(model)

    with_and_without_a_core_to_spare(check)


def check_scaled_steps_without_a_backward_on_one_rank():
    """Also after a step that was skipped, whether the optimizer or only the model has thrown its gradients away."""

    def check():
        for clear in (lambda model, optimizer: optimizer.zero_grad(), lambda model, optimizer: model.zero_grad()):
            model = torch.nn.Linear(2, 1, bias=False)
            torch.nn.init.zeros_(model.weight)
            optimizer = wrap(model, lambda parameters: torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for factor in (1.0, 1e38, 1.0):
                clear(model, optimizer)
                loss = scaler.scale(model(torch.ones(1, 2)).sum() * factor)
                if hvd.rank() == 0 or factor > 1:
                    (loss * factor).backward()
                scaler.step(optimizer)
                scaler.update()
            assert model.weight.tolist() == [[-2.0, -2.0]]
            assert scaler.get_scale() == 4.0

    with_and_without_a_core_to_spare(check)


def check_scaled_steps_equal_plain_ones():
    def check():
        model, plain = build(torch.float32), build(torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer, other = wrap(model), wrap(plain)
        for step in range(3):
            images, labels = (own(rows) for rows in data(step, torch.float32))
            optimizer.zero_grad()
            scaler.scale(loss_of(model, images, labels)).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                scaler.step(optimizer)
            scaler.update()
            other.zero_grad()
            loss_of(plain, images, labels).backward()
            other.step()
        torch.testing.assert_close(flat(model), flat(plain))

    with_and_without_a_core_to_spare(check)


def check_autocast():
    model = build(torch.float32)
    optimizer = wrap(model)
    for step in range(STEPS):
        images, labels = (own(rows) for rows in data(step, torch.float32))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, images, labels)
        loss.backward()
        optimizer.step()
    assert_identical_everywhere(model)
    torch.testing.assert_close(flat(model), flat(train_alone(sgd, torch.float32)), rtol=0.1, atol=0.02)


def check_lbfgs():
    """Its line search must take the same steps on all ranks."""
    for search in (None, "strong_wolfe"):

        def lbfgs(parameters, search=search):
            return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn=search)

        model, alone = build(), build()
        optimizer, plain = wrap(model, lbfgs), lbfgs(alone.parameters())
        for each, one, batch in ((model, optimizer, own), (alone, plain, lambda rows: rows)):

            def closure(each=each, one=one, batch=batch):
                one.zero_grad()
                loss = loss_of(each, *(batch(rows) for rows in data(0)))
                loss.backward()
                return loss

            for _ in range(3):
                one.step(closure)
        torch.testing.assert_close(flat(model), flat(alone), rtol=1e-6, atol=1e-8)
        assert_identical_everywhere(model)


def check_lbfgs_on_a_process_set():
    """The loss by which it decides is that of the ranks of the set: here, of each rank alone."""
    alone = [hvd.global_process_set] if hvd.size() == 1 else [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    model = build()
    optimizer = wrap(model, lambda parameters: torch.optim.LBFGS(parameters, max_iter=1), process_set=alone[hvd.rank()])
    images, labels = (own(rows) for rows in data(0))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, images, labels)
        loss.backward()
        return loss

    expected = loss_of(model, images, labels).detach()
    torch.testing.assert_close(optimizer.step(closure), expected)
    for process_set in alone if hvd.size() > 1 else ():
        hvd.remove_process_set(process_set)


def check_learning_rate_schedulers():
    for make in (
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    ):
        together, alone = build(), build()
        for model, optimizer, batch in (
            (together, wrap(together), own),
            (alone, sgd(alone.parameters()), lambda rows: rows),
        ):
            schedule = make(optimizer)
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, *(batch(rows) for rows in data(step))).backward()
                optimizer.step()
                schedule.step(*[1.0] * isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau))
        torch.testing.assert_close(flat(together), flat(alone), rtol=1e-9, atol=1e-12)


def check_state_dict_round_trip():
    whole = train_together(adam)
    model = build()
    optimizer = wrap(model, adam)
    train(model, optimizer, range(2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2))  # what is to be forgotten
    loss_of(model, *(own(rows) for rows in data(0))).backward()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()
    train(model, optimizer, range(2, STEPS))
    torch.testing.assert_close(flat(model), flat(whole), rtol=0, atol=0)
    plain = adam(build().parameters())
    plain.load_state_dict(optimizer.state_dict())  # also into one that is not wrapped


def check_loading_waits_for_gradients_in_flight():
    """Otherwise the next gradients could not use their names."""
    engine, main = basics.engine(), threading.get_ident()
    progress, callers = engine._progress, engine._callers
    held, sent, over = threading.Event(), threading.Event(), threading.Event()

    def hold():
        """Nothing moves until a caller waits for it."""
        with progress._driving.lock:
            held.set()
            sent.wait()
            while main not in callers and not over.wait(0.001):
                pass

    model = build()
    optimizer = wrap(model)
    thread = threading.Thread(target=hold, daemon=True)
    with mock.patch.object(type(progress), "patient", False):
        thread.start()
        try:
            held.wait()
            loss_of(model, *(own(rows) for rows in data(0))).backward()
            sent.set()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
            train(model, optimizer, range(1))
        finally:
            sent.set()
            over.set()
            thread.join()


def check_copies_train_on():
    def check():
        for options in ({}, {"groups": 2}, {"op": hvd.Sum, "compression": hvd.Compression.fp16}):
            for clone in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
                model = build(torch.float64)
                optimizer = wrap(model, adam, **options)
                train(model, optimizer, range(2))
                model_copy, optimizer_copy = clone((model, optimizer))
                assert type(optimizer_copy).__bases__ == type(optimizer).__bases__
                assert optimizer_copy._parameter_names == {
                    one: optimizer._parameter_names[other]
                    for one, other in zip(model_copy.parameters(), model.parameters(), strict=True)
                }
                train(model_copy, optimizer_copy, range(2, 4))
                assert not torch.equal(flat(model), flat(model_copy))
                train(model, optimizer, range(2, 4))
                assert torch.equal(flat(model), flat(model_copy))
                assert_identical_everywhere(model_copy)

    with_and_without_a_core_to_spare(check)


def check_a_copy_finds_its_process_set():
    members = hvd.add_process_set([0]) if hvd.size() > 1 else hvd.global_process_set
    model = build()
    optimizer = pickle.loads(pickle.dumps(wrap(model, process_set=members)))
    assert optimizer._options.process_set is members
    stored = pickle.dumps(optimizer)
    if hvd.size() > 1:
        hvd.remove_process_set(members)
        with pytest.raises(ValueError, match="no process set has the ranks"):
            pickle.loads(stored)


def check_a_copy_for_all_ranks_is_for_those_of_the_new_job():
    members = hvd.global_process_set
    actual, members.ranks = members.ranks, [*range(hvd.size() + 1)]  # as in a job of one rank more
    try:
        stored = pickle.dumps(wrap(build()))
    finally:
        members.ranks = actual
    assert pickle.loads(stored)._options.process_set is members


def compiled_models():
    for backend in ("eager", "aot_eager"):
        model = build()
        train(model, wrap(model), forward=torch.compile(model, backend=backend))
        assert_trained(model)


class Checkpointed(torch.nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.model = build()
        self.use_reentrant = use_reentrant

    def forward(self, images):
        images = images.requires_grad_()
        middle = checkpoint(self.model[:2], images, use_reentrant=self.use_reentrant)
        return self.model[4:](checkpoint(self.model[2:4], middle, use_reentrant=self.use_reentrant))


def check_activation_checkpointing():
    def check():
        for use_reentrant in (False, True):
            model = Checkpointed(use_reentrant)
            train(model, wrap(model))
            assert_trained(model)

    with_and_without_a_core_to_spare(check)


def check_a_weight_in_two_checkpoints():
    """Its gradient comes once, or with reentrant backward once for each use."""

    def check():
        for use_reentrant, passes in ((False, 1), (True, 2)):
            layer = torch.nn.Linear(2, 2)
            optimizer = wrap(layer, lambda p: torch.optim.SGD(p, lr=1.0), backward_passes_per_step=passes)
            hvd.broadcast_parameters(layer.state_dict(), 0)
            for _ in range(2):
                value = torch.full((1, 2), hvd.rank() + 1.0, requires_grad=True)
                for _ in range(2):
                    value = checkpoint(layer, value, use_reentrant=use_reentrant)
                optimizer.zero_grad()
                value.sum().backward()
                optimizer.step()
            assert_identical_everywhere(layer)

    with_and_without_a_core_to_spare(check)


def check_shared_parameters():
    """One weight in two layers has one gradient; naming it twice is not an error."""

    def check():
        first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        second.weight = first.weight
        model = torch.nn.Sequential(first, second)
        hvd.broadcast_parameters(model.state_dict(), 0)
        named = list(model.named_parameters(remove_duplicate=False))
        assert len(named) == 4
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 3), hvd.rank() + step + 1.0)).square().sum().backward()
            optimizer.step()
        assert_identical_everywhere(model)

    with_and_without_a_core_to_spare(check)


def check_foreach_and_fused():
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):

        def make(parameters, options=options):
            return torch.optim.AdamW(parameters, lr=0.01, **options)

        torch.testing.assert_close(flat(train_together(make)), flat(train_alone(make)), rtol=1e-9, atol=1e-12)


def check_frozen_and_unfrozen_between_steps():
    """A frozen layer stays where it is, also one that shares a bucket, and goes on when it is trained again."""

    def check():
        model, alone = build(), build()
        optimizer = wrap(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(6):
            for each in (model, alone):
                each[2].requires_grad_(step not in (2, 3))
            images, labels = data(step)
            optimizer.zero_grad()
            plain.zero_grad()
            before = model[2].weight.detach().clone()
            loss_of(model, own(images), own(labels)).backward()
            loss_of(alone, images, labels).backward()
            optimizer.step()
            plain.step()
            assert torch.equal(model[2].weight, before) == (step in (2, 3))
        torch.testing.assert_close(flat(model), flat(alone), rtol=1e-9, atol=1e-12)

    with_and_without_a_core_to_spare(check)


def check_gradients_that_the_user_holds():
    """A tensor taken from ``.grad`` before the exchange is combined, too; the next step does not change it."""
    model = build()
    optimizer = wrap(model, lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none)
        loss_of(model, *(own(rows) for rows in data(0))).backward()
        held = [parameter.grad for parameter in model.parameters()]
        optimizer.step()
        assert all(mine is parameter.grad for mine, parameter in zip(held, model.parameters(), strict=True))
    kept = [gradient.clone() for gradient in held]
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    loss_of(model, *(own(rows) for rows in data(1))).backward()
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(held, kept, strict=True))


def check_memory_formats():
    """Gradients keep their layout, and elements do not change places, whether small or large."""
    for channels in (4, 130):
        torch.manual_seed(4)
        layer = torch.nn.Conv2d(channels, 64, 3).to(memory_format=torch.channels_last)
        optimizer = wrap(layer, lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        images = torch.randn(2, channels, 5, 5, generator=torch.Generator().manual_seed(hvd.rank()))
        layer(images.to(memory_format=torch.channels_last)).square().sum().backward()
        expected = hvd.allreduce(layer.weight.grad)
        layout = layer.weight.grad.stride()
        optimizer.synchronize()
        assert layer.weight.grad.stride() == layout
        torch.testing.assert_close(layer.weight.grad, expected)


def check_second_order_gradients():
    model = build()
    optimizer = wrap(model)
    images, labels = (own(rows) for rows in data(0))
    loss_of(model, images, labels).backward(create_graph=True)
    optimizer.step()
    assert_identical_everywhere(model)
    for parameter in model.parameters():
        parameter.grad = None


def check_the_names_of_tensors_in_flight():
    """Messages about stalls and mismatches have these names."""
    seen = []
    unsubscribe = basics.engine().events.subscribe(lambda event: seen.append(getattr(event, "name", "")))
    model = build()
    train(model, wrap(model), range(1))
    unsubscribe()
    assert any(name.endswith("gradients.4.bias..0.weight") for name in seen) == (hvd.size() > 1)


@each_check(globals())
@pytest.mark.parametrize("ranks", [1, 3], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)


@pytest.mark.leaves("shared_memory")  # torch.compile makes semaphores, which stay as long as the ranks
@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
def test_compiled_models(ranks):
    ranks.run(compiled_models)
