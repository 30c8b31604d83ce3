"""Tensors whose memory is used again: what a user still sees never changes."""

import gc
import pickle

import numpy as np
import pytest
import torch

import hvd_cluster.torch as hvd
from hvd_cluster.core import memory
from hvd_cluster.torch.tensors import fresh

COUNT = 1 << 18  # of float32: 1 MB


@pytest.fixture(autouse=True)
def closed():
    yield
    memory.results.close()


def result(value=1.0):
    tensor = fresh((COUNT,), torch.float32).owner
    return tensor.fill_(value)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64]
)
def test_a_large_result_is_an_ordinary_tensor(dtype):
    tensor = fresh((COUNT, 2), dtype).owner
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((COUNT, 2), (2, 1), dtype)
    assert not tensor._is_view()
    assert tensor.is_leaf
    assert tensor.data_ptr() % 64 == 0
    tensor.fill_(1)
    assert torch.equal(tensor, torch.ones(COUNT, 2, dtype=dtype))
    assert torch.equal(pickle.loads(pickle.dumps(tensor)), tensor)


def test_its_memory_is_used_again():
    place = result().data_ptr()
    assert result().data_ptr() == place


VIEWS = {
    "itself": lambda tensor: tensor,
    "slice": lambda tensor: tensor[100:200],
    "other shape": lambda tensor: tensor.view(8, -1).t()[3],
    "other type": lambda tensor: tensor.view(torch.int32)[5:],
    "detached": lambda tensor: tensor.detach(),
    "data": lambda tensor: tensor.data,
    "storage": lambda tensor: tensor.untyped_storage(),
    "typed storage": lambda tensor: tensor.storage(),
    "parameter": lambda tensor: torch.nn.Parameter(tensor[7:]),
    "numpy": lambda tensor: tensor.numpy(),
    "slice of numpy": lambda tensor: tensor[5:].numpy()[10:20],
    "memoryview": lambda tensor: memoryview(tensor.numpy()),
    "torch of numpy": lambda tensor: torch.from_numpy(tensor.numpy()[3:]),
    "dlpack": lambda tensor: torch.from_dlpack(tensor[3:]),
    "capsule": torch.utils.dlpack.to_dlpack,
    "numpy of dlpack": lambda tensor: np.from_dlpack(tensor[3:]),
    "set": lambda tensor: torch.empty(0).set_(tensor),
    "as_strided": lambda tensor: tensor.as_strided((3,), (100,)),
    "saved for backward": lambda tensor: (tensor * torch.ones(1, requires_grad=True)).sum(),
    "gradient": lambda tensor: (
        setattr(parameter := torch.zeros(COUNT, requires_grad=True), "grad", tensor) or parameter
    ),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_memory_that_is_seen_is_not_used_again(view):
    tensor = result(7.0)
    place, held = tensor.data_ptr(), view(tensor)
    del tensor
    gc.collect()
    others = [result(0.0) for _ in range(3)]
    assert place not in [other.data_ptr() for other in others]
    del held, others
    gc.collect()
    assert place in [each.data_ptr() for each in [result() for _ in range(4)]]


def test_backward_uses_the_input_of_forward():
    scale = torch.ones(1, requires_grad=True)
    loss = (result(3.0) * scale).sum()
    others = [result(100.0) for _ in range(3)]
    loss.backward()
    assert scale.grad.item() == 3.0 * COUNT
    del others


def test_shared_with_other_processes_it_is_a_copy_in_shared_memory():
    tensor = result(5.0)
    place = tensor.data_ptr()
    tensor.share_memory_()
    assert tensor.data_ptr() != place
    other = result(6.0)
    assert (tensor == 5.0).all()
    del other


def check_results_that_are_kept():
    """Every operation, again and again, with other results in between."""
    rank, size = hvd.rank(), hvd.size()
    kept = []
    for turn in range(12):
        mine = torch.full((size * COUNT,), float(turn + rank))
        gathered = hvd.allgather(mine[:COUNT], name="gather")
        kept.append((gathered.view(size, -1)[:, 5], torch.arange(size) + float(turn)))
        dealt = hvd.alltoall(mine, name="deal")
        kept.append((dealt[::COUNT].numpy(), (torch.arange(size) + float(turn)).numpy()))
        summed = hvd.allreduce(mine, op=hvd.Sum, name="sum")
        kept.append((summed[-2:], torch.full((2,), float(sum(range(size)) + size * turn))))
        kept.append((hvd.broadcast(mine, size - 1, name="cast")[:3], torch.full((3,), turn + size - 1.0)))
        part = hvd.reducescatter(mine, op=hvd.Sum, name="scatter")
        kept.append((part.view(-1, 1 << 14).unbind()[0][9], torch.tensor(float(sum(range(size)) + size * turn))))
        if turn % 3 == 2:
            del kept[: len(kept) // 2]
        for seen, expected in kept:
            assert (torch.as_tensor(seen) == torch.as_tensor(expected)).all()


def test_results_that_are_kept_do_not_change(ranks):
    ranks.run(check_results_that_are_kept)
