"""DistributedOptimizer(sharded=...): each rank updates its part, and all is as without it, to the last bit."""

import copy
import os
import pickle
import threading
import warnings
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import HorovodInternalError, InvalidRequestError, MismatchError, RefusedCallError
from hvd_cluster.core import basics
from hvd_cluster.gradients import buckets
from hvd_cluster.ops import objects
from hvd_cluster.torch.optimizer import shard, transfers
from hvd_cluster.torch.optimizer.shard import ELEMENT_WISE, is_element_wise
from tests.checks import each_check
from tests.hvd_cluster.torch.training import assert_identical_everywhere, data, flat, loss_of, own

PLACES = ("host", "rank")
# More than one block of each parameter, so that the ranks cut some of them.
WIDTH = 67


def build(dtype=torch.float32):
    torch.manual_seed(5)
    layers = [torch.nn.Linear(7, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 3)]
    return torch.nn.Sequential(*layers).to(dtype)


def wrapped(model, make, sharded, **options):
    named = [(f"{sharded}.{name}", parameter) for name, parameter in model.named_parameters()]
    return hvd.DistributedOptimizer(make(model.parameters()), named, sharded=sharded, **options)


def backward(model, optimizer, step, passes=1):
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    for number in range(passes):
        images, labels = data(10 * step + number, dtype)
        loss_of(model, own(images), own(labels)).backward()


def train(model, optimizer, steps, passes=1):
    for step in steps:
        backward(model, optimizer, step, passes)
        optimizer.step()


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.stride() == other.stride() and torch.equal(one, other)
    return one == other


def assert_same_training(make, models=build, steps=range(3), passes=1, train=train, **options):
    """Parameters and state are those without ``sharded``, on all ranks."""
    expected = models()
    plain = wrapped(expected, make, False, **options)
    train(expected, plain, steps, passes)
    for place in PLACES:
        model = models()
        optimizer = wrapped(model, make, place, **options)
        train(model, optimizer, steps, passes)
        assert torch.equal(flat(model), flat(expected)), place
        assert same(optimizer.state_dict(), plain.state_dict()), place
        if not options:
            assert_identical_everywhere(model)


def check_element_wise_optimizers():
    for kind in sorted(ELEMENT_WISE, key=lambda kind: kind.__name__):
        assert_same_training(lambda parameters, kind=kind: kind(parameters, lr=0.01))


def check_kernels():
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}, {"maximize": True}):
        assert_same_training(lambda parameters, options=options: torch.optim.Adam(parameters, lr=0.01, **options))
    for options in ({"fused": True}, {"nesterov": True, "momentum": 0.9}, {"momentum": 0.9, "foreach": True}):
        assert_same_training(lambda parameters, options=options: torch.optim.SGD(parameters, lr=0.01, **options))
    assert_same_training(torch.optim.RMSprop, steps=range(2))


def check_optimizers_of_whole_parameters():
    assert not is_element_wise(torch.optim.Adafactor)
    assert_same_training(lambda parameters: torch.optim.Adafactor(parameters, lr=0.01))


class Norms(torch.optim.SGD):
    """Divides each gradient by its norm: a part of it would have another one."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad / parameter.grad.norm()
        return super().step(closure)


class Declared(torch.optim.SGD):
    hvd_element_wise = True


def check_classes_of_the_user():
    assert not is_element_wise(Norms)
    assert is_element_wise(Declared)
    for kind, warnings_of in ((Norms, 1), (Declared, 0), (torch.optim.SGD, 0), (torch.optim.Adafactor, 0)):
        with mock.patch.object(shard.logger, "warning") as warning:
            wrapped(build(), kind, True)
        assert warning.call_count == warnings_of
    for kind in (Norms, Declared):
        assert_same_training(lambda parameters, kind=kind: kind(parameters, lr=0.01, momentum=0.9))


def check_other_dtypes_and_strides():
    assert_same_training(adam, lambda: build(torch.float64))
    assert_same_training(adam, lambda: build(torch.bfloat16))

    def convolutions():
        torch.manual_seed(6)
        layers = [torch.nn.Unflatten(1, (7, 1, 1)), torch.nn.Conv2d(7, 30, 3, padding=1), torch.nn.BatchNorm2d(30)]
        layers += [torch.nn.Conv2d(30, 3, 1), torch.nn.Flatten()]
        return torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)

    assert_same_training(adam, convolutions)


def check_options_of_the_wrapper():
    assert_same_training(momentum, passes=3, backward_passes_per_step=3)
    assert_same_training(momentum, compression=hvd.Compression.bf16)
    assert_same_training(adam, groups=2, gradient_predivide_factor=2.0)
    assert_same_training(adam, op=hvd.Sum)


def check_groups_of_parameters_and_schedulers():
    def grouped(parameters):
        first, *rest = parameters
        return torch.optim.AdamW([{"params": [first], "lr": 0.1, "weight_decay": 0.0}, {"params": rest}], lr=0.01)

    def train_with_schedule(model, optimizer, steps, passes):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in steps:
            train(model, optimizer, [step], passes)
            scheduler.step()

    assert_same_training(grouped, train=train_with_schedule)


def check_frozen_and_unused_parameters():
    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.frozen, self.unused = build(), torch.nn.Linear(3, 70), torch.nn.Linear(70, 70)
            self.frozen.requires_grad_(False)

        def forward(self, images):
            return self.used(images)

    assert_same_training(adam, Half)


def check_closures():
    def train_by_closures(model, optimizer, steps, passes):
        for step in steps:

            def closure(step=step):
                optimizer.zero_grad()
                images, labels = data(step, torch.float32)
                loss = loss_of(model, own(images), own(labels))
                loss.backward()
                return loss

            assert isinstance(optimizer.step(closure), torch.Tensor)

    assert_same_training(adam, train=train_by_closures)


def check_scalers():
    def train_with_scaler(model, optimizer, steps, passes):
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1)
        for step in steps:
            optimizer.zero_grad()
            images, labels = data(step, torch.float32)
            factor = torch.inf if step == 1 and hvd.rank() == hvd.size() - 1 else 1.0
            scaler.scale(loss_of(model, own(images), own(labels)) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() < 16.0 * 2 ** len(steps)

    assert_same_training(adam, train=train_with_scaler)
    assert_same_training(lambda parameters: torch.optim.Adam(parameters, fused=True), train=train_with_scaler)


def check_clipping():
    def train_and_clip(model, optimizer, steps, passes):
        for step in steps:
            backward(model, optimizer, step)
            if optimizer._options.sharded:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    norm = hvd.clip_grad_norm_(optimizer, 0.01)
                    optimizer.step()
            else:
                optimizer.synchronize()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                with optimizer.skip_synchronize():
                    optimizer.step()
            assert norm > 0.01
        backward(model, optimizer, 7)
        if not optimizer._options.sharded:
            optimizer.synchronize()
        clipped = hvd.clip_grad_norm_(model.parameters() if not optimizer._options.sharded else optimizer, 0.5, 1.0)
        assert torch.allclose(sum(each.grad.abs().sum() for each in model.parameters()), clipped.clamp(max=0.5))
        optimizer.zero_grad()

    assert_same_training(momentum, train=train_and_clip)


def check_added_parameters():
    def train_and_add(model, optimizer, steps, passes):
        train(model, optimizer, steps)
        torch.manual_seed(9)
        model.append(torch.nn.Linear(3, 5))
        optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 0.5})
        train(model, optimizer, steps)

    assert_same_training(adam, train=train_and_add)


def check_a_model_that_moved():
    def train_and_move(model, optimizer, steps, passes):
        train(model, optimizer, steps)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        train(model, optimizer, steps)

    assert_same_training(adam, train=train_and_move)


def check_a_model_that_other_processes_share():
    """As torch.multiprocessing does, where a rank gives it to a process that evaluates."""

    def train_and_share(model, optimizer, steps, passes):
        for step in steps:
            train(model, optimizer, [step])
            if hvd.rank() == 0:
                model.share_memory()

    assert_same_training(adam, train=train_and_share)


def check_the_full_state_goes_anywhere():
    for place in PLACES:
        model = build()
        optimizer = wrapped(model, adam, place)
        before = optimizer.state_dict()
        assert not before["state"]
        train(model, optimizer, range(3))
        root = hvd.size() - 1
        saved = hvd.full_state_dict(optimizer, root_rank=root)
        assert (saved is None) == (hvd.rank() != root)
        saved = hvd.broadcast_object(saved, root)
        assert same(saved, optimizer.state_dict())

        plain = copy.deepcopy(model)
        alone = adam(plain.parameters())
        alone.load_state_dict(copy.deepcopy(saved))
        again = copy.deepcopy(model)
        restored = wrapped(again, adam, place)
        restored.load_state_dict(copy.deepcopy(saved))
        assert same(restored.state_dict(), saved)
        for step in range(3, 5):
            backward(model, optimizer, step)
            optimizer.synchronize()
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                one.grad = other.grad.clone()
            with optimizer.skip_synchronize():
                optimizer.step()
            alone.step()
            backward(again, restored, step)
            restored.step()
        assert torch.equal(flat(plain), flat(model))
        assert torch.equal(flat(again), flat(model))
        assert same(alone.state_dict(), restored.state_dict())
        optimizer.load_state_dict(saved)
        assert same(optimizer.state_dict(), saved)


def check_the_state_of_the_root():
    for place in PLACES:
        model = build()
        optimizer = wrapped(model, adam, place)
        train(model, optimizer, range(2))
        expected = optimizer.state_dict()
        fresh = wrapped(build(), adam, f"{place}")
        if hvd.rank() == 0:
            fresh.load_state_dict(expected)
        hvd.broadcast_optimizer_state(fresh, root_rank=0)
        assert same(fresh.state_dict(), expected)
        optimizer.param_groups[0]["lr"] = 0.5 + hvd.rank()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        expected["param_groups"][0]["lr"] = 0.5
        assert same(optimizer.state_dict(), expected)


def check_each_rank_has_its_part_of_the_state_only():
    model = build()
    optimizer = wrapped(model, adam, True)
    train(model, optimizer, range(2))
    mine = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    total = sum(parameter.numel() for parameter in model.parameters())
    assert hvd.allreduce(torch.tensor(mine), op=hvd.Sum).item() == total
    assert mine <= total / hvd.size() + 64 * len(list(model.parameters()))
    if hvd.size() > 1:
        if hvd.rank() == 0:
            model[0].weight.data[0, 0] = 77.0
        hvd.barrier()
        assert model[0].weight[0, 0] == 77.0  # one memory for all


def check_process_sets():
    if hvd.size() < 3:
        return
    members = hvd.add_process_set([0, 2])
    for place in PLACES:
        model, expected = build(), build()
        optimizer = wrapped(model, adam, place, process_set=members)
        plain = wrapped(expected, adam, False, process_set=members)
        train(model, optimizer, range(3))
        train(expected, plain, range(3))
        assert torch.equal(flat(model), flat(expected))
        if members.included():
            assert same(optimizer.state_dict(), plain.state_dict())
        del optimizer, plain
    hvd.remove_process_set(members)


def check_parameters_that_differ():
    for place in PLACES:
        model = build()
        optimizer = wrapped(model, momentum, place)
        if hvd.size() > 1:
            with torch.no_grad():
                model[2].weight[3, 4] = float(hvd.rank())
            backward(model, optimizer, 0)
            with pytest.raises(
                InvalidRequestError, match=r"2\.weight' is not the same on all ranks.*broadcast_parameters"
            ):
                optimizer.step()
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        train(model, optimizer, range(2))
        assert_identical_everywhere(model)
        del optimizer


def check_a_step_that_fails_on_one_rank():
    class Failing(torch.optim.SGD):
        hvd_element_wise = True

        def step(self, closure=None):
            if self.fails:
                raise ArithmeticError("on purpose")
            return super().step(closure)

    for place in PLACES if hvd.size() > 1 else ():
        model = build()
        Failing.fails = False
        optimizer = wrapped(model, lambda parameters: Failing(parameters, lr=0.1), place)
        train(model, optimizer, range(1))
        backward(model, optimizer, 1)
        Failing.fails = hvd.rank() == 1
        with pytest.raises(ArithmeticError if Failing.fails else RefusedCallError, match="on purpose"):
            optimizer.step()
        Failing.fails = False
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        train(model, optimizer, range(2, 3))
        assert_identical_everywhere(model)
        del optimizer


def check_a_hook_that_fails_on_one_rank():
    def fail(*_):
        if hvd.rank() == hvd.size() - 1:
            raise ArithmeticError("on purpose")

    for place in PLACES if hvd.size() > 1 else ():
        model = build()
        optimizer = wrapped(model, momentum, place)
        train(model, optimizer, range(1))
        hook = optimizer.register_step_pre_hook(fail)
        backward(model, optimizer, 1)
        with pytest.raises((ArithmeticError, RefusedCallError), match="on purpose"):
            optimizer.step()
        hook.remove()
        train(model, optimizer, range(2, 3))
        assert_identical_everywhere(model)
        del optimizer


def check_bad_input():
    model = build()
    bad = {
        "LBFGS computes one direction": (torch.optim.LBFGS, {"sharded": True}),
        "SparseAdam needs sparse gradients": (torch.optim.SparseAdam, {"sharded": True}),
        "sharded='disk' must be False, True, 'host' or 'rank'": (momentum, {"sharded": "disk"}),
        "sharded=2 must be": (momentum, {"sharded": 2}),
        "redundancy=-1 must be None, for a copy on each host, or": (momentum, {"sharded": True, "redundancy": -1}),
        "redundancy=True must be None": (momentum, {"sharded": True, "redundancy": True}),
        "redundancy=1 has a use with sharded only": (momentum, {"sharded": False, "redundancy": 1}),
    }
    if hvd.size() != 3:
        bad["so it cannot be sharded; use Average or Sum"] = (momentum, {"sharded": True, "op": hvd.Adasum})
    for text, (make, options) in bad.items():
        with pytest.raises(InvalidRequestError, match=text):
            hvd.DistributedOptimizer(make(list(model.parameters())), **options)
    elsewhere = torch.nn.Parameter(torch.zeros(3, device="meta"))
    with pytest.raises(InvalidRequestError, match="on the devices cpu, meta"):
        hvd.DistributedOptimizer(momentum([*model.parameters(), elsewhere]), sharded=True)
    optimizer = wrapped(model, momentum, True)
    with pytest.raises(InvalidRequestError, match="not wrapped yet"):
        hvd.DistributedOptimizer(optimizer, sharded=True)
    pickle.dumps(optimizer)  # before it has shards
    train(model, optimizer, range(1))
    other = momentum(torch.nn.Linear(3, 4).parameters())
    with pytest.raises(ValueError, match="size of optimizer's group"):
        optimizer.load_state_dict(other.state_dict())
    if hvd.size() > 1:
        with pytest.raises(InvalidRequestError, match=r"keep its state_dict\(\)"):
            pickle.dumps(optimizer)
        with pytest.raises(InvalidRequestError, match=r"root_rank=9 is not one of the ranks"):
            hvd.full_state_dict(optimizer, root_rank=9)
    saved = copy.deepcopy(optimizer.state_dict())
    if hvd.size() > 1:
        saved["state"][0]["momentum_buffer"] = torch.zeros(2, 2)
        with pytest.raises(InvalidRequestError, match=r"momentum_buffer of 'True.0.weight' has the shape \(2, 2\)"):
            optimizer.load_state_dict(saved)
    train(model, optimizer, range(1, 2))


def check_ranks_that_differ():
    model = build()
    if hvd.size() > 1:
        named = [(f"differs.{name}", parameter) for name, parameter in model.named_parameters()]
        place = "host" if hvd.rank() else False
        optimizer = hvd.DistributedOptimizer(momentum(model.parameters()), named, sharded=place)
        backward(model, optimizer, 0)
        text = r"have neither groups nor sharded on rank 0, sharded='host' on .*the same arguments on all ranks"
        with pytest.raises(MismatchError, match=text):
            optimizer.step()


def check_elastic_state(places=PLACES):
    """restore() goes back to the last commit, save() makes one, and sync() keeps what is there."""
    for place in places:
        model, twin = build(), build()
        optimizer, plain = wrapped(model, adam, place), wrapped(twin, adam, False)
        state = hvd.elastic.TorchState(model, optimizer, batch=0)
        state.sync()
        train(model, optimizer, range(2))
        state.batch = 2
        state.save()
        state.commit()
        kept = flat(model).clone()
        train(model, optimizer, range(5, 7))
        assert not torch.equal(flat(model), kept)
        state.restore()
        assert torch.equal(flat(model), kept)
        state.sync()
        train(model, optimizer, range(2, 4))
        state.save()
        train(model, optimizer, range(5, 6))
        state.restore()
        state.restore()
        state.sync()
        train(model, optimizer, range(4, 5))
        state.sync()
        assert state.batch == 2
        train(twin, plain, range(5))
        assert torch.equal(flat(model), flat(twin))
        assert same(optimizer.state_dict(), plain.state_dict())
        if hvd.size() > 1:
            train(model, optimizer, range(5, 7))
            with pytest.raises(InvalidRequestError, match=r"make the elastic state before the first step"):
                hvd.elastic.TorchState(model, optimizer)
            optimizer.load_state_dict(optimizer.state_dict())
            hvd.elastic.TorchState(model, optimizer)


def in_state(place, name, make=adam):
    model = build()
    named = [(f"{name}.{place}.{each}", parameter) for each, parameter in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), named, sharded=place)
    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    state.sync()
    return model, optimizer, state


def clamp(model, optimizer):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.05, 0.05)


def load(model, optimizer):
    model.load_state_dict({name: torch.full_like(each, 0.5) for name, each in model.state_dict().items()})


def forget_momentum(model, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def check_changes_between_a_step_and_its_commit():
    """The step has made the copy for the commit already."""
    for place in PLACES:
        for change in (clamp, load, forget_momentum):
            model, optimizer, state = in_state(place, change.__name__)
            for step in range(2):
                train(model, optimizer, [step])
                state.save()
            hvd.barrier()
            change(model, optimizer)
            hvd.barrier()
            state.save()
            kept, momenta = flat(model).clone(), optimizer.state_dict()["state"]
            expected = {key: each["exp_avg"].clone() for key, each in momenta.items()}
            train(model, optimizer, [3])
            state.restore()
            assert torch.equal(flat(model), kept)
            found = optimizer.state_dict()["state"]
            assert same({key: each["exp_avg"] for key, each in found.items()}, expected)
            del optimizer, state


def check_copies_after_uncommitted_steps():
    """Other exchanges of the state come between: no copy that is needed may be overwritten, on any rank."""

    def share(model, optimizer, state):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def load_again(model, optimizer, state):
        optimizer.load_state_dict(optimizer.state_dict())

    between = [share, load_again, lambda model, optimizer, state: state.sync()]
    for place in PLACES:
        for number, call in enumerate(between):
            model, optimizer, state = in_state(place, f"between {number}")
            other = hvd.elastic.TorchState(model, optimizer)
            other.sync()
            train(model, optimizer, range(1))
            state.save()
            other.save()
            first = flat(model).clone()
            train(model, optimizer, range(1, 3))
            call(model, optimizer, state)
            for step in range(3, 6):
                train(model, optimizer, [step])
                state.save()
            last = flat(model).clone()
            train(model, optimizer, [7])
            state.restore()
            assert torch.equal(flat(model), last)
            other.restore()
            assert torch.equal(flat(model), first)
            del optimizer, state, other


def check_what_cannot_be_replaced():
    if hvd.size() == 1:
        return
    model, optimizer, state = in_state("host", "replaced")
    train(model, optimizer, range(1))
    state.commit()
    for name, value in (("model", build()), ("optimizer", adam(build().parameters()))):
        with pytest.raises(
            InvalidRequestError, match=rf"the {name} of a state cannot be replaced.*before, on all ranks"
        ):
            setattr(state, name, value)
    optimizer.load_state_dict(optimizer.state_dict())
    state.commit()
    state.model = other = build()
    assert state.model is other


def check_a_step_that_fails_in_an_elastic_state():
    if hvd.size() == 1:
        return
    for place in PLACES:
        model, optimizer, state = in_state(place, "fails")
        for step in range(2):
            train(model, optimizer, [step])
            state.commit()
        backward(model, optimizer, 2)
        failing = mock.patch.object(type(optimizer), "_take_state", side_effect=ArithmeticError("on purpose"))
        with (
            failing if hvd.rank() == 0 else nullcontext(),
            pytest.raises((ArithmeticError, RefusedCallError), match="on purpose"),
        ):
            optimizer.step()
        state.restore()
        state.sync()
        train(model, optimizer, range(2, 4))
        state.commit()
        assert_identical_everywhere(model)
        del optimizer, state


def check_sparse_gradients():
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=True), torch.nn.Flatten())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sharded=True)
    model(torch.tensor([[1, 2]])).sum().backward()
    if hvd.size() > 1:
        with pytest.raises(InvalidRequestError, match=r"is sparse, and cannot be cut.*sparse_as_dense=True"):
            optimizer.step()
    del optimizer
    dense = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sharded=True, sparse_as_dense=True)
    dense.zero_grad()
    model(torch.tensor([[1, 2]])).sum().backward()
    dense.step()
    assert_identical_everywhere(model)


def check_a_look_at_the_state():
    def train_and_look(model, optimizer, steps, passes):
        for step in steps:
            train(model, optimizer, [step])
            if hvd.rank() == 0:
                assert all(optimizer.state[parameter] is not None for parameter in model.parameters())

    assert_same_training(momentum, train=train_and_look)


def check_hooks_of_steps():
    def train_with_hooks(model, optimizer, steps, passes):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        average = copy.deepcopy(model)
        norms = []

        def clip(*_):
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))

        def follow(*_):
            scheduler.step()
            for one, other in zip(average.parameters(), model.parameters(), strict=True):
                one.data.lerp_(other.data, 0.5)

        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_post_hook(follow)
        optimizer.step = optimizer.step  # as a scheduler leaves it
        train(model, optimizer, steps)
        with torch.no_grad():
            hvd.barrier()
            for one, other in zip(model.parameters(), average.parameters(), strict=True):
                one.copy_(other)
            hvd.barrier()
        assert len(norms) == len(steps)

    def grouped(parameters):
        return torch.optim.SGD([{"params": [each], "lr": 0.1 + place} for place, each in enumerate(parameters)])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a scheduler that steps within the step
        assert_same_training(grouped, train=train_with_hooks)


class Counting(torch.optim.SGD):
    """Has numbers in its groups and in its state, and looks at what parameters have."""

    hvd_element_wise = False

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                assert parameter.requires_grad
                assert parameter.label == name
        return super().step(closure)


def check_a_class_with_numbers_of_its_own():
    def labelled():
        model = build()
        for name, parameter in model.named_parameters():
            parameter.label = name
        return model

    def make(parameters):
        return Counting([(each.label, each) for each in parameters], lr=0.1, momentum=0.9)

    assert_same_training(make, labelled)


def check_more_ranks_than_blocks():
    def tiny():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(7, 3, bias=False))

    for kind in sorted(ELEMENT_WISE, key=lambda kind: kind.__name__):
        assert_same_training(lambda parameters, kind=kind: kind(parameters, lr=0.01), tiny, steps=range(2))
    assert_same_training(lambda parameters: torch.optim.Adam(parameters, fused=True), tiny)
    assert_same_training(torch.optim.Adafactor, tiny)


def check_parameters_after_the_optimizer():
    for place in PLACES:
        model = build()
        raw = momentum(model.parameters())
        optimizer = hvd.DistributedOptimizer(raw, model.named_parameters(), sharded=place)
        train(model, optimizer, range(1))
        size = len(pickle.dumps([each.detach() for each in model.parameters()]))
        assert size < 6 * sum(each.numel() * 4 for each in model.parameters())
        if hvd.size() > 1:
            del optimizer
            with pytest.raises(InvalidRequestError, match=r"was sharded.*load the full_state_dict"):
                hvd.DistributedOptimizer(raw, sharded=place)
        hvd.barrier()
        plain, expected = build(), build()
        plain.load_state_dict(model.state_dict())
        expected.load_state_dict(model.state_dict())
        assert_after(model, expected)


def assert_after(model, expected):
    """The parameters of ``model`` are this rank's own for an optimizer that is not sharded."""
    one = hvd.DistributedOptimizer(momentum(model.parameters()))
    train(model, one, range(2))
    del one
    other = hvd.DistributedOptimizer(momentum(expected.parameters()))
    train(expected, other, range(2))
    assert torch.equal(flat(model), flat(expected))


def check_steps_that_would_be_wrong():
    if hvd.size() == 1:
        return
    model = build()
    optimizer = wrapped(model, momentum, True)
    train(model, optimizer, range(1))
    backward(model, optimizer, 1)
    with (
        optimizer.skip_synchronize(),
        pytest.raises(InvalidRequestError, match="before the gradients were combined"),
    ):
        optimizer.step()
    optimizer.zero_grad()
    tied = build()
    tied[3].bias.data = tied[0].weight.data[0, :3]
    optimizer = wrapped(tied, momentum, True)
    backward(tied, optimizer, 1)
    with pytest.raises(InvalidRequestError, match="lie in the same memory"):
        optimizer.step()


def check_the_others_hear_of_one_rank_with_tied_memory():
    kind = InvalidRequestError if hvd.rank() == 0 else RefusedCallError
    for place in PLACES if hvd.size() > 1 else ():
        model = build()
        if hvd.rank() == 0:
            model[3].bias.data = model[0].weight.data[0, :3]
        optimizer = wrapped(model, momentum, place)
        backward(model, optimizer, 1)
        with pytest.raises(kind, match="lie in the same memory"):
            optimizer.step()
        del optimizer


def check_clipping_after_unscaling():
    for place in (False, *PLACES):
        model = build()
        optimizer = wrapped(model, momentum, place)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        images, labels = data(1, torch.float32)
        scaler.scale(loss_of(model, own(images), own(labels))).backward()
        scaler.unscale_(optimizer)
        hvd.clip_grad_norm_(optimizer, 1.0)
        if hvd.size() > 1:
            with pytest.raises(
                InvalidRequestError, match=r"unscale_\(\) was called before the gradients were combined"
            ):
                scaler.step(optimizer)
        del optimizer


def check_the_root_restores():
    for place in PLACES:
        model = build()
        optimizer = wrapped(model, adam, place)
        train(model, optimizer, range(2))
        saved = optimizer.state_dict()
        train(model, optimizer, range(2, 4))
        if hvd.rank() == 0:
            optimizer.load_state_dict(copy.deepcopy(saved))
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert same(optimizer.state_dict(), saved)
        wrong = copy.deepcopy(saved)
        wrong["state"][0]["exp_avg"] = torch.zeros(2, 2)
        wrong["param_groups"][0]["lr"] = 99.0
        if hvd.size() > 1:
            with pytest.raises(InvalidRequestError, match="exp_avg of"):
                optimizer.load_state_dict(wrong)
            assert same(optimizer.state_dict(), saved)


@each_check(globals())
@pytest.mark.parametrize("ranks", [1, 3], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)


def in_portions(check, *arguments):
    """Each gradient is large enough to be reduce-scattered, however many cores there are."""
    with (
        mock.patch.object(buckets, "SMALL_BYTES", 0),
        mock.patch.object(transfers, "SMALL_BYTES", 0),
        mock.patch.object(type(basics.engine()._progress), "patient", True),
    ):
        check(*arguments)


@each_check(globals())
@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_with_gradients_in_portions(ranks, check):
    ranks.run(in_portions, check)


def check_steps_that_need_portions_only():
    """The first step divides the parameters. Of the others, only those that nothing else looks at."""
    for place in PLACES:
        model = build()
        optimizer = wrapped(model, momentum, place)
        train(model, optimizer, range(1))
        assert all(parameter.grad is not None for parameter in model.parameters())
        train(model, optimizer, range(1, 2))
        assert all(parameter.grad is None for parameter in model.parameters())
        backward(model, optimizer, 2)
        optimizer.synchronize()
        averages = [parameter.grad.clone() for parameter in model.parameters()]
        assert same(averages, [hvd.broadcast(average, 0) for average in averages])
        with optimizer.skip_synchronize():
            optimizer.step()
        assert same(averages, [parameter.grad for parameter in model.parameters()])
        hook = optimizer.register_step_pre_hook(lambda *_: None)
        train(model, optimizer, range(3, 4))
        hook.remove()
        averages = [parameter.grad for parameter in model.parameters()]
        assert same(averages, [hvd.broadcast(average, 0) for average in averages])
        train(model, optimizer, range(4, 5))
        assert all(parameter.grad is None for parameter in model.parameters())


def check_gradients_of_other_strides():
    def train_transposed(model, optimizer, steps, passes):
        for step in steps:
            backward(model, optimizer, step)
            weight = model[2].weight
            weight.grad = weight.grad.t().contiguous().t()
            optimizer.step()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the gradient of .* was changed between backward and step")
        assert_same_training(adam, train=train_transposed)


class WholeDescent(torch.optim.SGD):
    hvd_element_wise = False


def check_gradients_that_become_sparse():
    """The ranks learn of it in the second step, or in the third, where one of them has none in the second."""

    class Rows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.dense, self.rows = torch.nn.Linear(4, 30), torch.nn.Parameter(torch.randn(40, 4))

        def forward(self, step):
            lines = torch.tensor([step, 2 * step + hvd.rank()])
            rows = torch.nn.functional.embedding(lines, self.rows, sparse=step > 0) if step != 1 or hvd.rank() else 0.0
            return self.dense(rows + torch.ones(2, 4)).square().sum()

    def train_rows(model, optimizer, steps, passes):
        for step in steps:
            optimizer.zero_grad()
            model(step).backward()
            optimizer.step()

    def descent(kind):
        return lambda parameters: kind(parameters, lr=0.001)

    assert_same_training(descent(WholeDescent), Rows, range(4), train=train_rows)
    assert_same_training(descent(torch.optim.SGD), Rows, range(4), train=train_rows, sparse_as_dense=True)


@pytest.mark.parametrize("ranks", [3], indirect=True)
@pytest.mark.parametrize(
    "check",
    [check_steps_that_need_portions_only, check_gradients_of_other_strides, check_gradients_that_become_sparse],
)
def test_portions(ranks, check):
    ranks.run(in_portions, check)


def check_ranks_that_have_joined():
    model = build()
    for place in PLACES if hvd.size() > 1 else ():
        optimizer = wrapped(model, momentum, place)
        train(model, optimizer, range(1))
        if hvd.rank() == 0:
            hvd.join()
        else:
            backward(model, optimizer, 1)
            with pytest.raises(HorovodInternalError, match=r"has called join\(\), so its part"):
                optimizer.step()
            hvd.join()
        del optimizer


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_joined_ranks_update_nothing_so_the_others_get_an_error(ranks):
    ranks.run(check_ranks_that_have_joined)
    ranks.run(in_portions, check_ranks_that_have_joined)


def gathered(root):
    found = objects.gather_object({"rank": hvd.rank(), "text": "x" * hvd.rank()}, root)
    expected = [{"rank": rank, "text": "x" * rank} for rank in range(hvd.size())]
    assert found == (expected if hvd.rank() == root else None)
    with pytest.raises(InvalidRequestError, match=r"cannot be pickled|cannot pickle its object; rank 0 says why"):
        objects.gather_object(open if hvd.rank() != 1 else threading.Lock(), 0)


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_objects_of_all_ranks_on_one(ranks):
    ranks.run(gathered, 1)


def check_two_hosts():
    model = build()
    with pytest.raises(InvalidRequestError, match="ranks that share memory: the ranks are on the hosts one, two"):
        train(model, wrapped(model, adam, "host"), range(1))
    model, expected = build(), build()
    optimizer, plain = wrapped(model, adam, True), wrapped(expected, adam, False)
    train(model, optimizer, range(3))
    train(expected, plain, range(3))
    assert torch.equal(flat(model), flat(expected))
    assert not optimizer._shard.is_shared
    assert not optimizer._division  # an allreduce goes through each host first


def test_on_two_hosts(two_hosts):
    two_hosts.run(in_portions, check_two_hosts)
    two_hosts.run(check_elastic_state, [True])


def check_once_on_each_host():
    """Each host has one copy, and gets each part once from the other host."""
    for make in (adam, torch.optim.Adafactor):
        expected = build()
        plain = wrapped(expected, make, False)
        train(expected, plain, range(3))
        for place in (True, "host"):
            model = build()
            optimizer = wrapped(model, make, place)
            train(model, optimizer, range(3))
            assert torch.equal(flat(model), flat(expected))
            assert same(optimizer.state_dict(), plain.state_dict())
            assert optimizer._shard.is_shared
            position = hvd.rank()
            assert optimizer._shard._partners == [position + 2 if position < 2 else position - 2]
    hook = optimizer.register_step_pre_hook(lambda *_: 1 / (hvd.rank() != 2))
    backward(model, optimizer, 3)
    with pytest.raises((ZeroDivisionError, RefusedCallError), match="division by zero"):
        optimizer.step()
    hook.remove()
    train(model, optimizer, range(4, 5))
    assert_identical_everywhere(model)


def check_joined_partner():
    model = build()
    optimizer = wrapped(model, adam, "host")
    train(model, optimizer, range(1))
    if hvd.rank() == 3:
        hvd.join()
        return
    backward(model, optimizer, 1)
    with pytest.raises(HorovodInternalError, match=r"has called join\(\), so its part"):
        optimizer.step()
    hvd.join()


def test_once_on_each_of_two_hosts(two_hosts_of_two):
    two_hosts_of_two.run(check_once_on_each_host)
    two_hosts_of_two.run(check_joined_partner)
    two_hosts_of_two.run(check_elastic_state, ["host"])


def check_uneven_hosts():
    model = build()
    optimizer = wrapped(model, adam, True)
    train(model, optimizer, range(2))
    assert not optimizer._shard.is_shared
    assert_identical_everywhere(model)
    model = build()
    with pytest.raises(InvalidRequestError, match=r"the hosts have different numbers of ranks: one: 2, two: 1"):
        train(model, wrapped(model, adam, "host"), range(1))


def test_on_uneven_hosts(uneven_hosts):
    uneven_hosts.run(check_uneven_hosts)


def no_memory(place):
    model = build()
    optimizer = wrapped(model, adam, place)
    with mock.patch.object(os, "memfd_create", side_effect=OSError(28, "on purpose")):
        train(model, optimizer, range(2))
    assert_identical_everywhere(model)
    assert not optimizer._shard.is_shared


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_without_shared_memory_each_rank_has_its_own(ranks):
    ranks.run(no_memory, True)
    with pytest.raises(InvalidRequestError, match=r"the memory cannot be created.*on purpose"):
        ranks.run(no_memory, "host")
