"""Engines over NCCL's backend, on GPUs in host memory: callers go on while streams are still at work."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from collectives.api import (
    DType,
    HorovodInternalError,
    MismatchError,
    Operation,
    PeerLostError,
    ReduceOp,
    Request,
    UnsupportedRequestError,
)
from collectives.backends.base import Group
from collectives.backends.completion import DONE
from collectives.backends.nccl.backend import NcclBackend
from collectives.backends.nccl.watcher import Watcher
from collectives.buffers import Buffer
from collectives.engine.registration import SetBackends
from tests.collectives.backends.members import in_threads
from tests.collectives.backends.nccl.fake import FakeDevice, FakeLibrary, FakeNetwork, connector
from tests.collectives.backends.nccl.streams import LateStream
from tests.collectives.engine.job import PATIENCE, Job, ones, outcome, run, until

pytestmark = pytest.mark.usefixtures("transport")


class NcclJob(Job):
    """A job whose ranks have a GPU each. ``absence`` is why NCCL cannot be used."""

    def __init__(self, size, *given, early=True, absence="", **settings):
        network = FakeNetwork()
        self.devices = [FakeDevice(rank) for rank in range(size)]
        self.libraries = [FakeLibrary(network) for _ in range(size)]
        self.watchers = [Watcher() for _ in range(size)]
        self._early, self._absence = early, absence
        super().__init__(size, *given, **settings)

    def _set_backends(self, rank, members, scope):
        group = Group(tuple(members), members.index(rank), tuple(f"host-{member}" for member in members))
        connect = connector(self.libraries[rank], scope.encode(), group, self.devices[rank])
        nccl = NcclBackend(group, connect, self.watchers[rank], 10.0, self._early, self._absence)
        return SetBackends.of([self._backend(rank, members, scope), nccl])

    def submit(self, rank, name, values, operation=Operation.ALLREDUCE, **fields):
        device = self.devices[rank]
        source = values if isinstance(values, Buffer) else device.upload(np.asarray(values, np.float64), DType.FLOAT64)
        fields = {"op": ReduceOp.SUM} | fields
        request = Request(name, operation, source.dtype, source.shape, device="cuda", **fields)

        def allocate(shape):
            return device.upload(np.full(shape, -1.0), DType.FLOAT64)

        return self.engines[rank].submit(request, source, allocate)

    def result(self, rank, work):
        output = self.engines[rank].synchronize(work)
        assert work.end.wait(PATIENCE)
        return self.devices[rank].download(output)

    def run(self, body):
        return in_threads(self.size, body, PATIENCE)

    def close(self):
        self.run(lambda rank: self.engines[rank].shutdown())
        for device in self.devices:
            device.close()


@pytest.fixture
def job(request):
    made = NcclJob(*getattr(request, "param", (2,)))
    yield made
    made.close()


def test_every_collective(job):
    values = np.arange(8.0).reshape(4, 2)
    cases = {"allreduce": {}, "allgather": {}, "broadcast": {"root_rank": 1}, "alltoall": {"splits": (1, 3)}}
    cases["reducescatter"] = {}

    def body(rank):
        works = {
            name: job.submit(rank, name, (rank + 1) * values, Operation(name), **fields)
            for name, fields in cases.items()
        }
        return {name: job.result(rank, work) for name, work in works.items()}

    for rank, (results, part) in enumerate(zip(job.run(body), (slice(0, 1), slice(1, 4)), strict=True)):
        expected = {
            "allreduce": 3 * values,
            "allgather": np.concatenate([values, 2 * values]),
            "broadcast": 2 * values,
            "alltoall": np.concatenate([values[part], 2 * values[part]]),
            "reducescatter": 3 * values[2 * rank : 2 * rank + 2],
        }
        for name, result in results.items():
            np.testing.assert_array_equal(result, expected[name], err_msg=name)


def test_a_caller_goes_on_before_the_operation_has_run(job):
    """The streams run nothing until both callers have looked."""

    def submit(rank):
        return job.submit(rank, "x", [1.0])

    for device in job.devices:
        device.queue.hold()
    works = job.run(submit)
    outputs = job.run(lambda rank: job.engines[rank].synchronize(works[rank]))
    assert [device.download(output).tolist() for device, output in zip(job.devices, outputs, strict=True)] == [
        [-1.0]
    ] * 2
    for work, device in zip(works, job.devices, strict=True):
        assert work.end is not DONE
        device.queue.release()
    assert job.run(lambda rank: job.result(rank, works[rank]).tolist()) == [[2.0]] * 2


def test_memory_lives_as_long_as_the_operation(job):
    """The user drops the input as soon as the call is back, and the memory is given to somebody else."""

    def body(rank):
        work = job.submit(rank, "x", [5.0, 6.0])
        job.engines[rank].synchronize(work)
        gc.collect()
        return job.result(rank, work).tolist()

    assert job.run(body) == [[10.0, 12.0]] * 2


def test_streams_of_the_user_wait(job):
    """A gradient is computed late and used late; no thread waits in between."""

    def body(rank):
        user, device = LateStream(), job.devices[rank]
        source, sums = (device.upload(np.zeros(2), DType.FLOAT64) for _ in range(2))
        source.ready = user.enqueue(lambda: device.upload_into(source, rank + 1.0))
        work = job.submit(rank, "x", source)
        output = job.engines[rank].synchronize(work)
        work.end.precede(user.handle)
        used = user.enqueue(lambda: device.upload_into(sums, device.download(output)[0] + 1.0))
        assert used.wait(PATIENCE)
        user.close()
        return device.download(sums).tolist()

    assert job.run(body) == [[4.0, 4.0]] * 2


def test_memory_is_released_when_the_operation_is_over(job):
    works = [job.submit(rank, "x", [1.0]) for rank in range(2)]
    until(lambda: all(work.done for work in works))
    until(lambda: not any(engine._loop._runner.flights for engine in job.engines))


def test_without_asynchronous_completion_the_caller_waits():
    job = NcclJob(2, early=False)

    def body(rank):
        output = job.engines[rank].synchronize(job.submit(rank, "x", [1.0]))
        return job.devices[rank].download(output).tolist()

    assert job.run(body) == [[2.0]] * 2
    job.close()


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN])
def test_a_rank_that_has_joined_stands_in(op, job):
    def body(rank):
        if rank == 1:
            return job.engines[rank].join()
        values = job.result(rank, job.submit(rank, "x", [3.0], op=op)).tolist()
        job.engines[rank].join()
        return values

    assert job.run(body)[0] == [3.0]


@pytest.mark.parametrize("job", [(3, [(0, 2)])], indirect=True)
def test_process_sets_share_a_gpu(job):
    def body(rank):
        works = [job.submit(rank, "all", [rank + 1.0])]
        if rank != 1:
            works.append(job.submit(rank, "some", [rank + 1.0], process_set=1))
        return [job.result(rank, work).tolist() for work in works]

    assert job.run(body) == [[[6.0], [4.0]], [[6.0]], [[6.0], [4.0]]]


def test_a_process_set_that_is_added_and_removed(job):
    def body(rank):
        engine = job.engines[rank]
        id = engine.add_process_set([1])
        result = job.result(rank, job.submit(rank, "x", [2.0], process_set=id)).tolist() if rank else None
        engine.remove_process_set(id)
        return result

    assert job.run(body) == [None, [2.0]]


def test_tensors_of_the_host_go_their_own_way(job):
    def body(rank):
        work = job.submit(rank, "x", [1.0])
        return run(job.engines[rank], ones(job.engines[rank]), "host").tolist(), job.result(rank, work).tolist()

    assert job.run(body) == [([3.0] * 3, [2.0])] * 2


def test_a_tensor_on_the_host_on_one_rank_and_on_the_gpu_on_the_other(job):
    def body(rank):
        if rank:
            return outcome(lambda: run(job.engines[rank], np.ones(1), "x"))
        return outcome(lambda: job.result(rank, job.submit(rank, "x", [1.0])))

    errors = job.run(body)
    assert all(isinstance(error, MismatchError) for error in errors)
    assert "cuda" in str(errors[0])


def test_a_lost_rank_ends_what_has_begun(job):
    def body(rank):
        work = job.submit(rank, "x", [1.0])
        return job.result(rank, work).tolist()

    assert job.run(body) == [[2.0]] * 2
    job.vanish(1)
    error = outcome(lambda: job.result(0, job.submit(0, "y", [1.0])))
    assert isinstance(error, PeerLostError)
    until(lambda: job.libraries[0].aborts)


def test_an_abort_reaches_who_uses_the_result_later(job):
    work, _ = (job.submit(rank, "x", [1.0]) for rank in range(2))
    until(lambda: work.done)
    job.engines[0].abort(HorovodInternalError("told to stop"))
    with pytest.raises(HorovodInternalError, match="told to stop"):
        work.end.precede(job.devices[0].stream)


def test_where_nccl_cannot_be_used_the_reason_is_named():
    job = NcclJob(2, absence="NCCL cannot be used on rank 1 on host 'b': cupy is missing; install it with: pip")
    with pytest.raises(
        UnsupportedRequestError, match=r"the tensor is on cuda, and NCCL cannot be used on rank 1.*cupy"
    ):
        job.submit(0, "x", [1.0])
    assert job.run(lambda rank: run(job.engines[rank], ones(job.engines[rank]), "y").tolist()) == [[3.0] * 3] * 2
    job.close()
