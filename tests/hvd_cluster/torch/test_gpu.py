"""Torch's tensors on a GPU, in a world of one: the GPU is the memory of the host, and all streams run late."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import InvalidRequestError
from collectives.backends import registry
from collectives.backends.base import Bootstrap
from collectives.backends.nccl.backend import NcclBackend
from collectives.backends.nccl.watcher import Watcher
from hvd_cluster.core import basics
from hvd_cluster.torch import gpu
from tests.collectives.backends.nccl.fake import FakeDevice, FakeLibrary, FakeNetwork, connector
from tests.collectives.backends.nccl.streams import PATIENCE, LateStream


class Cuda:
    """What the binding needs of torch.cuda, with one late stream as the current one."""

    def __init__(self):
        self.user = LateStream()
        self.capturing = False

    class Event:
        def record(self, stream):
            self.moment = stream.queue.enqueue(lambda: None)

        def query(self):
            return self.moment.is_done

        def wait(self, stream):
            self.moment.precede(stream.cuda_stream)

    class ExternalStream:
        def __init__(self, handle, device):
            self.cuda_stream = handle

    def current_stream(self, index=None):
        stream = self.ExternalStream(self.user.handle, index)
        stream.queue = self.user
        return stream

    def device(self, index):
        return contextlib.nullcontext()

    def stream(self, stream):
        return contextlib.nullcontext()

    def is_current_stream_capturing(self):
        return self.capturing


class FakeBootstrap(Bootstrap):
    def __init__(self, group, device):
        super().__init__(group)
        self._device = device

    def connect(self, offers, attempt):
        connect = connector(FakeLibrary(FakeNetwork()), b"id", self.group, self._device)
        return NcclBackend(self.group, connect, Watcher())

    def close(self):
        return


@pytest.fixture
def cuda(monkeypatch):
    """An initialized world of one whose tensors are on GPU 0; its ``torch.cuda``."""
    made, device = Cuda(), FakeDevice()
    monkeypatch.setattr(gpu, "_cuda", made)
    monkeypatch.setattr(registry, "_nccl", lambda group, topology, settings: FakeBootstrap(group, device))
    hvd.init()
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
        on_gpu.setattr(torch.Tensor, "is_cpu", property(lambda tensor: False), raising=False)
        on_gpu.setattr(torch.Tensor, "get_device", lambda tensor: 0)
        yield made
        made.user.release()
        made.user.catch_up()
    hvd.shutdown()
    made.user.close()
    device.close()


def test_the_stream_of_the_caller_waits_and_not_the_caller(cuda):
    tensor = torch.zeros(3)
    cuda.user.hold()
    cuda.user.enqueue(lambda: tensor.copy_(torch.arange(3.0)))  # a kernel that computes a gradient
    result = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0)
    used = torch.zeros(3)
    end = cuda.user.enqueue(lambda: used.copy_(result))
    assert tensor.tolist() == [0.0] * 3
    cuda.user.release()
    assert end.wait(PATIENCE)
    assert used.tolist() == [0.0, 2.0, 4.0]


def test_in_place(cuda):
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    cuda.user.hold()
    cuda.user.enqueue(lambda: tensor.fill_(3.0))
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum, postscale_factor=0.5)
    assert hvd.synchronize(handle) is tensor
    assert tensor.tolist() == [0.0] * 3
    cuda.user.release()
    assert cuda.user.enqueue(lambda: None).wait(PATIENCE)
    assert tensor.tolist() == [1.5] * 3


@pytest.mark.parametrize(
    "call",
    [
        hvd.allgather,
        lambda tensor: hvd.broadcast(tensor, 0),
        hvd.alltoall,
        lambda tensor: hvd.reducescatter(tensor, op=hvd.Sum),
        lambda tensor: hvd.grouped_allreduce([tensor, tensor.clone()], op=hvd.Sum)[0],
        lambda tensor: hvd.grouped_allgather([tensor])[0],
    ],
    ids=["allgather", "broadcast", "alltoall", "reducescatter", "grouped_allreduce", "grouped_allgather"],
)
def test_every_operation(call, cuda):
    tensor, used = torch.zeros(2, 2), torch.full((2, 2), -1.0)
    tensor += torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    result = call(tensor)
    assert cuda.user.enqueue(lambda: used.copy_(result)).wait(PATIENCE)
    assert used.tolist() == tensor.tolist()


def test_poll_is_true_when_the_gpu_is_done(cuda):
    cuda.user.hold()
    handle = hvd.allreduce_async_(torch.ones(2), op=hvd.Sum)
    polls = [hvd.poll(handle)]
    cuda.user.release()
    while not polls[-1]:
        polls.append(hvd.poll(handle))
    assert polls[0] is False
    hvd.synchronize(handle)


def test_a_tensor_that_is_not_contiguous(cuda):
    tensor = torch.arange(6.0).reshape(2, 3).t()
    assert hvd.allreduce_(tensor, op=hvd.Sum, prescale_factor=2.0) is tensor


@pytest.fixture
def arrived(monkeypatch):
    """The tensors that operations have changed. The kernels of torch are not late here, so its stream waits at once."""
    tensors = []

    def arrive(work):
        assert work.end.wait(PATIENCE)
        tensors.append(work.result().owner)

    monkeypatch.setattr(gpu, "await_end", arrive)
    return tensors


@pytest.fixture
def sends(cuda):
    """An optimizer sends its gradients, as if this rank were not alone."""
    engine = basics.engine()
    alone, engine.topology = engine.topology, dataclasses.replace(engine.topology, size=2)
    yield
    engine.topology = alone


@pytest.mark.leaves("environment")  # torch's first optimizer names a folder there
def test_an_optimizer_trains(sends, arrived):
    weight, large = (torch.nn.Parameter(torch.ones(size)) for size in (4, 1 << 16))
    named = [("weight", weight), ("large", large)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, large], lr=0.5), named)
    for _ in range(2):
        optimizer.zero_grad()
        (weight.sum() + large.sum()).backward()
        optimizer.step()
    assert (weight.tolist(), large.max(), large.min()) == ([0.0] * 4, 0.0, 0.0)
    assert sorted(tensor.numel() for tensor in arrived) == [4, 4, 1 << 16, 1 << 16]


@pytest.mark.leaves("environment")
def test_a_scaler_looks_at_the_combined_gradients(sends, arrived, monkeypatch):
    """As if another rank had an infinite gradient in the first step."""

    def arrive(work):
        wait(work)
        arrived[-1].mul_(float("inf") if len(arrived) == 1 else 1.0)

    wait = gpu.await_end
    monkeypatch.setattr(gpu, "await_end", arrive)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), [("weight", weight)])
    scaler, found = torch.amp.GradScaler("cpu", init_scale=4.0), []
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append((weight.tolist(), scaler.get_scale()))
    assert found == [([1.0] * 4, 2.0), ([0.5] * 4, 2.0)]


@pytest.mark.leaves("environment")
def test_sparse_gradients(sends, arrived):
    model = torch.nn.Embedding(5, 2, sparse=True)
    before = model.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([1, 3, 3])).sum().backward()
        optimizer.step()
    assert model.weight.grad.is_sparse
    assert arrived
    assert (before - model.weight.detach())[:, 0].tolist() == pytest.approx([0.0, 2.0, 0.0, 4.0, 0.0])


@pytest.mark.leaves("environment", "shared_memory")  # torch's compiler keeps semaphores
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # it looks at all attributes
def test_a_compiled_function(cuda, arrived):
    """The compiler goes round the operations."""

    @torch.compile(backend="eager")
    def step(tensor):
        return hvd.allreduce(tensor * 2.0, op=hvd.Sum, name="compiled") + 1.0

    leaf = torch.ones(3, requires_grad=True)
    result = step(leaf)
    result.sum().backward()
    assert (result.tolist(), leaf.grad.tolist()) == ([3.0] * 3, [2.0] * 3)
    assert len(arrived) == 2


def test_batch_normalization_combines_its_statistics_on_the_gpu(cuda, monkeypatch):
    """As if there were other ranks. The kernels of torch are not late here, so its stream waits at once."""
    monkeypatch.setattr(gpu, "await_end", lambda work: work.end.wait(PATIENCE))
    monkeypatch.setattr("hvd_cluster.torch.sync_batch_norm.cuda_built", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: pytest.fail("a tensor is copied to the CPU"))
    input, weights = torch.randn(6, 3, requires_grad=True), torch.arange(18.0).reshape(6, 3)
    plain, ours = torch.nn.BatchNorm1d(3), hvd.SyncBatchNorm(3)
    found, expected = ours._normalize(input), plain(input)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad((output * weights).sum(), input)[0] for output in (found, expected)]
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(ours.running_var, plain.running_var)


def test_a_tensor_on_another_gpu_than_before_is_refused(cuda, monkeypatch):
    hvd.allreduce(torch.ones(2), op=hvd.Sum)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 1)
    with pytest.raises(
        InvalidRequestError, match=r"the tensor is on cuda:1, but .* cuda:0; call torch\.cuda\.set_device"
    ):
        hvd.allreduce(torch.ones(2), op=hvd.Sum)


def test_a_captured_step_is_refused(cuda):
    cuda.capturing = True
    with pytest.raises(InvalidRequestError, match="cannot be captured in a CUDA graph"):
        hvd.allreduce(torch.ones(2), op=hvd.Sum)
    cuda.capturing = False
    hvd.allreduce(torch.ones(2), op=hvd.Sum)


def test_an_abort_reaches_the_stream_that_waits(cuda):
    handle = hvd.allreduce_async_(torch.ones(2), op=hvd.Sum)
    while not handle._pending[0].done:
        hvd.poll(handle)
    from hvd_cluster.core import basics

    basics.engine().abort(hvd.HorovodInternalError("told to stop"))
    while not hvd.poll(handle):
        cuda.user.catch_up()
    with pytest.raises(hvd.HorovodInternalError, match="told to stop"):
        hvd.synchronize(handle)
