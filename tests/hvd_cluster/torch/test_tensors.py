"""Tensors that are more, or less, than a block of numbers; and the numbers that torch.distributed gives."""

import math
import weakref

import pytest
import torch
import torch.distributed as dist

import hvd_cluster.torch as hvd
from hvd_cluster.core import basics


def same(actual, expected):
    torch.testing.assert_close(actual, expected)


def check_memory_formats():
    """Each rank may use a memory format of its own."""
    rank, size = hvd.rank(), hvd.size()
    for shape, memory_format in (((4, 3, 2, 5), torch.channels_last), ((4, 3, 2, 5, 2), torch.channels_last_3d)):
        usual = torch.arange(math.prod(shape)).reshape(shape).float()
        mine = usual.contiguous(memory_format=memory_format) if rank != 1 else usual.clone()
        for result, expected in (
            (hvd.allreduce(mine, op=hvd.Sum), usual * size),
            (hvd.grouped_allreduce([mine], op=hvd.Sum)[0], usual * size),
            (hvd.broadcast(mine, size - 1), usual),
            (hvd.allgather(mine), torch.cat([usual] * size)),
            (hvd.reducescatter(mine, op=hvd.Sum), (usual * size).tensor_split(size)[rank]),
            (hvd.alltoall(torch.cat([mine] * size)), torch.cat([usual] * size)),
            (hvd.allreduce_(mine, op=hvd.Sum), usual * size),
        ):
            assert torch.equal(result, expected)
            assert result.is_contiguous(memory_format=memory_format) == (rank != 1)
            assert result.is_contiguous() == (rank == 1)


def check_lazy_views():
    """Conjugates, negatives and zeros that torch has not computed yet."""
    size = hvd.size()
    numbers = torch.complex(torch.arange(4.0), torch.ones(4))
    negative = torch._neg_view(torch.arange(4.0))
    for view in (numbers.conj(), numbers.conj().imag, numbers.conj()[::2], negative, torch._efficientzerotensor((4,))):
        assert view.is_conj() or view.is_neg() or view._is_zerotensor()
        same(hvd.allreduce(view, op=hvd.Sum), view.resolve_conj().resolve_neg() * size)
        same(hvd.allgather(view), view.repeat(size))
        same(hvd.broadcast(view, 0), view)
    hvd.allreduce_(numbers.conj(), op=hvd.Sum)
    same(numbers, torch.complex(torch.arange(4.0), torch.ones(4)) * size)


def check_sparse_tensors():
    """Elements at places of their own, and at one that all ranks have, given twice."""
    rank, size = hvd.rank(), hvd.size()
    for dtype, tail in ((torch.float32, ()), (torch.float64, (2,)), (torch.complex64, ())):
        rows = torch.tensor([rank, size, size])
        mine = torch.sparse_coo_tensor(rows[None], torch.ones(3, *tail, dtype=dtype), (size + 1, *tail))
        start = hvd.sparse_allreduce_async(mine, "sparse", hvd.Sum)
        other = hvd.sparse_allreduce_async(mine.coalesce(), None, hvd.Average)
        expected = torch.ones(size + 1, *tail, dtype=dtype)
        expected[size] = 2 * size
        result = start()
        assert result.is_coalesced()
        assert start() is result
        same(result.to_dense(), expected)
        same(other().to_dense(), expected / size)
    whole = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1, -size - 1]), (3,))
    average = hvd.sparse_allreduce_async(whole, "whole", hvd.Average)().to_dense()
    same(average, hvd.allreduce(whole.to_dense()))
    assert average.tolist() == [1, 0, -size - 1]
    empty = hvd.sparse_allreduce_async(torch.sparse_coo_tensor(size=(3, 4)), "empty", hvd.Sum)()
    same(empty.to_dense(), torch.zeros(3, 4))


def check_tensors_that_require_a_gradient():
    """Operations in place and asynchronous ones record nothing, as if the tensor were detached."""
    size = hvd.size()
    leaf = torch.ones(3, requires_grad=True)
    square = leaf * leaf
    assert hvd.allreduce_(leaf, op=hvd.Sum) is leaf
    same(leaf.detach(), torch.full((3,), float(size)))
    hvd.broadcast_(leaf, 0)
    hvd.grouped_allreduce_([leaf])
    columns = torch.ones(2, 3, requires_grad=True)
    hvd.allreduce_(columns.t(), op=hvd.Sum)
    same(columns.detach(), torch.full((2, 3), float(size)))
    for handle in (hvd.allreduce_async(leaf), hvd.allgather_async(square), hvd.grouped_allreduce_async([leaf])):
        results = hvd.synchronize(handle)
        assert not any(result.requires_grad for result in (results if isinstance(results, list) else [results]))
    with torch.no_grad():
        assert not hvd.allreduce(leaf).requires_grad


def check_inference_tensors():
    """A tensor of any strides may be overwritten; torch allows that in inference mode only."""
    size = hvd.size()
    with torch.inference_mode():
        same(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(size)))
        tensors = [torch.ones(3, 2), torch.ones(2, 3).t(), torch.ones(6, 2)[::2]]
        hvd.allreduce_(tensors[0], op=hvd.Max)
    usual = torch.ones(2, 3).t()
    with torch.inference_mode():
        hvd.allreduce_(usual, op=hvd.Sum)
    same(usual, torch.full((3, 2), float(size)))
    assert not usual.is_inference()
    for tensor in tensors:
        hvd.allreduce_(tensor, op=hvd.Sum)
        hvd.synchronize(hvd.grouped_allreduce_async_([tensor], op=hvd.Sum))
        same(tensor, torch.full((3, 2), float(size * size)))
        same(hvd.broadcast_(tensor, 0), torch.full((3, 2), float(size * size)))
        assert tensor.is_inference()


def check_tensors_that_were_saved_for_backward():
    """When it has been overwritten autograd must not use it."""
    for overwrite in (hvd.allreduce_, lambda tensor: hvd.grouped_allreduce_([tensor]), lambda t: hvd.broadcast_(t, 0)):
        saved = torch.ones(3, requires_grad=True) * 2
        squares = saved.square()
        overwrite(saved.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.sum().backward()


def check_a_handle_lets_go():
    """Of what it gave, and of what it was given."""
    for start in (hvd.allreduce_async, hvd.allreduce_async_, hvd.allgather_async):
        tensor = torch.ones(3, 2).t()
        handle = start(tensor)
        result = hvd.synchronize(handle)
        references = weakref.ref(tensor), weakref.ref(result)
        del tensor, result
        with basics.engine()._progress._driving.lock:  # the thread that ran the operation has left it
            assert [reference() for reference in references] == [None, None]
        assert hvd.poll(handle)


def whole_numbers(dtype, rank, shape=(6, 3)):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def check_the_peer(path):
    """torch.distributed, on Gloo, has the same numbers in the same places."""
    rank, size = hvd.rank(), hvd.size()
    dist.init_process_group("gloo", init_method=f"file://{path}/{size}", rank=rank, world_size=size)
    try:
        for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64):
            compare_with_the_peer(whole_numbers(dtype, rank), ["Sum", "Min", "Max", "Product"])
        for dtype in (torch.complex64, torch.complex128):
            compare_with_the_peer(torch.complex(*[whole_numbers(torch.float64, rank)] * 2).to(dtype), ["Sum"])
    finally:
        dist.destroy_process_group()


def compare_with_the_peer(mine, ops):
    rank, size = hvd.rank(), hvd.size()
    for op in ops:
        theirs = mine.clone()
        dist.all_reduce(theirs, getattr(dist.ReduceOp, op.upper()))
        same(hvd.allreduce(mine, op=getattr(hvd, op)), theirs)
        same(hvd.grouped_allreduce([mine, mine[:1]], op=getattr(hvd, op))[0], theirs)
        if op == "Sum":
            same(hvd.reducescatter(mine, op=hvd.Sum), theirs.tensor_split(size)[rank])
    theirs = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(theirs, mine)
    same(hvd.allgather(mine), torch.cat(theirs))
    theirs = mine.clone()
    dist.broadcast(torch.view_as_real(theirs) if theirs.is_complex() else theirs, size - 1)  # as of 2.4
    same(hvd.broadcast(mine, size - 1), theirs)
    splits = [2, 1, 3, 0][:size]
    theirs = mine.new_empty(splits[rank] * size, 3)
    dist.all_to_all_single(theirs, mine[: sum(splits)].contiguous(), [splits[rank]] * size, splits)
    output, received = hvd.alltoall(mine, splits=splits)
    same(output, theirs)
    assert received.tolist() == [splits[rank]] * size


def check_compiled_functions():
    """The compiler goes round the collectives, in forward and backward."""
    size = hvd.size()

    def step(x):
        total = hvd.allreduce(x * 2, op=hvd.Sum)
        hvd.allreduce_(total, op=hvd.Max)
        handle = hvd.allreduce_async(total * 2, op=hvd.Min)
        rows = hvd.allgather(hvd.synchronize(handle) * 0.5)
        hvd.barrier()
        return (rows.sum() + hvd.allgather(x).sum() + hvd.grouped_allreduce([x], op=hvd.Sum)[0].sum()) * hvd.size()

    compiled = torch.compile(step, backend="eager")
    for leaf in (torch.ones(3), torch.ones(3, requires_grad=True)):
        result = compiled(leaf)
        assert result.item() == 3 * (2 * size * size + size + size) * size
    result.backward()
    same(leaf.grad, torch.full((3,), float(size + size * size)))


CHECKS = [
    check_memory_formats,
    check_lazy_views,
    check_sparse_tensors,
    check_tensors_that_require_a_gradient,
    check_inference_tensors,
    check_tensors_that_were_saved_for_backward,
    check_a_handle_lets_go,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_all_ranks(ranks, check):
    ranks.run(check)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_compiled_functions(ranks):
    ranks.run(check_compiled_functions)


def test_torch_distributed_gives_the_same(ranks, tmp_path):
    ranks.run(check_the_peer, tmp_path)
