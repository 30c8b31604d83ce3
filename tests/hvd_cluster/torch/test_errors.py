"""Misuse: the error of each rank, and that the engine works afterwards."""

import pathlib
import shutil
import tempfile
import threading
import time
import warnings
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hvd_cluster.torch as hvd
from collectives.api import DuplicateNameError, InvalidRequestError, MismatchError, RefusedCallError
from tests.checks import each_check


def works():
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [float(hvd.size())] * 3


def message_of(call, error=MismatchError):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def odd_one_out(usual, odd):
    """``odd`` on rank 1, ``usual`` elsewhere."""
    return odd if hvd.rank() == 1 else usual


def sparse_sum(tensor, name="mismatch"):
    return hvd.sparse_allreduce_async(tensor, name, hvd.Sum)()


def mismatches():
    floats, none = torch.ones(4), [0] * hvd.size()
    return {
        "kind": odd_one_out(
            lambda: hvd.allreduce(floats, name="mismatch"), lambda: hvd.broadcast(floats, 0, name="mismatch")
        ),
        "sparse or dense": odd_one_out(
            lambda: sparse_sum(torch.eye(2).to_sparse()), lambda: hvd.allreduce(torch.eye(2), name="mismatch")
        ),
        "dtype": lambda: hvd.allreduce(odd_one_out(floats, floats.double()), name="mismatch"),
        "shape": lambda: hvd.allreduce(odd_one_out(floats, torch.ones(5)), name="mismatch"),
        "op": lambda: hvd.allreduce(floats, op=odd_one_out(hvd.Sum, hvd.Min), name="mismatch"),
        "prescale": lambda: hvd.allreduce(floats, prescale_factor=odd_one_out(1.0, 2.0), name="mismatch"),
        "postscale": lambda: hvd.allreduce(floats, postscale_factor=odd_one_out(1.0, 2.0), name="mismatch"),
        "root": lambda: hvd.broadcast(floats, odd_one_out(0, 1), name="mismatch"),
        "dimension": lambda: hvd.allgather(odd_one_out(torch.ones(2, 3), torch.ones(2, 4)), name="mismatch"),
        "reducescatter op": lambda: hvd.reducescatter(floats, op=odd_one_out(hvd.Sum, hvd.Average), name="mismatch"),
        "reducescatter shape": lambda: hvd.reducescatter(odd_one_out(floats, torch.ones(4, 1)), name="mismatch"),
        "broadcast shape": lambda: hvd.broadcast(odd_one_out(floats, torch.ones(1)), 0, name="mismatch"),
        "broadcast dtype": lambda: hvd.broadcast_(odd_one_out(floats, floats.bool()), 0, name="mismatch"),
        "real": lambda: hvd.allreduce(odd_one_out(floats, floats.to(torch.complex64)), name="mismatch"),
        "alltoall": lambda: hvd.alltoall(
            torch.ones(hvd.size(), *odd_one_out([2], [3])), splits=[1] * hvd.size(), name="mismatch"
        ),
        "gathered dtype": lambda: hvd.allgather(odd_one_out(floats, floats.int()), name="mismatch"),
        "gathered dimensions": lambda: hvd.allgather(odd_one_out(floats, torch.ones(4, 1)), name="mismatch"),
        "dealt out dtype": lambda: hvd.alltoall(odd_one_out(floats, floats.int()), none, name="mismatch"),
        "dealt out dimensions": lambda: hvd.alltoall(odd_one_out(floats, torch.ones(4, 1)), none, name="mismatch"),
        "scattered dtype": lambda: hvd.reducescatter(odd_one_out(floats, floats.double()), name="mismatch"),
        "scattered prescale": lambda: hvd.reducescatter(floats, prescale_factor=odd_one_out(1.0, 2.0), name="mismatch"),
        "scattered postscale": lambda: hvd.reducescatter(
            floats, postscale_factor=odd_one_out(1.0, 2.0), name="mismatch"
        ),
        "group dtype": lambda: hvd.grouped_allreduce([floats, odd_one_out(floats, floats.double())], name="mismatch"),
        "group": lambda: hvd.grouped_reducescatter([floats, torch.ones(odd_one_out(2, 3))], name="mismatch"),
        "scalar": lambda: hvd.allgather(odd_one_out(floats, torch.tensor(1.0)), name="mismatch"),
        "scalars": lambda: hvd.allgather(torch.tensor(1.0), name="mismatch"),
        "scalars dealt out": lambda: hvd.alltoall(torch.tensor(1.0), name="mismatch"),
        "sparse": lambda: sparse_sum(odd_one_out(torch.eye(2), torch.eye(2).double()).to_sparse()),
        "sparse shape": lambda: sparse_sum(odd_one_out(torch.eye(2), torch.eye(3)).to_sparse()),
    }


def check_mismatches():
    for aspect, call in mismatches().items():
        text = message_of(call)
        assert "mismatch" in text, aspect
        assert len(set(hvd.allgather_object(text))) == 1, aspect
        works()


def check_the_kinds_of_a_name_may_come_in_any_order():
    """Asynchronous calls of one name, of which each rank waits for another one first."""
    for _ in range(3):
        starts = [
            lambda: hvd.allreduce_async(torch.ones(2), name="k", op=hvd.Sum),
            lambda: hvd.broadcast_async(torch.full((2,), float(hvd.rank())), 1, name="k"),
        ]
        results = [
            hvd.synchronize(handle).tolist() for handle in [start() for start in odd_one_out(starts, starts[::-1])]
        ]
        assert odd_one_out(results, results[::-1]) == [[float(hvd.size())] * 2, [1.0] * 2]


def check_ranks_that_wait_for_each_other_in_different_calls():
    """Also where the last rank has joined: it waits until the others join."""
    for with_join in (False, True)[: hvd.size() - 1]:
        if not (with_join and hvd.rank() == hvd.size() - 1):
            message = message_of(lambda: hvd.allreduce(torch.ones(3), name=odd_one_out("usual", "odd")))
            assert "'allreduce.usual' on rank" in message
            assert "'allreduce.odd' on rank 1; " in message
        hvd.join()
    works()


def check_an_object_that_cannot_be_pickled():
    lock = threading.Lock()
    for call in (
        lambda: hvd.allgather_object(odd_one_out({}, lock)),
        lambda: hvd.broadcast_object(lock, 1),
        lambda: hvd.broadcast_object(odd_one_out(None, lock), 1, name="lock"),
    ):
        text = message_of(call, InvalidRequestError)
        assert text.startswith("rank 1: an object of type lock cannot be pickled (TypeError: cannot pickle"), text
        assert hvd.allgather_object(text) == [text] * hvd.size()
    assert hvd.broadcast_object(odd_one_out(lock, 5), 1) == 5
    works()


def check_sparse_tensors_that_differ_stay_so():
    """Every later call raises the same error."""
    for usual, odd in ((torch.eye(2), torch.eye(3)), (torch.eye(2), torch.eye(2).double())):
        finish = hvd.sparse_allreduce_async(odd_one_out(usual, odd).to_sparse(), "mismatch", hvd.Sum)
        first, again = message_of(finish), message_of(finish)
        assert first == again
    works()


def check_duplicate_name_on_the_caller_only():
    if hvd.rank() == 0:
        first = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
        assert "twice" in message_of(lambda: hvd.allreduce_async(torch.ones(2), name="twice"), DuplicateNameError)
        hvd.barrier()
    else:
        hvd.barrier()
        first = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
    assert hvd.synchronize(first).tolist() == [float(hvd.size())] * 2
    works()


def bad_calls():
    size = hvd.size()
    rows = torch.ones(size + 1)
    return {
        "uint16": lambda: hvd.allreduce(torch.ones(2, dtype=torch.uint16)),
        "not defined for complex64": lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64), op=hvd.Max),
        "list": lambda: hvd.allreduce([1.0, 2.0]),
        "use sparse_allreduce_async": lambda: hvd.allreduce(torch.eye(2).to_sparse()),
        "to_dense": lambda: hvd.broadcast(torch.eye(2).to_sparse_csr(), 0),
        "sparse COO": lambda: hvd.sparse_allreduce_async(torch.eye(2), "x", hvd.Sum),
        "not available for bool; use Sum": lambda: hvd.sparse_allreduce_async(
            torch.eye(2).bool().to_sparse(), "x", hvd.Average
        ),
        "not available for sparse": lambda: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "x", hvd.Max),
        "to_empty": lambda: hvd.allreduce(torch.ones(2, device="meta")),
        "meta": lambda: hvd.grouped_allgather([torch.ones(2), torch.ones(2, device="meta")]),
        "reduction": lambda: hvd.allreduce(torch.ones(2), op=17),
        "not both": lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum),
        "bool": lambda: hvd.allreduce(torch.ones(2, dtype=torch.bool), op=hvd.Average),
        "root rank": lambda: hvd.broadcast(torch.ones(2), size),
        "entries": lambda: hvd.alltoall(rows, splits=[1] * (size + 1)),
        "add up": lambda: hvd.alltoall(rows, splits=[size + 2] + [0] * (size - 1)),
        "non-negative": lambda: hvd.alltoall(rows, splits=[-1] + [0] * (size - 1)),
        "1-d": lambda: hvd.alltoall(rows, splits=torch.ones(1, size, dtype=torch.int32)),
        "integers": lambda: hvd.alltoall(rows, splits=[0.5] * size),
        "evenly": lambda: hvd.alltoall(rows),
        "at least one dimension": lambda: hvd.reducescatter(torch.tensor(1.0)),
        "cannot be sent": lambda: hvd.allreduce(torch.ones(2), name="\ud800"),
        "too long": lambda: hvd.allreduce(torch.ones(2), name="n" * 100_000),
        "Min is not available": lambda: hvd.reducescatter(torch.ones(2), op=hvd.Min),
        "Adasum is not available": lambda: hvd.reducescatter(torch.ones(2), op=hvd.Adasum),
        "handle": lambda: hvd.poll(3),
        "is not registered": lambda: hvd.allreduce(torch.ones(2), process_set=hvd.ProcessSet([0])),
        "MPI is not in use": hvd.mpi_threads_supported,
    }


def check_bad_calls():
    for word, call in bad_calls().items():
        assert word in message_of(call, InvalidRequestError)
    works()


def check_an_op_that_an_operation_does_not_have():
    """Horovod raises a RuntimeError, which scripts catch; a wrong argument is a ValueError as well."""
    for op in (hvd.Adasum, hvd.Min):
        for error in (RuntimeError, ValueError):
            with pytest.raises(error, match=r"reducescatter.* is not available; use Average or Sum"):
                hvd.reducescatter(torch.ones(4), op=op)


class Wrapper(torch.Tensor):
    """A tensor in the manner of a DTensor: it has a shape, and its numbers are elsewhere."""

    @staticmethod
    def __new__(cls, plain):
        return torch.Tensor._make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        return cls(torch.ones(3))


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def tensors_that_cannot_travel():
    rows = [torch.ones(2), torch.ones(3)]
    with FakeTensorMode():
        fake = torch.ones(3)
    return {
        "a nested tensor, of layout torch.strided, is not supported; give the list": torch.nested.nested_tensor(rows),
        "a nested tensor, of layout torch.jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "call dequantize": torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.quint8),
        "layout torch._mkldnn is not supported; call to_dense": torch.ones(3).to_mkldnn(),
        "layout torch.sparse_csr is not supported; call to_dense": torch.eye(3).to_sparse_csr(),
        "a FakeTensor of shape (3,) has no memory of its own": fake,
        "a Wrapper of shape (3,) has no memory of its own": Wrapper(torch.ones(3)),
        "the memory of a tensor of shape (3,) has been freed": freed(torch.ones(3)),
        "Tensor type torch.float8_e5m2 is not supported; convert": torch.ones(3).to(torch.float8_e5m2),
    }


def check_tensors_that_cannot_travel():
    """Refused by every family, which say which tensor it is."""
    plain = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that some kinds are new and others old
        tensors = tensors_that_cannot_travel()
    for words, tensor in tensors.items():
        for start, call in {
            "allreduce: ": hvd.allreduce,
            "allreduce 'x': ": lambda tensor: hvd.allreduce_(tensor, name="x"),
            "allgather 'x': ": lambda tensor: hvd.allgather_async(tensor, name="x"),
            "broadcast: ": lambda tensor: hvd.broadcast_async_(tensor, 0),
            "alltoall 'x': ": lambda tensor: hvd.alltoall(tensor, [0] * hvd.size(), name="x"),
            "reducescatter: ": hvd.reducescatter,
            "allreduce 'x', tensor 2 of the group: ": lambda tensor: hvd.grouped_allreduce_([plain, tensor], name="x"),
            "allgather, tensor 1 of the group: ": lambda tensor: hvd.grouped_allgather([tensor, plain]),
        }.items():
            text = message_of(lambda call=call, tensor=tensor: call(tensor), InvalidRequestError)
            assert text.startswith(start), text
            assert words in text
    works()


def check_operations_that_need_other_ranks():
    if hvd.size() == 3:
        assert "power of two" in message_of(lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum), NotImplementedError)
    works()


def collectives():
    """Calls of every family."""
    tensor = torch.ones(1)
    return [
        *(partial(call, tensor) for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allgather)),
        *(partial(call, tensor, 0) for call in (hvd.broadcast, hvd.broadcast_, hvd.broadcast_async_)),
        *(partial(call, tensor) for call in (hvd.alltoall, hvd.reducescatter, hvd.reducescatter_async)),
        *(partial(call, [tensor]) for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather)),
        partial(hvd.grouped_reducescatter, [tensor]),
        partial(hvd.sparse_allreduce_async, torch.eye(2).to_sparse(), None, hvd.Sum),
        partial(hvd.broadcast_parameters, [tensor], 0),
        partial(hvd.broadcast_object, 1, 0),
        partial(hvd.allgather_object, 1),
        hvd.barrier,
        hvd.join,
    ]


def check_misuse_of_a_process_set():
    last = hvd.size() - 1
    process_set = hvd.add_process_set([last])
    if hvd.rank() == last:
        assert "choose one of" in message_of(
            lambda: hvd.broadcast(torch.ones(2), 0, process_set=process_set), InvalidRequestError
        )
        assert hvd.broadcast(torch.ones(2), last, process_set=process_set).tolist() == [1.0, 1.0]
    else:
        for call in collectives():
            text = message_of(lambda call=call: call(process_set=process_set), InvalidRequestError)
            assert f"Rank {hvd.rank()} is not a member of the provided process set." in text
    works()
    assert hvd.remove_process_set(process_set)
    for call in collectives():
        assert "is not registered" in message_of(lambda call=call: call(process_set=process_set), InvalidRequestError)
    works()


def check_operations_that_joined_ranks_refuse():
    """Those that have not joined hear of it."""
    if hvd.rank() == 0:
        hvd.join()
    else:
        text = message_of(lambda: hvd.broadcast(torch.ones(2), 0, name="mismatch"))
        assert "the root, rank 0, has joined and sends nothing" in text
        text = message_of(lambda: hvd.allreduce(torch.ones(2), op=hvd.Max, prescale_factor=2.0, name="mismatch"))
        assert "op Max with a prescale factor is not defined for ranks that have joined" in text
        assert hvd.allgather(torch.ones(1)).numel() == hvd.size() - 1
        hvd.join()
    works()


def check_a_call_that_one_rank_refuses_ends_on_all_ranks():
    """And counts as an unnamed call, so that the next ones meet."""
    for _ in range(3):
        splits = [9 if hvd.rank() == 0 else 1] * hvd.size()
        kind = MismatchError if hvd.rank() else InvalidRequestError
        text = message_of(lambda splits=splits: hvd.alltoall(torch.ones(hvd.size()), splits=splits), kind)
        assert "must be non-negative and add up to at most" in text
        assert hvd.rank() == 0 or "rank 0 refused the call" in text
    rows = hvd.alltoall(torch.ones(hvd.size()))
    assert rows.tolist() == [1.0] * hvd.size()


class Failing(hvd.Compression.none):
    """A user's compressor with a bug."""

    @staticmethod
    def compress(tensor):
        raise ZeroDivisionError(tensor.shape)


def check_a_join_that_one_rank_refuses_ends_on_all_ranks():
    folder = pathlib.Path(hvd.broadcast_object(tempfile.mkdtemp()))
    if hvd.rank() == 1:
        message_of(lambda: hvd.join(process_set=5), InvalidRequestError)
        until(lambda: len(list(folder.iterdir())) == hvd.size() - 1)  # until then the others stand in for all
    else:
        assert "rank 1 refused the call: process_set=5 is not a ProcessSet" in message_of(hvd.join, RefusedCallError)
        (folder / str(hvd.rank())).touch()
    works()
    if hvd.rank() == 0:
        shutil.rmtree(folder)


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def check_a_join_after_a_join_that_the_rank_refused():
    """Ranks that train do not wait for it."""
    if hvd.rank() == 1:
        message_of(lambda: hvd.join(process_set=5), InvalidRequestError)
    else:
        for _ in range(2):
            assert hvd.allreduce(torch.ones(2), name="others", op=hvd.Sum).tolist() == [hvd.size() - 1.0] * 2
    assert hvd.join() in range(hvd.size())
    works()


def calls_that_the_binding_refuses_on_rank_1(name):
    ones, half, eye = torch.ones(3), torch.ones(3).to(torch.complex32), torch.eye(2)
    wrong_set = odd_one_out(hvd.global_process_set, None)
    return {
        "dtype": lambda: hvd.allreduce(odd_one_out(ones, half), name=name),
        "none": lambda: hvd.allgather(odd_one_out(ones, None), name=name),
        "sparse": lambda: hvd.broadcast_(odd_one_out(eye, eye.to_sparse()), 0, name),
        "dense": lambda: sparse_sum(odd_one_out(eye.to_sparse(), eye), name),
        "meta": lambda: hvd.reducescatter(odd_one_out(ones, ones.to("meta")), name=name),
        "recorded": lambda: hvd.allreduce(odd_one_out(ones, half).clone().requires_grad_(), name=name),
        "op": lambda: hvd.synchronize(hvd.allreduce_async(ones, op=odd_one_out(hvd.Sum, 99), name=name)),
        "compression": lambda: hvd.allreduce(ones, compression=odd_one_out(hvd.Compression.none, None), name=name),
        "factor": lambda: hvd.allreduce(ones, prescale_factor=odd_one_out(1.0, "x"), name=name),
        "expanded": lambda: hvd.allreduce_(odd_one_out(torch.ones(3), torch.ones(1).expand(3)), name=name),
        "root": lambda: hvd.broadcast(ones, odd_one_out(0, "x"), name),
        "splits": lambda: hvd.alltoall(torch.ones(hvd.size()), odd_one_out([1] * hvd.size(), "x"), name),
        "compress": lambda: hvd.allreduce(ones, compression=odd_one_out(hvd.Compression.none, Failing), name=name),
        "scattered": lambda: hvd.reducescatter(ones, compression=odd_one_out(hvd.Compression.none, Failing), name=name),
        "group's compression": lambda: hvd.grouped_allreduce(
            [ones, ones], compression=odd_one_out(hvd.Compression.none, Failing), name=name
        ),
        "set": lambda: hvd.allreduce(ones, name=name, process_set=wrong_set),
        "group's dtype": lambda: hvd.grouped_allreduce([ones, odd_one_out(ones, half)], name=name),
        "group's length": lambda: hvd.grouped_allreduce(
            [ones] * odd_one_out(3, 1) + odd_one_out([], [None]), name=name
        ),
        "no group": lambda: hvd.grouped_allgather(odd_one_out([ones], ones), name),
        "started group": lambda: hvd.synchronize(hvd.grouped_allgather_async(odd_one_out([ones], [None]), name)),
        "scattered group": lambda: hvd.grouped_reducescatter([odd_one_out(ones, None), ones], name),
    }


def check_a_call_that_the_binding_refuses_on_one_rank_ends_on_all_ranks():
    """Its name, or its number, counts on all of them."""
    kind = odd_one_out(RefusedCallError, InvalidRequestError)
    for name in (None, "refused"):
        for aspect, call in calls_that_the_binding_refuses_on_rank_1(name).items():
            text = message_of(call, kind)
            assert hvd.rank() == 1 or "rank 1 refused the call" in text, (aspect, text)
            works()
    assert hvd.rank() == 1 or "rank 1 refused" in message_of(hvd.barrier, RefusedCallError)
    if hvd.rank() == 1:
        message_of(lambda: hvd.barrier(process_set=5), InvalidRequestError)
    hvd.barrier()
    message_of(lambda: hvd.add_process_set(odd_one_out([0], "ab")), kind)
    for call in calls_that_work():
        call()


def calls_that_work():
    """One unnamed call of each family."""
    ones = torch.ones(hvd.size())
    yield from (partial(call, ones) for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter))
    yield partial(hvd.broadcast, ones, 0)
    for grouped in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        yield partial(grouped, [ones, ones])


def check_a_call_for_others_is_not_reported():
    """The members of the set do not wait for this rank, and a set that is not registered has no members."""
    process_set = hvd.add_process_set([0])
    if hvd.rank():
        message_of(lambda: hvd.allreduce(None, process_set=process_set), InvalidRequestError)
        message_of(lambda: hvd.allreduce(None, process_set=hvd.ProcessSet([1])), InvalidRequestError)
    else:
        assert hvd.allreduce(torch.ones(1), process_set=process_set).tolist() == [1.0]
    works()
    assert hvd.remove_process_set(process_set)


def check_errors_do_not_collect_tracebacks():
    handle = hvd.allreduce_async(odd_one_out(torch.ones(2), torch.ones(3)), name="mismatch")
    with pytest.raises(MismatchError) as first:
        hvd.synchronize(handle)
    with pytest.raises(MismatchError) as second:
        hvd.synchronize(handle)
    assert len(second.traceback) <= len(first.traceback)


def check_average_is_deprecated():
    with pytest.warns(DeprecationWarning, match="average=") as caught:
        result = hvd.allreduce(torch.ones(2), average=False)
    with pytest.warns(DeprecationWarning, match="average=") as caught_in_group:
        hvd.grouped_allreduce_([torch.ones(2)], average=True)
    for warning in (*caught, *caught_in_group):
        assert warning.filename.endswith("test_errors.py")
    assert result.tolist() == [float(hvd.size())] * 2


@each_check(globals())
@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)


def test_use_before_init():
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size, hvd.barrier):
        with pytest.raises(ValueError, match=r"has not been initialized; use hvd\.init"):
            call()
    for call in collectives():
        with pytest.raises(hvd.HorovodInternalError, match="has not been initialized"):
            call()
    assert not hvd.is_initialized()


def test_bad_settings_are_refused_at_init(monkeypatch):
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "soon")
    with pytest.raises(ValueError, match=r"HOROVOD_CYCLE_TIME is 'soon', but must be a number of milliseconds"):
        hvd.init()
    assert not hvd.is_initialized()
