"""Torch's tensors on a GPU, in a world of one: the GPU is the memory of the host, and all streams run late."""

from __future__ import annotations

import contextlib

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import InvalidRequestError
from collectives.backends import table
from collectives.backends.joining import Joining
from collectives.backends.nccl.backend import NcclBackend
from collectives.backends.nccl.watcher import Watcher
from hvd_cluster.torch import gpu
from tests.backends.nccl.fake import FakeDevice, FakeLibrary, FakeNetwork, connector
from tests.backends.nccl.streams import PATIENCE, LateStream


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

    def stream(self, stream):
        return contextlib.nullcontext()

    def is_current_stream_capturing(self):
        return self.capturing


class FakeJoining(Joining):
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
    monkeypatch.setattr(table, "_nccl", lambda group, topology, settings: FakeJoining(group, device))
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


@pytest.mark.leaves("environment")  # torch's first optimizer names a folder there
def test_an_optimizer_trains(cuda):
    """With hooks; the gradients of both passes have gone through the backend when the stream has come to the end."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), [("weight", weight)])
    weight.sum().backward()
    optimizer.step()
    cuda.user.catch_up()
    assert cuda.user.enqueue(lambda: None).wait(PATIENCE)
    assert weight.grad.tolist() == [1.0] * 4


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
    from hvd_cluster import basics

    basics.engine().abort(hvd.HorovodInternalError("told to stop"))
    while not hvd.poll(handle):
        cuda.user.catch_up()
    with pytest.raises(hvd.HorovodInternalError, match="told to stop"):
        hvd.synchronize(handle)
