"""DistributedOptimizer with op=Adasum: the changes that the ranks' steps made are combined."""

import copy
from contextlib import nullcontext

import pytest
import torch

import hvd_cluster.torch as hvd
from tests.checks import each_check
from tests.hvd_cluster.torch.training import BATCH, assert_identical_everywhere, build, data, flat, loss_of, own


def adasum(first, second):
    dot = (first * second).sum()
    return (1 - dot / (2 * first.square().sum())) * first + (1 - dot / (2 * second.square().sum())) * second


def tree(vectors):
    """More than two combine pairwise."""
    while len(vectors) > 1:
        vectors = [adasum(*pair) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def optimizers():
    return {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True),
        "fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
    }


def local_deltas(make_optimizer, steps):
    """The changes by the steps of each rank, computed here for all of them; their Adasum is applied to each model."""
    models = [build() for _ in range(hvd.size())]
    plain = [make_optimizer(model.parameters()) for model in models]
    for step in range(steps):
        images, labels = data(step)
        before = [parameter.detach().clone() for parameter in models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(models, plain, strict=True)):
            rows = slice(rank * BATCH, (rank + 1) * BATCH)
            optimizer.zero_grad()
            loss_of(model, images[rows], labels[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            for start, *parameters in zip(before, *(model.parameters() for model in models), strict=True):
                combined = start + tree([parameter - start for parameter in parameters])
                for parameter in parameters:
                    parameter.copy_(combined)
    return models[0]


def check_equals_the_formula():
    for make_optimizer in optimizers().values():
        model = build()
        optimizer = hvd.DistributedOptimizer(
            make_optimizer(model.parameters()), model.named_parameters(), op=hvd.Adasum, groups=2
        )
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, *(own(rows) for rows in data(step))).backward()
            optimizer.step()
        torch.testing.assert_close(flat(model), flat(local_deltas(make_optimizer, 3)), rtol=1e-9, atol=1e-12)
        assert_identical_everywhere(model)


def check_a_failure_leaves_nothing_in_flight():
    """Or the names would be taken when the step is repeated. The parameters are those from before the step."""
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (2 + hvd.rank(), 3, 4)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.5), op=hvd.Adasum)
    for _ in range(3 * (hvd.size() > 1)):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(hvd.HorovodInternalError, match=r"noname\.0\.0"):
            optimizer.step()
        assert all((parameter == 1).all() for parameter in parameters)


def check_several_passes_and_compression():
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        model = build(torch.float32)
        inner = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(
            inner, model.named_parameters(), compression, backward_passes_per_step=2, op=2
        )
        assert isinstance(optimizer, torch.optim.Adam)
        optimizer.set_backward_passes_per_step(3)
        for step in range(2):
            optimizer.zero_grad(set_to_none=False)
            for part in range(3):
                images, labels = (own(rows)[part::3] for rows in data(step, torch.float32))
                loss_of(model, images, labels).backward()
            optimizer.step()
        assert_identical_everywhere(model)
        assert not torch.equal(flat(model), flat(build(torch.float32)))


def check_closure_scheduler_and_copy():
    model = build()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, *(own(rows) for rows in data(0)))
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert_identical_everywhere(model)
    assert type(copy.deepcopy(optimizer)).__bases__ == type(optimizer).__bases__
    optimizer.load_state_dict(optimizer.state_dict())


def check_a_parameter_without_gradient_on_some_ranks():
    model = torch.nn.ModuleDict({"all": torch.nn.Linear(2, 2), "first": torch.nn.Linear(2, 2)})
    hvd.broadcast_parameters(model.state_dict(), 0)
    model["all"].bias.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Adasum)
    before = flat(model)
    output = model["all"](torch.ones(1, 2))
    (model["first"](output) if hvd.rank() == 0 else output).sum().backward()
    optimizer.step()
    assert_identical_everywhere(model)
    assert not torch.equal(flat(model), before)


def check_a_parameter_that_is_frozen_after_backward():
    """It has a gradient, by which each rank would step alone."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=hvd.Adasum)
    (parameter.sum() * (hvd.rank() + 1.0)).backward()
    parameter.requires_grad_(False)
    optimizer.step()
    gathered = hvd.allgather(parameter[None])
    assert parameter.any()
    assert (gathered == gathered[0]).all()


def check_nothing_to_synchronize():
    model = build()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    optimizer.synchronize()
    refused = pytest.raises(AssertionError, match="does not combine gradients") if hvd.size() > 1 else nullcontext()
    with refused, optimizer.skip_synchronize():
        optimizer.step()
    with pytest.raises(ValueError, match="backward_passes_per_step=0"):
        optimizer.set_backward_passes_per_step(0)


def check_grad_scaler():
    """One rank overflows: all skip the step, which is a collective."""
    for fused in (False, True):
        model = build(torch.float32)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        optimizer = hvd.DistributedOptimizer(inner, op=hvd.Adasum)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            before = flat(model)
            optimizer.zero_grad()
            overflow = 1e38 if step == 1 and hvd.rank() == hvd.size() - 1 else 1.0
            images, labels = (own(rows) for rows in data(step, torch.float32))
            scaler.scale(loss_of(model, images, labels) * overflow).backward()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(flat(model), before) == (step == 1)
            assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)
        assert_identical_everywhere(model)


@each_check(globals())
@pytest.mark.parametrize("ranks", [1, 4], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)
