"""Gradients through the collectives, against those of one process that has the tensors of all ranks.

One process sees the results of all ranks, and adds up what the ranks would make of theirs. The gradients of an
allgather and a broadcast are averaged over the ranks, so there the losses are averaged; those of a reducescatter make
up for it.
"""

import pytest
import torch

import hvd_cluster.torch as hvd
from hvd_cluster.torch import mpi_ops
from tests.checks import each_check


def inputs(process_set, shape_of, dtype=torch.float64):
    """The tensors of each member, as leaves."""
    tensors = []
    for rank in process_set.ranks:
        generator = torch.Generator().manual_seed(rank)
        tensors.append(torch.randn(shape_of(rank), generator=generator, dtype=dtype).requires_grad_())
    return tensors


def loss_of(result, rank):
    """Another function of the elements on each rank."""
    weights = torch.arange(1.0, result.numel() + 1).reshape(result.shape) * (rank + 1)
    return (weights * (result.abs() ** 2 + result.real.sin() if result.is_complex() else result.sin())).sum()


def check_gradient(process_set, shape_of, collective, alone, scale=1.0, dtype=torch.float64):
    """``collective(x)`` on each member, and ``alone(xs)``, which gives the list of all members' results."""
    ranks, me = process_set.ranks, process_set.rank()
    mine = inputs(process_set, shape_of, dtype)[me]
    everyone = inputs(process_set, shape_of, dtype)
    results = alone(everyone)
    result = collective(mine)
    torch.testing.assert_close(result, results[me])
    loss_of(result, ranks[me]).backward()
    (scale * sum(loss_of(each, rank) for each, rank in zip(results, ranks, strict=True))).backward()
    torch.testing.assert_close(mine.grad, everyone[me].grad)


def on_each_set(check):
    """On all ranks and on a set of the first and the last."""

    def run():
        check(hvd.global_process_set)
        process_set = hvd.add_process_set([0, hvd.size() - 1]) if hvd.size() > 2 else None
        if process_set is not None:
            if process_set.included():
                check(process_set)
            assert hvd.remove_process_set(process_set)

    return run


def same_shape(rank):
    return 5, 2


def different_rows(rank):
    return (rank * 2) % 5, 3


def check_allreduce(process_set):
    size = process_set.size()
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
        for name, before, after in ((None, 1.0, 1.0), ("a", 3.0, 0.5), (None, -1.0, 2.0)):
            how = {"op": op, "prescale_factor": before, "postscale_factor": after, "process_set": process_set}
            factor = before * after / divisor
            for dtype in (torch.float64, torch.complex128):
                check_gradient(
                    process_set,
                    same_shape,
                    lambda x, name=name, how=how: hvd.allreduce(x, name=name, **how),
                    lambda xs, factor=factor: [sum(xs) * factor] * len(xs),
                    dtype=dtype,
                )


def check_allgather(process_set):
    size = process_set.size()
    for shape_of in (same_shape, different_rows):
        check_gradient(
            process_set,
            shape_of,
            lambda x: hvd.allgather(x, process_set=process_set),
            lambda xs: [torch.cat(xs)] * len(xs),
            scale=1 / size,
        )


def check_broadcast(process_set):
    for place, root in enumerate(process_set.ranks):
        ranks, me = process_set.ranks, process_set.rank()
        mine, everyone = inputs(process_set, same_shape)[me], inputs(process_set, same_shape)
        loss_of(hvd.broadcast(mine, root, name="b", process_set=process_set), ranks[me]).backward()
        (sum(loss_of(everyone[place], rank) for rank in ranks) / len(ranks)).backward()
        expected = everyone[place].grad if me == place else torch.zeros_like(mine)
        torch.testing.assert_close(mine.grad, expected)


def check_alltoall(process_set):
    """The last row goes to no rank."""
    ranks, me = process_set.ranks, process_set.rank()
    splits = [[(sender + 2 * receiver) % 3 for receiver in range(len(ranks))] for sender in range(len(ranks))]
    given = dict(zip(ranks, splits, strict=True))

    def alone(xs):
        parts = [x[: sum(split)].split(split) for x, split in zip(xs, splits, strict=True)]
        return [torch.cat(of_receiver) for of_receiver in zip(*parts, strict=True)]

    check_gradient(
        process_set,
        lambda rank: (sum(given[rank]) + 1, 2),
        lambda x: hvd.alltoall(x, splits=splits[me], process_set=process_set)[0],
        alone,
    )
    check_gradient(
        process_set,
        lambda rank: (len(ranks), 2),
        lambda x: hvd.alltoall(x, process_set=process_set),
        lambda xs: [torch.stack([x[place] for x in xs]) for place in range(len(xs))],
    )


def check_reducescatter(process_set):
    size = process_set.size()
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
        how = {"op": op, "prescale_factor": 3.0, "postscale_factor": 0.5, "process_set": process_set}
        check_gradient(
            process_set,
            same_shape,
            lambda x, how=how: hvd.reducescatter(x, name="r", **how),
            lambda xs, divisor=divisor: list((sum(xs) * 1.5 / divisor).tensor_split(len(xs))),
            scale=size,
        )


def check_a_reducescatter_and_an_allgather(process_set):
    """Have the gradient of an allreduce."""
    how = {"op": hvd.Sum, "prescale_factor": 2.0, "process_set": process_set}
    check_gradient(
        process_set,
        same_shape,
        lambda x: hvd.allgather(hvd.reducescatter(x, **how), process_set=process_set),
        lambda xs: [sum(xs) * 2] * len(xs),
    )


def check_groups(process_set):
    """With an integer tensor, one that needs no gradient, and one whose result is not used."""
    me = process_set.rank()
    for grouped, single in (
        (hvd.grouped_allreduce, hvd.allreduce),
        (hvd.grouped_allgather, hvd.allgather),
        (hvd.grouped_reducescatter, hvd.reducescatter),
    ):
        gradients = []
        for name in (None, "g"):
            first, second = inputs(process_set, same_shape)[me], inputs(process_set, lambda rank: (4,))[me]
            unused = torch.ones(3, requires_grad=True)
            group = [first, torch.ones(3, dtype=torch.int64), second.float(), torch.ones(2), unused]
            results = grouped(group, name=name, process_set=process_set)
            assert [each.requires_grad for each in results] == [True, False, True, True, True]
            (results[0].sin().sum() + (results[2] * 2).sum()).backward()
            torch.testing.assert_close(unused.grad, torch.zeros(3))
            gradients.append((first.grad, second.grad))
        first, second = inputs(process_set, same_shape)[me], inputs(process_set, lambda rank: (4,))[me]
        single(first, process_set=process_set).sin().sum().backward()
        (single(second.float(), process_set=process_set) * 2).sum().backward()
        for gradient in gradients:
            torch.testing.assert_close(gradient, (first.grad, second.grad))


def check_gradients_of_gradients(process_set):
    ranks, me = process_set.ranks, process_set.rank()
    for collective, alone in (
        (
            lambda x: hvd.allreduce(x, op=hvd.Sum, name="a", prescale_factor=2.0, process_set=process_set),
            lambda xs: [sum(xs) * 2] * len(xs),
        ),
        (
            lambda x: hvd.alltoall(x, splits=[1] * len(ranks), process_set=process_set)[0],
            lambda xs: [torch.stack([x[place] for x in xs]) for place in range(len(xs))],
        ),
    ):
        mine = inputs(process_set, lambda rank: (len(ranks), 2))[me]
        loss = loss_of(collective(mine), ranks[me])
        (first,) = torch.autograd.grad(loss, mine, create_graph=True)
        loss_of(first, ranks[me]).backward()
        everyone = inputs(process_set, lambda rank: (len(ranks), 2))
        total = sum(loss_of(each, rank) for each, rank in zip(alone(everyone), ranks, strict=True))
        firsts = torch.autograd.grad(total, everyone, create_graph=True)
        sum(loss_of(each, rank) for each, rank in zip(firsts, ranks, strict=True)).backward()
        torch.testing.assert_close(first, firsts[me])
        torch.testing.assert_close(mine.grad, everyone[me].grad)


def check_gradients_of_the_gradient_of_a_broadcast(process_set):
    ranks = process_set.ranks
    root, is_root = ranks[-1], process_set.rank() == len(ranks) - 1
    mine = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    result = hvd.broadcast(mine, root, name="b", process_set=process_set)
    (first,) = torch.autograd.grad((result**3).sum(), mine, create_graph=True)
    torch.testing.assert_close(first, 3 * mine**2 if is_root else torch.zeros_like(mine))
    first.sum().backward()
    torch.testing.assert_close(mine.grad, 6 * mine.detach() / len(ranks) if is_root else torch.zeros_like(mine))


def check_a_loss_over_the_whole_batch(process_set):
    """A loss that compares each sample with those of all ranks, as contrastive ones do."""
    me = process_set.rank()

    def loss(features):
        return (features @ features.t()).exp().sum().log()

    everyone = [tensor.detach() for tensor in inputs(process_set, lambda rank: (rank + 1, 3))]
    weights = [torch.eye(3, dtype=torch.float64).requires_grad_() for _ in range(2)]
    loss(hvd.allgather(everyone[me] @ weights[0], process_set=process_set)).backward()
    loss(torch.cat(everyone) @ weights[1]).backward()
    combined = hvd.allreduce(weights[0].grad, op=hvd.Sum, process_set=process_set)
    torch.testing.assert_close(combined, weights[1].grad)


def check_a_contrastive_loss_with_an_optimizer(process_set):
    """The encoder gets 1/size of the joint gradient, and all of it with the line of docs/pytorch.md."""
    me, size = process_set.rank(), process_set.size()

    def loss(embeddings, scale):
        return (scale * embeddings @ embeddings.t()).exp().sum().log()

    def gradients(*hooks):
        weight, scale = torch.eye(3, dtype=torch.float64).requires_grad_(), torch.ones(()).double().requires_grad_()
        optimizer = torch.optim.SGD([weight, scale], 0.1)
        names = [("weight", weight), ("scale", scale)]
        optimizer = hvd.DistributedOptimizer(optimizer, names, process_set=process_set)
        embeddings = everyone[me] @ weight
        for hook in hooks:
            embeddings.register_hook(hook)
        loss(hvd.allgather(embeddings, name="embeddings", process_set=process_set), scale).backward()
        optimizer.synchronize()
        return weight.grad, scale.grad

    everyone = [tensor.detach() for tensor in inputs(process_set, lambda rank: (rank + 1, 3))]
    weight, scale = torch.eye(3, dtype=torch.float64).requires_grad_(), torch.ones(()).double().requires_grad_()
    loss(torch.cat(everyone) @ weight, scale).backward()
    torch.testing.assert_close(gradients(), (weight.grad / size, scale.grad))
    torch.testing.assert_close(gradients(lambda gradient: gradient * size), (weight.grad, scale.grad))


def check_compression(process_set):
    me = process_set.rank()
    for collective in (hvd.allreduce, hvd.reducescatter):
        exact, small = (inputs(process_set, same_shape, torch.float32)[me] for _ in range(2))
        collective(exact, op=hvd.Sum, process_set=process_set).sin().sum().backward()
        result = collective(small, op=hvd.Sum, compression=hvd.Compression.fp16, process_set=process_set)
        assert result.dtype == small.dtype
        result.sin().sum().backward()
        torch.testing.assert_close(small.grad, exact.grad, atol=0.02 * hvd.size(), rtol=0.02)
        assert not torch.equal(small.grad, exact.grad)


def check_operations_without_a_gradient(process_set):
    for op in (hvd.Min, hvd.Max, hvd.Product):
        tensor = torch.ones(2, requires_grad=True)
        for result in (
            hvd.allreduce(tensor, op=op, process_set=process_set),
            hvd.grouped_allreduce([tensor], op=op, process_set=process_set)[0],
        ):
            with pytest.raises(ValueError, match=f"op {op.name.capitalize()} has no gradient; use Average or Sum, or"):
                result.sum().backward()


def check_memory_format(process_set):
    """A gradient in another memory format than the tensor."""
    image = torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    result = hvd.allreduce(image, op=hvd.Sum, process_set=process_set)
    result.contiguous().flatten().cumsum(0).sum().backward()
    assert image.grad[0, 0, 0, 0] == 96 * process_set.size()


@each_check(globals(), check_gradient)
def test_on_all_ranks(ranks, check):
    ranks.run(on_each_set(check))


def test_the_classes_have_their_names():
    for name in ("Allreduce", "Allgather", "Broadcast", "Alltoall", "Reducescatter"):
        assert issubclass(getattr(mpi_ops, f"Horovod{name}"), torch.autograd.Function)
    for name in ("Allreduce", "Allgather", "Reducescatter"):
        assert issubclass(getattr(mpi_ops, f"HorovodGrouped{name}"), torch.autograd.Function)
