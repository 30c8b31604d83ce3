"""Groups, joins, Adasum, and process sets that come and go, through the torch binding on real processes."""

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import InvalidRequestError, MismatchError
from hvd_cluster.core import basics


def mixed():
    """Tensors of several dtypes and shapes, 1 on rank 0, 2 on rank 1..."""
    one = torch.tensor(hvd.rank() + 1)
    return [one.float().expand(3).clone(), one.double().reshape(()), one.to(torch.bfloat16).expand(2, 2), one.int()]


def total():
    return hvd.size() * (hvd.size() + 1) / 2


def check_grouped_allreduce():
    tensors = mixed()
    results = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="g")
    assert isinstance(results, list)
    for tensor, result in zip(tensors, results, strict=True):
        assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
        assert (result == total()).all()
        assert (tensor == hvd.rank() + 1).all()
    handle = hvd.grouped_allreduce_async(tensors[:2])
    while not hvd.poll(handle):
        pass
    assert [float(result.sum()) for result in hvd.synchronize(handle)] == [
        pytest.approx(count * total() / hvd.size()) for count in (3, 1)
    ]
    assert hvd.synchronize(handle) is None
    floats = [torch.full((3,), hvd.rank() + 1.0) for _ in range(20)]
    results = hvd.grouped_allreduce_(floats, op=hvd.Max)
    assert isinstance(results, tuple)
    for tensor, result in zip(floats, results, strict=True):
        assert result is tensor
        assert (tensor == hvd.size()).all()
    handle = hvd.grouped_allreduce_async_(floats, op=hvd.Sum, prescale_factor=0.5)
    assert all((each == hvd.size() ** 2 / 2).all() for each in hvd.synchronize(handle))
    small = hvd.grouped_allreduce(floats[:1], op=hvd.Min, compression=hvd.Compression.fp16)
    assert small[0].dtype == torch.float32


def check_groups_of_one_name_and_different_sizes():
    """They follow each other; at one time, the name is in flight, and on different ranks, they are a mismatch."""
    for shapes in ([1, 1], [2, 1, 1], [1, 1], [1]):
        with basics.engine()._progress._driving.lock:
            handle = hvd.grouped_allreduce_async([torch.ones(rows) for rows in shapes], name="n", op=hvd.Sum)
            with pytest.raises(ValueError, match=r"tensor 'allreduce.n\[0\]' is still in flight"):
                hvd.grouped_allreduce_async([torch.ones(1)], name="n", op=hvd.Sum)
        assert [float(each[0]) for each in hvd.synchronize(handle)] == [hvd.size()] * len(shapes)
    if hvd.size() > 1:
        with pytest.raises(hvd.HorovodInternalError, match="number of tensors in the group: 2 on rank 0; 3 on rank"):
            hvd.grouped_allreduce([torch.ones(1)] * (3 if hvd.rank() else 2))


def check_grouped_allgather():
    rank, size = hvd.rank(), hvd.size()
    tensors = [torch.full((rank + place, 2), rank) for place in range(3)]
    for results in (hvd.grouped_allgather(tensors), hvd.synchronize(hvd.grouped_allgather_async(tensors, name="g"))):
        assert isinstance(results, tuple)
        for place, result in enumerate(results):
            assert result[:, 0].tolist() == [each for each in range(size) for _ in range(each + place)]


def check_grouped_reducescatter():
    size = hvd.size()
    tensors = [torch.arange(size * (place + 1) * 2.0).reshape(-1, 2) for place in range(3)]
    for results in (
        hvd.grouped_reducescatter(tensors, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_reducescatter_async(tensors, op=hvd.Sum)),
        hvd.grouped_reducescatter(tensors, op=hvd.Sum, compression=hvd.Compression.fp16),
    ):
        assert isinstance(results, list)
        for place, result in enumerate(results):
            rows = place + 1
            assert torch.equal(result, tensors[place][rows * hvd.rank() : rows * (hvd.rank() + 1)] * size)


def check_groups_of_no_tensors():
    """Nothing travels: a rank may call them alone."""
    if hvd.rank():
        for kind, wait, start in (
            (list, hvd.grouped_allreduce, hvd.grouped_allreduce_async),
            (tuple, hvd.grouped_allreduce_, hvd.grouped_allreduce_async_),
            (tuple, hvd.grouped_allgather, hvd.grouped_allgather_async),
            (list, hvd.grouped_reducescatter, hvd.grouped_reducescatter_async),
        ):
            assert wait([]) == kind()
            handle = start([], name="none")
            assert hvd.poll(handle)
            assert hvd.synchronize(handle) == kind()


def check_bad_groups():
    for bad in (torch.ones(3), [torch.ones(3), "x"]):
        for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
            with pytest.raises(ValueError, match="tensor"):
                call(bad)
    odd = [torch.ones(3), torch.ones(4 + hvd.rank())]
    if hvd.size() > 1:
        with pytest.raises(MismatchError, match="disagree about the shape"):
            hvd.grouped_allreduce(odd, name="g")
    hvd.grouped_allreduce([torch.ones(3), torch.ones(4)], name="g")


def check_join():
    rank, size = hvd.rank(), hvd.size()
    for step in range(rank + 1):
        result = hvd.allreduce(torch.ones(3), op=hvd.Sum, name="x")
        assert (result == size - step).all()
        gathered = hvd.allgather(torch.tensor([rank]))
        assert gathered.tolist() == list(range(step, size))
        assert hvd.allgather_object({"rank": rank}) == [{"rank": each} for each in range(step, size)]
    assert hvd.join() == size - 1
    assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))


def check_process_sets():
    size, rank = hvd.size(), hvd.rank()
    if size == 1:
        return
    for members in ([0, 1] if size > 2 else [0], [size - 1]):
        made = hvd.add_process_set(members)
        assert made.size() == len(members)
        assert made.ranks == members
        assert made.process_set_id not in (None, hvd.global_process_set.process_set_id)
        assert made.included() == (rank in members)
        if made.included():
            assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=made).item() == sum(members)
            hvd.barrier(made)
            assert hvd.join(process_set=made) in members
        else:
            with pytest.raises(InvalidRequestError, match="not a member"):
                hvd.allreduce(torch.ones(1), process_set=made)
            with pytest.raises(InvalidRequestError, match="not a member"):
                made.rank()
        with pytest.raises(ValueError, match="exists already"):
            hvd.add_process_set(hvd.ProcessSet(members))
        again = hvd.ProcessSet(members)
        hvd.init(process_sets=[again])
        assert again.process_set_id == made.process_set_id
        assert hvd.remove_process_set(made)
        assert again.process_set_id is None
        assert (made.process_set_id, made.size(), made.rank()) == (None, None, None)
        assert made.included() == (rank in members)
        assert not hvd.remove_process_set(made)
    with pytest.raises(ValueError, match="without these process sets"):
        hvd.init(process_sets=[[0]])
    assert not hvd.remove_process_set(hvd.global_process_set)


def check_sets_that_differ():
    if hvd.size() > 1:
        with pytest.raises(MismatchError, match="disagree about the ranks"):
            hvd.add_process_set([hvd.rank()])
    hvd.barrier()


def check_adasum():
    size, rank = hvd.size(), hvd.rank()
    if size == 3:
        with pytest.raises(ValueError, match="power of two"):
            hvd.allreduce(torch.ones(4), op=hvd.Adasum)
        return
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        handles = [hvd.allreduce_async(torch.eye(8, dtype=dtype)[rank] * 2, op=hvd.Adasum) for _ in range(3)]
        handles += [hvd.allreduce_async(torch.full((5,), 3.0, dtype=dtype), op=hvd.Adasum) for _ in range(3)]
        for place, handle in enumerate(handles):
            expected = torch.eye(8, dtype=dtype)[:size].sum(0) * 2 if place < 3 else torch.full((5,), 3.0, dtype=dtype)
            torch.testing.assert_close(hvd.synchronize(handle), expected)


CHECKS = [
    check_grouped_allreduce,
    check_groups_of_one_name_and_different_sizes,
    check_grouped_allgather,
    check_grouped_reducescatter,
    check_groups_of_no_tensors,
    check_bad_groups,
    check_join,
    check_process_sets,
    check_sets_that_differ,
    check_adasum,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_all_ranks(ranks, check):
    ranks.run(check)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_between_hosts(two_hosts, check):
    two_hosts.run(check)
