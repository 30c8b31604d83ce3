"""The backend "hvd" of torch.distributed: its collectives against the numbers that they stand for, and what trains."""

import time
import warnings
import weakref
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from tests.checks import each_check

pytestmark = pytest.mark.parametrize("ranks", [3], indirect=True)


@contextmanager
def group(path, seconds=60.0):
    """The default group of this process, with all ranks of the pool; they meet by the file ``path``."""
    import hvd_cluster.torch.distributed
    from hvd_cluster.core import basics

    assert hvd_cluster.torch.distributed
    rank, size = basics.rank(), basics.size()
    store = dist.FileStore(str(path), size)
    dist.init_process_group("hvd", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch gives functions new names
            yield rank, size
    finally:
        dist.destroy_process_group()


def in_group(check, path):
    with group(path) as (rank, size):
        check(rank, size)


def own(rank, *shape, dtype=torch.float32):
    """Other numbers on each rank."""
    return (torch.arange(float(torch.Size(shape).numel())).view(shape) + 10 * rank).to(dtype)


def check_a_barrier_under_another_default_device(rank, size):
    with torch.device("meta"):
        dist.barrier()


def check_names(rank, size):
    assert dist.get_backend() == "hvd"
    assert dist.group.WORLD.group_name
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)


def check_all_reduce(rank, size):
    every = [own(each, 5) for each in range(size)]
    for op, expected in (
        (dist.ReduceOp.SUM, sum(every)),
        (dist.ReduceOp.AVG, sum(every) / size),
        (dist.ReduceOp.MIN, every[0]),
        (dist.ReduceOp.MAX, every[-1]),
        (dist.ReduceOp.PRODUCT, torch.stack(every).prod(dim=0)),
    ):
        tensor = own(rank, 5)
        dist.all_reduce(tensor, op)
        torch.testing.assert_close(tensor, expected)


def check_dtypes_and_layouts(rank, size):
    for dtype in (torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool):
        tensor = torch.ones(3, dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        assert tensor.tolist() == [1, 1, 1]
    matrix = own(rank, 3, 4)
    dist.all_reduce(matrix.t()[1:])  # which is not contiguous
    assert torch.equal(matrix[:, 1:], sum(own(each, 3, 4) for each in range(size))[:, 1:])
    gathered = torch.zeros(4, size).t()
    dist.all_gather_into_tensor(gathered, own(rank, 4))
    assert torch.equal(gathered, torch.stack([own(each, 4) for each in range(size)]))


def check_asynchronous(rank, size):
    tensors = [torch.full((7,), float(number)) for number in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    future = works[-1].get_future()
    for work in works:
        assert work.wait()
        assert work.is_completed()
    assert [tensor[0].item() for tensor in tensors] == [number * size for number in range(40)]
    assert future.wait()[0] is tensors[-1]
    late = works[0].get_future()  # of a work that is over
    assert late.wait()[0] is tensors[0]


def check_some_ranks_wait_and_others_do_not(rank, size):
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=rank == 0)
    if work is not None:
        work.wait()
    assert tensor.tolist() == [size] * 3


def check_roots(rank, size):
    tensor = own(rank, 2, 3)
    dist.broadcast(tensor, src=1)
    assert torch.equal(tensor, own(1, 2, 3))
    tensor = own(rank, 4)
    dist.reduce(tensor, dst=1)
    if rank == 1:
        assert torch.equal(tensor, sum(own(each, 4) for each in range(size)))
    parts = [torch.zeros(3) for _ in range(size)] if rank == 0 else None
    dist.gather(own(rank, 3), parts, dst=0)
    if parts is not None:
        assert [part.tolist() for part in parts] == [own(each, 3).tolist() for each in range(size)]
    part = torch.zeros(3)
    dist.scatter(part, [own(each, 3) for each in range(size)] if rank == 1 else None, src=1)
    assert torch.equal(part, own(rank, 3))


def check_all_gather(rank, size):
    parts = [torch.zeros(each + 1) for each in range(size)]  # of different sizes
    dist.all_gather(parts, own(rank, rank + 1))
    assert [part.tolist() for part in parts] == [own(each, each + 1).tolist() for each in range(size)]
    whole = torch.zeros(size * 2, 3)
    dist.all_gather_into_tensor(whole, own(rank, 2, 3))
    assert torch.equal(whole, torch.cat([own(each, 2, 3) for each in range(size)]))


def check_reduce_scatter(rank, size):
    whole = sum(own(each, size, 2) for each in range(size))
    part = torch.zeros(2)
    dist.reduce_scatter_tensor(part, own(rank, size, 2))
    assert torch.equal(part, whole[rank])
    dist.reduce_scatter(part, list(own(rank, size, 2)), dist.ReduceOp.AVG)
    torch.testing.assert_close(part, whole[rank] / size)


def check_all_to_all(rank, size):
    output = torch.zeros(size, 2)
    dist.all_to_all_single(output, own(rank, size, 2))
    assert torch.equal(output, torch.stack([own(each, size, 2)[rank] for each in range(size)]))
    # Rank r sends r + 1 rows to each other rank.
    sent, received = [rank + 1] * size, [each + 1 for each in range(size)]
    output = torch.zeros(sum(received), 2)
    dist.all_to_all_single(output, own(rank, sum(sent), 2), received, sent)
    expected = [own(each, size * (each + 1), 2)[rank * (each + 1) : (rank + 1) * (each + 1)] for each in range(size)]
    assert torch.equal(output, torch.cat(expected))
    outputs = [torch.zeros(each + 1) for each in range(size)]
    dist.all_to_all(outputs, [own(rank, rank + 1) for _ in range(size)])
    assert [each.tolist() for each in outputs] == [own(each, each + 1).tolist() for each in range(size)]


def check_objects(rank, size):
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": each} for each in range(size)]
    values = [f"of {rank}"]
    dist.broadcast_object_list(values, src=1)
    assert values == ["of 1"]
    dist.barrier()


def check_groups(rank, size):
    pair, alone = dist.new_group([0, size - 1]), dist.new_group([size - 1])
    if rank in (0, size - 1):
        tensor = own(rank, 3)
        dist.all_reduce(tensor, group=pair)
        assert torch.equal(tensor, own(0, 3) + own(size - 1, 3))
        dist.broadcast(tensor, src=size - 1, group=pair)  # a rank of the world
    if rank == size - 1:
        tensor = own(rank, 3)
        dist.all_reduce(tensor, group=alone)
        assert torch.equal(tensor, own(rank, 3))
        dist.destroy_process_group(pair)
    elif rank == 0:
        dist.destroy_process_group(pair)


def check_refusals(rank, size):
    with pytest.raises(ValueError, match=r"send\(\) is not available in the backend 'hvd'.*backend=.gloo"):
        dist.send(torch.ones(1), dst=(rank + 1) % size)
    with pytest.raises(ValueError, match=r"BAND.* is not a reduction of the backend 'hvd'; use one of SUM, AVG"):
        dist.all_reduce(torch.ones(1, dtype=torch.int32), dist.ReduceOp.BAND)
    with pytest.raises(ValueError, match=r"the output of an allgather has 3 elements.* but needs"):
        dist.all_gather_into_tensor(torch.zeros(3), torch.ones(5))
    with pytest.raises(ValueError, match=r"rows cannot give .* ranks equally many; give splits"):
        dist.all_to_all_single(torch.zeros(size + 1), torch.zeros(size + 1))
    with pytest.raises(ValueError, match=r"Tensor type torch.float8_e5m2 is not supported"):
        dist.all_reduce(torch.ones(1).to(torch.float8_e5m2))


def check_dtypes_that_differ(rank, size):
    """Torch itself compares those of most other collectives."""
    text = r"the output of shape \(\d+,\) is torch.float64, but the input torch.float32; give tensors of one dtype"
    with pytest.raises(ValueError, match=text):
        dist.all_gather_into_tensor(torch.zeros(size, dtype=torch.float64), torch.ones(1))
    with pytest.raises(ValueError, match=text):
        dist.reduce_scatter_tensor(torch.zeros(1, dtype=torch.float64), torch.ones(size))
    dist.barrier()


def check_lists_of_another_length(rank, size):
    def one_more():
        return [torch.ones(2) for _ in range(size + 1)]

    text = rf"has {size + 1} tensors, but the group {size} ranks; give one for each"
    with pytest.raises(ValueError, match=f"the list of outputs of an all_gather {text}"):
        dist.all_gather(one_more(), torch.ones(2))
    with pytest.raises(ValueError, match="the list of outputs of an all_gather has 0 tensors"):
        dist.all_gather([], torch.ones(2))
    with pytest.raises(ValueError, match=f"the list of inputs of a reduce_scatter {text}"):
        dist.reduce_scatter(torch.zeros(2), one_more())
    with pytest.raises(ValueError, match=f"the list of inputs of an all_to_all {text}"):
        dist.all_to_all(one_more()[1:], one_more())
    with pytest.raises(ValueError, match=f"the list of outputs of an all_to_all {text}"):
        dist.all_to_all(one_more(), one_more()[1:])
    if rank == 0:
        with pytest.raises(ValueError, match=f"the list of outputs of a gather {text}"):
            dist.gather(torch.ones(2), one_more(), 0)
        with pytest.raises(ValueError, match=f"the list of inputs of a scatter {text}"):
            dist.scatter(torch.ones(2), one_more(), 0)
    dist.barrier()


def check_different_shapes(rank, size):
    """The call of the others is in no rank's list: an error, and not a wait for ever."""
    from collectives.api import HorovodInternalError

    with pytest.raises(HorovodInternalError, match=r"float32\[3\].* on rank 0.*float32\[4\].* on rank 1"):
        dist.all_reduce(torch.ones(3 + rank))


def check_sizes_that_do_not_fit(rank, size):
    """The group goes on."""
    with pytest.raises(ValueError, match=r"rank 0 of the group has sent 1 elements, .* of shape \(2,\), has 2"):
        dist.all_gather([torch.zeros(2), *[torch.zeros(1) for _ in range(size - 1)]], torch.ones(1))
    work = dist.all_to_all_single(torch.zeros(size + 1), torch.ones(size), [1] * size, [1] * size, async_op=True)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{size} elements came .* of shape \({size + 1},\) has {size + 1}"):
            work.wait()
    assert not work.is_success()
    assert "elements came" in str(work.exception())
    with pytest.raises(ValueError, match="reduce_scatter has no MIN; use SUM or AVG"):
        dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(size), dist.ReduceOp.MIN)
    dist.barrier()


def check_results_without_a_wait(rank, size):
    parts = [torch.zeros(2) for _ in range(size)]
    work = dist.all_gather(parts, own(rank, 2), async_op=True)
    deadline = time.monotonic() + 60
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [part.tolist() for part in parts] == [own(each, 2).tolist() for each in range(size)]
    assert work.is_success()


def check_several_tensors_of_all_ranks(rank, size):
    outputs = [[torch.zeros(1), torch.zeros(2)] for _ in range(size)]
    dist.all_gather_coalesced(outputs, [own(rank, 1), own(rank, 2)])
    expected = [[own(each, 1).tolist(), own(each, 2).tolist()] for each in range(size)]
    assert [[part.tolist() for part in parts] for parts in outputs] == expected


def check_outputs_are_not_kept(rank, size):
    kept = []
    for length in range(1, 40):
        tensor = torch.zeros(length)
        kept.append(weakref.ref(tensor))
        dist.all_reduce(tensor, async_op=True).wait()
    dist.barrier()
    del tensor
    assert sum(reference() is not None for reference in kept) <= 1


def check_autograd_hears_of_a_write(rank, size):
    factor = torch.ones(size, requires_grad=True)
    saved = torch.zeros(size)
    product = factor * saved
    dist.all_gather_into_tensor(saved, torch.ones(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def check_a_callback_that_waits_for_another_collective(rank, size):
    """As that of the hook for PowerSGD."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        model(torch.randn(8, 64)).pow(2).mean().backward()
    found = [None] * size
    dist.all_gather_object(found, [parameter.grad.sum().item() for parameter in model.parameters()])
    assert all(each == found[0] for each in found)


def check_ddp(rank, size):
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(rank)
    layers = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1), torch.nn.Linear(1, 1)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).pow(2).mean().backward()
        optimizer.step()
    with model.no_sync():
        model(torch.randn(16, 4)).pow(2).mean().backward()
    found = [None] * size
    dist.all_gather_object(found, [parameter.tolist() for parameter in model.parameters()])
    assert all(each == found[0] for each in found)


def check_fsdp(rank, size):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 1))
    alone = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 1))
    alone.load_state_dict(model.state_dict())
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    inputs = own(rank, 4, 6) / 100
    every = torch.cat([own(each, 4, 6) / 100 for each in range(size)])
    for net, rows in ((model, inputs), (alone, every)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(rows).pow(2).mean().backward()
            optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), dict(alone.named_parameters())[name])


@each_check(globals())
def test_on_every_rank(ranks, tmp_path, check):
    ranks.run(in_group, check, tmp_path / "store")


def wait_alone(path):
    """Rank 0 waits for a collective that the others never call."""
    from collectives.api import HorovodInternalError

    with group(path, seconds=2.0) as (rank, _):
        if rank == 0:
            with pytest.raises(HorovodInternalError) as caught:
                dist.all_reduce(torch.ones(1))
            path.with_name("text").write_text(str(caught.value))
        else:
            deadline = time.monotonic() + 60
            while not path.with_name("text").exists() and time.monotonic() < deadline:
                time.sleep(0.01)


def test_the_timeout_of_a_group_ends_a_wait(ranks, tmp_path):
    ranks.run(wait_alone, tmp_path / "store")
    text = (tmp_path / "text").read_text()
    assert "float32[1].0" in text
    assert "rank 1" in text or "ranks [1" in text or "ranks 1" in text, text
