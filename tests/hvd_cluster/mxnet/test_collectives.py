"""Each collective of the MXNet binding, on real processes."""

import warnings

import numpy as np
import pytest

from tests.hvd_cluster.mxnet.pool import load

mx, hvd = load()

FLOATS = ["float16", "float32", "float64"]
DTYPES = [*FLOATS, "uint8", "int8", "int32", "int64"]
SHAPES = [(5,), (3, 4), (2, 3, 4), (2, 2, 2, 3), (1, 2, 1, 2, 1)]


def filled(shape, dtype="float32", value=None):
    return mx.nd.full(shape, hvd.rank() + 1 if value is None else value, dtype=dtype)


def total():
    return hvd.size() * (hvd.size() + 1) // 2


def check_allreduce():
    for dtype in DTYPES:
        for shape in SHAPES:
            tensor = filled(shape, dtype)
            result = hvd.allreduce(tensor, op=hvd.Sum, name=f"{dtype}.{shape}")
            assert (result.dtype, result.shape, result.context) == (tensor.dtype, tensor.shape, tensor.context)
            assert (result.asnumpy() == total()).all()
            assert (tensor.asnumpy() == hvd.rank() + 1).all()
            assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
            assert (tensor.asnumpy() == total()).all()
    for dtype in FLOATS:
        assert np.allclose(hvd.allreduce(filled((4,), dtype)).asnumpy(), total() / hvd.size())


def check_ops():
    ranks = np.arange(1, hvd.size() + 1)
    for op, expected in ((hvd.Min, 1), (hvd.Max, hvd.size()), (hvd.Product, ranks.prod()), (hvd.Sum, ranks.sum())):
        assert (hvd.allreduce(filled((3,)), op=op).asnumpy() == expected).all()
    assert (hvd.allreduce(mx.np.array([hvd.rank() == 0, False]), op=hvd.Max).asnumpy() == [True, False]).all()
    scaled = hvd.allreduce(filled((3,)), op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    assert (scaled.asnumpy() == total()).all()
    assert (hvd.allreduce(filled((3,), "int32"), op=hvd.Sum, prescale_factor=0.5).dtype) == np.int32
    with pytest.warns(DeprecationWarning, match="average= is deprecated") as caught:
        assert (hvd.allreduce(filled((2,)), average=False).asnumpy() == total()).all()
    assert caught[0].filename.endswith("test_collectives.py")


def check_groups():
    tensors = [filled((2, 3)), filled((4,), "float64"), filled((1,), "int32")]
    results = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="g")
    assert isinstance(results, list)
    assert all((each.asnumpy() == total()).all() for each in results)
    assert [each.dtype for each in results] == [each.dtype for each in tensors]
    assert hvd.grouped_allreduce_(tensors, op=hvd.Max, priority=3) is tensors
    assert all((each.asnumpy() == hvd.size()).all() for each in tensors)
    assert hvd.grouped_allreduce([]) == []
    gathered = hvd.grouped_allgather([filled((hvd.rank() + 1, 2)), filled((1,), "int64")])
    assert [each.shape for each in gathered] == [(total(), 2), (hvd.size(),)]
    parts = hvd.grouped_reducescatter([filled((hvd.size() * 2, 3)), filled((hvd.size(),))], op=hvd.Sum)
    assert [each.shape for each in parts] == [(2, 3), (1,)]
    assert all((each.asnumpy() == total()).all() for each in parts)


def check_gathering():
    rank, size = hvd.rank(), hvd.size()
    rows = hvd.allgather(filled((rank + 1, 2)), name="rows").asnumpy()
    assert (rows[:, 0] == np.repeat(np.arange(1, size + 1), np.arange(1, size + 1))).all()
    assert hvd.allgather(filled((2,), "float16")).dtype == np.float16
    result = hvd.alltoall(filled((size * 2, 3)))
    assert (result.asnumpy()[::2, 0] == np.arange(1, size + 1)).all()
    splits = [rank + 1] * size
    for given in (splits, tuple(splits), np.array(splits), mx.nd.array(splits, dtype="int32")):
        result, received = hvd.alltoall(filled((sum(splits), 2)), splits=given)
        assert (received.asnumpy() == np.arange(1, size + 1)).all()
        assert (received.dtype, result.shape) == (np.int32, (total(), 2))
    nothing, received = hvd.alltoall(filled((size,)), splits=[0] * (size - 1) + [size])
    assert nothing.shape == ((size * size if rank == size - 1 else 0),)
    assert int(received.sum().asscalar()) == nothing.shape[0]
    part = hvd.reducescatter(filled((size + 1, 2)), op=hvd.Sum, name="part")
    assert part.shape == ((2 if rank == 0 else 1), 2)
    assert (part.asnumpy() == total()).all()
    assert np.allclose(hvd.reducescatter(filled((size,)), prescale_factor=2).asnumpy(), 2 * total() / size)


def check_broadcast():
    for root in range(hvd.size()):
        for dtype in DTYPES:
            tensor = filled((2, 3), dtype)
            result = hvd.broadcast(tensor, root, name=f"{root}.{dtype}")
            assert result is not tensor
            assert (result.asnumpy() == root + 1).all()
            assert hvd.broadcast_(tensor, root_rank=root, priority=2) is tensor
            assert (tensor.asnumpy() == root + 1).all()


def check_objects():
    assert hvd.broadcast_object({"rank": hvd.rank()}, root_rank=hvd.size() - 1, name="o") == {"rank": hvd.size() - 1}
    assert hvd.allgather_object([hvd.rank()]) == [[rank] for rank in range(hvd.size())]


def check_sparse():
    rank, size = hvd.rank(), hvd.size()
    for dtype in FLOATS:
        rows = mx.nd.array([[1, 2], [3, 4]], dtype=dtype)
        tensor = mx.nd.sparse.row_sparse_array((rows, [0, rank + 1]), shape=(6, 2), dtype=dtype)
        result = hvd.allreduce(tensor, op=hvd.Sum, name=f"sparse.{dtype}")
        expected = np.zeros((6, 2))
        expected[0], expected[1 : size + 1] = [size, 2 * size], [3, 4]
        assert (result.stype, result.dtype) == ("row_sparse", tensor.dtype)
        assert (result.asnumpy() == expected).all()
        assert hvd.allreduce_(tensor) is tensor
        assert np.allclose(tensor.asnumpy(), expected / size, rtol=1e-3)
    empty = mx.nd.sparse.zeros("row_sparse", (6, 2))
    assert (hvd.allreduce(empty).asnumpy() == 0).all()


def check_numpy_arrays():
    with mx.util.np_shape(True), mx.util.np_array(True):
        result = hvd.allreduce(mx.np.ones((2,)), op=hvd.Sum)
        assert isinstance(result, mx.np.ndarray)
        assert float(hvd.allreduce(mx.np.array(3.0))) == 3.0
        assert hvd.allgather(mx.np.ones((0, 3))).shape == (0, 3)
        assert isinstance(hvd.allgather(mx.np.ones((1, 3))), mx.np.ndarray)
        with pytest.raises(ValueError, match="reducescatter"):
            hvd.reducescatter(mx.np.array(3.0))


def check_nothing_is_recorded():
    """The copy that an allreduce makes is no identity for autograd."""
    tensor = filled((2,))
    tensor.attach_grad()
    with mx.autograd.record():
        loss = (tensor * tensor + hvd.allreduce(tensor) * 5).sum()
    loss.backward()
    assert (tensor.grad.asnumpy() == 2 * (hvd.rank() + 1)).all()


@pytest.mark.parametrize(
    "check",
    [
        check_allreduce,
        check_ops,
        check_groups,
        check_gathering,
        check_broadcast,
        check_objects,
        check_sparse,
        check_numpy_arrays,
        check_nothing_is_recorded,
    ],
)
def test_collectives(ranks, check):
    ranks.run(check)


def check_process_sets():
    members = hvd.add_process_set([0, 2])
    if hvd.rank() == 1:
        refused = hvd.allreduce(filled((2,)), process_set=members, name="refused")
        with pytest.raises(mx.MXNetError, match=r"not a member|is not part|not in"):
            refused.wait_to_read()
    else:
        assert (hvd.allreduce(filled((2,)), process_set=members, name="members").asnumpy() == 2).all()
        assert (hvd.broadcast(filled((2,)), 2, process_set=members).asnumpy() == 3).all()
        assert hvd.allgather(filled((1,)), process_set=members).shape == (2,)
        assert hvd.alltoall(filled((2,)), process_set=members).shape == (2,)
        assert hvd.reducescatter(filled((2,)), process_set=members, op=hvd.Sum).asnumpy() == [4]
        assert hvd.grouped_allreduce([filled((2,))], process_set=members, op=hvd.Sum)[0].asnumpy()[0] == 4
        assert members.included()
    hvd.remove_process_set(members)


def test_process_sets(pools):
    pools(3).run(check_process_sets)


def check_mismatches():
    rank = hvd.rank()
    differ = "the ranks disagree about the "
    with pytest.raises(mx.MXNetError, match=f"{differ}shape"):
        hvd.allreduce(filled((2 + rank,)), name="m").wait_to_read()
    with pytest.raises(mx.MXNetError, match=f"{differ}dtype"):
        hvd.allreduce(filled((2,), ["int32", "float32"][rank]), name="m").asnumpy()
    with pytest.raises(mx.MXNetError, match=f"{differ}root"):
        hvd.broadcast(filled((2,)), rank, name="m").asnumpy()
    for result in hvd.grouped_allreduce([filled((2,)), filled((2 + rank,))], name="m"):
        with pytest.raises(mx.MXNetError, match=differ):
            result.wait_to_read()
    with pytest.raises(mx.MXNetError, match=f"{differ}shape"):
        hvd.allgather(filled((2, 2 + rank)), name="m")
    with pytest.raises(mx.MXNetError, match=f"{differ}shape"):
        hvd.allreduce(mx.nd.sparse.zeros("row_sparse", (3 + rank, 2)), name="m")
    assert (hvd.allreduce(filled((2,)), op=hvd.Sum, name="m").asnumpy() == 3).all()


def test_ranks_that_disagree(two):
    two.run(check_mismatches)


CALLS = {
    "a list is not an mxnet NDArray": lambda: hvd.allreduce([1.0]),
    "not both": lambda: hvd.allreduce(filled((2,)), average=True, op=hvd.Sum),
    "is not a reduction": lambda: hvd.allreduce(filled((2,)), op=17),
    "a scale factor of 'x'": lambda: hvd.allreduce(filled((2,)), prescale_factor="x"),
    "is not a ProcessSet": lambda: hvd.allreduce(filled((2,)), process_set=[0]),
    "must be an integer": lambda: hvd.broadcast(filled((2,)), root_rank="0"),
    "a group is a list": lambda: hvd.grouped_allreduce(filled((2,))),
    "splits must be": lambda: hvd.alltoall(filled((2,)), splits=mx.nd.array([1, 1])),
    "splits": lambda: hvd.alltoall(filled((2,)), splits=[2, 2]),
    "alltoall": lambda: hvd.alltoall(filled((3,))),
    "storage type 'csr'": lambda: hvd.allreduce(mx.nd.sparse.zeros("csr", (2, 2))),
    "storage type 'row_sparse'": lambda: hvd.allgather(mx.nd.sparse.zeros("row_sparse", (2, 2))),
    "not available for sparse": lambda: hvd.allreduce(mx.nd.sparse.zeros("row_sparse", (2, 2)), op=hvd.Max),
    "op Max": lambda: hvd.reducescatter(filled((2,)), op=hvd.Max),
}


def check_refused_call(text):
    """One error on this rank; the other one, whose call is right, does not wait."""
    with pytest.raises(mx.MXNetError, match=text):
        CALLS[text]().wait_to_read()


def check_refused_calls():
    for text in CALLS:
        check_refused_call(text)
    assert (hvd.allreduce(filled((2,)), op=hvd.Sum).asnumpy() == 3).all()


def test_calls_that_are_refused(two):
    two.run(check_refused_calls)


def check_one_refuses():
    with pytest.raises(mx.MXNetError, match="a list is not an mxnet NDArray"):
        hvd.allreduce([1.0] if hvd.rank() == 0 else filled((2,))).wait_to_read()
    with pytest.raises(mx.MXNetError, match="a list is not an mxnet NDArray"):
        hvd.allgather([1.0] if hvd.rank() == 0 else filled((2,)), name="named")
    assert (hvd.allreduce(filled((2,)), op=hvd.Sum).asnumpy() == 3).all()


def test_a_call_that_one_rank_refuses_fails_on_all(two):
    two.run(check_one_refuses)


def test_before_init():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in (hvd.allreduce, hvd.allgather, hvd.allreduce_, hvd.reducescatter):
            with pytest.raises(mx.MXNetError, match="Horovod has not been initialized"):
                call(mx.nd.ones((2,)))
