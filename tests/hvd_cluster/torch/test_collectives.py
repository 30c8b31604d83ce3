"""Every operation with each dtype and each shape, on 1 to 4 ranks; expected values come from all ranks' inputs."""

import torch

import hvd_cluster.torch as hvd
from tests.checks import each_check

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*INTEGERS, *FLOATS, torch.bool, *COMPLEX]
SHAPES = [(), (0,), (1,), (7,), (0, 3), (5, 0), (4, 3, 2), (1 << 12, 129)]
REDUCE = {
    "Sum": lambda stacked: stacked.sum(0),
    "Average": lambda stacked: stacked.mean(0),
    "Min": lambda stacked: stacked.amin(0),
    "Max": lambda stacked: stacked.amax(0),
    "Product": lambda stacked: stacked.prod(0),
}


def make(shape, dtype, rank):
    """Small whole numbers, different on each rank, so that every dtype holds the exact result of every operation."""
    generator = torch.Generator().manual_seed(17 + rank)
    values = torch.randint(0, 3, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(values.double(), 2 - values.double()).to(dtype)
    return values.to(dtype)


def wide(dtype):
    return torch.complex128 if dtype.is_complex else torch.float64


def everyone(shape, dtype, size):
    return torch.stack([make(shape, dtype, rank).to(wide(dtype)) for rank in range(size)])


def expected_reduction(stacked, op, dtype):
    result = REDUCE[op](stacked)
    return (result if dtype.is_floating_point or dtype.is_complex else result.trunc()).to(dtype)


def same(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if torch.equal(actual, expected):
        return  # most are, and to be told that they are close takes much longer
    torch.testing.assert_close(actual.to(wide(actual.dtype)), expected.to(wide(actual.dtype)), rtol=1e-3, atol=1e-3)


def each_dtype_and_shape(dtypes=DTYPES, shapes=SHAPES):
    """Not their product, which the matrix of backends has. Complex numbers travel as pairs, so they have all shapes."""
    with_all = [dtype for dtype in (torch.float32, torch.complex64) if dtype in dtypes]
    pairs = [(dtype, shapes[-2]) for dtype in dtypes] + [(dtype, shape) for dtype in with_all for shape in shapes]
    return list(dict.fromkeys(pairs))


def check_allreduce():
    for dtype, shape in each_dtype_and_shape():
        given, stacked = make(shape, dtype, hvd.rank()), everyone(shape, dtype, hvd.size())
        for op in REDUCE:
            if (dtype is torch.bool and op == "Average") or (dtype.is_complex and op not in ("Average", "Sum")):
                continue
            tensor, expected = given.clone(), expected_reduction(stacked, op, dtype)
            same(hvd.allreduce(tensor, op=getattr(hvd, op)), expected)
            same(tensor, given)
            same(hvd.allreduce_(tensor, op=getattr(hvd, op)), expected)
            same(tensor, expected)


def check_asynchronous_allreduce():
    cases = each_dtype_and_shape(dtypes=[torch.int32, torch.bfloat16, torch.float32, torch.complex64])
    handles = [
        hvd.allreduce_async(make(shape, dtype, hvd.rank()), op=hvd.Sum, name=f"{number}")
        for number, (dtype, shape) in enumerate(cases)
    ]
    for handle, (dtype, shape) in zip(handles, cases, strict=True):
        same(hvd.synchronize(handle), expected_reduction(everyone(shape, dtype, hvd.size()), "Sum", dtype))
        assert hvd.poll(handle)
        assert hvd.synchronize(handle) is None


def check_scaling():
    for dtype in (torch.int32, torch.float16, torch.float32, torch.float64, *COMPLEX):
        tensor = make((9,), dtype, hvd.rank())
        stacked = everyone((9,), dtype, hvd.size()) * 3.0
        expected = (stacked.sum(0) * 0.5).trunc() if dtype is torch.int32 else stacked.sum(0) * 0.5
        result = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5)
        same(result, expected.to(dtype))


def check_average_of_integers():
    for dtype in INTEGERS:
        largest = torch.full((5,), torch.iinfo(dtype).max if dtype is not torch.int64 else 2**31, dtype=dtype)
        same(hvd.allreduce(largest), largest)
        same(hvd.reducescatter(largest.repeat(hvd.size())), largest)
        negative = torch.tensor([-3, 3, -1, 1]).to(dtype) * (hvd.rank() == 0)
        if dtype is not torch.uint8:
            same(hvd.allreduce(negative), (torch.tensor([-3, 3, -1, 1]) / hvd.size()).trunc().to(dtype))


def check_allgather():
    for dtype, shape in each_dtype_and_shape(shapes=SHAPES[1:]):
        counts = [(shape[0] + rank) % 5 if shape[0] < 100 else shape[0] - rank for rank in range(hvd.size())]
        parts = [make((count, *shape[1:]), dtype, rank) for rank, count in enumerate(counts)]
        expected = torch.cat(parts)
        same(hvd.allgather(parts[hvd.rank()]), expected)
        same(hvd.synchronize(hvd.allgather_async(parts[hvd.rank()], name="gather")), expected)


def check_broadcast():
    for dtype, shape in each_dtype_and_shape():
        given = [make(shape, dtype, rank) for rank in range(hvd.size())]
        for root in range(hvd.size()):
            tensor = given[hvd.rank()].clone()
            same(hvd.broadcast(tensor, root), given[root])
            same(tensor, given[hvd.rank()])
            same(hvd.synchronize(hvd.broadcast_async_(tensor, root, name="cast")), given[root])
            same(tensor, given[root])


def check_alltoall():
    size, rank = hvd.size(), hvd.rank()
    for dtype, shape in each_dtype_and_shape(shapes=[(3,), (2, 3), (700, 33)]):
        splits = [[(sender + 2 * receiver) % shape[0] for receiver in range(size)] for sender in range(size)]
        rows = [make((sum(splits[sender]), *shape[1:]), dtype, sender) for sender in range(size)]
        parts = [rows[sender].split(splits[sender])[rank] for sender in range(size)]
        output, received = hvd.alltoall(rows[rank], splits=torch.tensor(splits[rank], dtype=torch.int32))
        same(output, torch.cat(parts))
        assert received.tolist() == [splits[sender][rank] for sender in range(size)]
        assert received.dtype is torch.int32
    even = hvd.alltoall(torch.full((2 * size,), rank))
    assert even.tolist() == [sender for sender in range(size) for _ in range(2)]


def check_reducescatter():
    size, rank = hvd.size(), hvd.rank()
    for op in ("Sum", "Average"):
        dtypes = DTYPES if op == "Sum" else [*INTEGERS, *FLOATS, *COMPLEX]
        for dtype, shape in each_dtype_and_shape(dtypes, SHAPES[1:]):
            total = expected_reduction(everyone(shape, dtype, size), op, dtype)
            rows = [shape[0] // size + (member < shape[0] % size) for member in range(size)]
            same(hvd.reducescatter(make(shape, dtype, rank), op=getattr(hvd, op)), total.split(rows)[rank])


def check_strides():
    base = torch.arange(24.0).reshape(2, 3, 4) + hvd.rank()
    for view in (base.permute(2, 0, 1), base[:, ::2, 1:], base.expand(2, 2, 3, 4), base[0].t()):
        expected = sum(view - hvd.rank() + rank for rank in range(hvd.size()))
        same(hvd.allreduce(view, op=hvd.Sum), expected)
    inplace = (torch.arange(12.0).reshape(3, 4) + hvd.rank()).t()
    expected = sum(inplace - hvd.rank() + rank for rank in range(hvd.size()))
    same(hvd.allreduce_(inplace, op=hvd.Sum), expected)
    same(inplace, expected)


def check_sixteen_bits_accumulate_in_float32():
    """256 + 1 + 1 is 258 in float32, but bfloat16 would lose each 1 on the way."""
    for dtype, big in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        value = big if hvd.rank() == 0 else 1.0
        result = hvd.allreduce(torch.full((100_000,), value, dtype=dtype), op=hvd.Sum)
        exact = torch.tensor(big + hvd.size() - 1).to(dtype)
        assert (result == exact).all()


def check_objects():
    gathered = hvd.allgather_object({"rank": hvd.rank(), "padding": "x" * hvd.rank()})
    assert [entry["rank"] for entry in gathered] == list(range(hvd.size()))
    root = hvd.size() - 1
    assert hvd.broadcast_object({"from": hvd.rank()} if hvd.rank() == root else None, root) == {"from": root}
    assert hvd.broadcast_object(b"", 0) == b""


def check_topology():
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_initialized()
    assert hvd.is_homogeneous()
    assert hvd.global_process_set.ranks == list(range(hvd.size()))
    hvd.barrier()


def check_order_may_differ():
    """Each rank submits the same names in its own order."""
    names = [f"order.{number}" for number in range(20)]
    mine = names[hvd.rank() :] + names[: hvd.rank()]
    handles = {name: hvd.allreduce_async(torch.full((100,), float(len(name))), op=hvd.Sum, name=name) for name in mine}
    for name in reversed(mine):
        same(hvd.synchronize(handles[name]), torch.full((100,), float(len(name) * hvd.size())))


@each_check(globals())
def test_on_all_ranks(ranks, check):
    ranks.run(check)


@each_check(globals(), check_topology)
def test_between_hosts(two_hosts, check):
    two_hosts.run(check)
