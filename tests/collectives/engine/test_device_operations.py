"""Engines over a device: operations that begin and end later, in any order among the streams."""

import threading

import numpy as np
import pytest

from collectives.api import (
    DType,
    EngineError,
    HorovodInternalError,
    MismatchError,
    Operation,
    PeerLostError,
    ReduceOp,
    Request,
    UnsupportedRequestError,
)
from collectives.backends.completion import DONE
from collectives.buffers import Buffer, as_buffer
from collectives.engine.registration import SetBackends
from collectives.engine.runner import Runner
from collectives.events import Finished, Started
from tests.collectives.backends.device import Device, DeviceBackend, Stream
from tests.collectives.backends.inproc import InprocGroup
from tests.collectives.backends.members import in_threads
from tests.collectives.engine.job import PATIENCE, Caller, Job, ones, outcome, run, running, until

pytestmark = pytest.mark.usefixtures("transport")


class DeviceJob(Job):
    """A job with a device for each rank. ``faults`` go to the device's backends of the global set."""

    def __init__(self, size, *given, faults=None, notifies=True, **settings):
        self.devices = [Device(notifies) for _ in range(size)]
        self._faults = faults
        self.streams = {}
        super().__init__(size, *given, **settings)

    def _set_backends(self, rank, members, scope):
        faults = self._faults if scope == "set-0" else None
        with self._lock:
            self._groups.setdefault(f"{scope}/device", InprocGroup(len(members), faults))
        on_device = DeviceBackend(self._backend(rank, members, f"{scope}/device"), self.devices[rank])
        self.streams[rank, len(members)] = on_device.stream
        return SetBackends.of([self._backend(rank, members, scope), on_device])

    def submit(self, rank, name, values=None, operation=Operation.ALLREDUCE, **fields):
        """Put a tensor on the device of ``rank`` in flight; ``values`` may be a buffer there."""
        engine, device = self.engines[rank], self.devices[rank]
        source = values
        if not isinstance(values, Buffer):
            source = device.upload(ones(engine) if values is None else values, DType.FLOAT64)
        fields = {"op": ReduceOp.SUM} | fields
        request = Request(name, operation, source.dtype, source.shape, device="fake", **fields)
        return engine.submit(request, source, lambda shape: device.empty(source.dtype, shape))

    def result(self, rank, work):
        """The result of ``work``, when it is done."""
        return self.devices[rank].download(self.engines[rank].synchronize(work))

    def run(self, body):
        """``body(rank)`` on a thread of each rank; what they return."""
        return in_threads(self.size, body, PATIENCE)

    def shutdown(self):
        self.run(lambda rank: self.engines[rank].shutdown())

    def hold(self, *ranks, size):
        """Let the streams of the process set of ``size`` members stand still on ``ranks``."""
        for rank in ranks:
            self.streams[rank, size].open.clear()

    def release(self):
        for stream in self.streams.values():
            stream.open.set()


@pytest.fixture
def job(request):
    made = DeviceJob(*getattr(request, "param", (2,)))
    yield made
    made.release()
    made.shutdown()


def started(job, rank, name):
    """An event that is set when ``name`` has started on ``rank``."""
    event = threading.Event()
    job.engines[rank].events.subscribe(
        lambda seen: event.set() if isinstance(seen, Started) and name in seen.names else None
    )
    return event


def released_by_drain(job, monkeypatch):
    """The streams run again when an engine begins to wait for the operations that have begun."""

    def drain_released(runner, seconds):
        job.release()
        drain(runner, seconds)

    drain = Runner.drain
    monkeypatch.setattr(Runner, "drain", drain_released)


def test_every_collective(job):
    values = np.arange(8.0).reshape(4, 2)
    cases = {
        "allreduce": ({}, 3 * values),
        "allgather": ({}, np.concatenate([values, 2 * values])),
        "broadcast": ({"root_rank": 1}, 2 * values),
        "alltoall": ({"splits": (1, 3)}, None),
        "reducescatter": ({}, None),
    }

    def body(rank):
        works = {
            name: job.submit(rank, name, (rank + 1) * values, Operation(name), **fields)
            for name, (fields, _) in cases.items()
        }
        return {name: job.result(rank, work) for name, work in works.items()}

    results = job.run(body)
    for rank, part in enumerate((slice(0, 1), slice(1, 4))):
        expected = {name: result for name, (_, result) in cases.items()}
        expected["alltoall"] = np.concatenate([values[part], 2 * values[part]])
        expected["reducescatter"] = 3 * values[2 * rank : 2 * rank + 2]
        for name, result in results[rank].items():
            np.testing.assert_array_equal(result, expected[name], err_msg=name)


@pytest.mark.parametrize("job", [(3, [(0, 1)])], indirect=True)
def test_works_are_done_when_their_operation_is_and_in_any_order(job):
    def body(rank):
        late = job.submit(rank, "late")
        if rank < 2:
            assert job.result(rank, job.submit(rank, "early", process_set=1)).tolist() == [3.0] * 3
        assert run(job.engines[rank], ones(job.engines[rank]), "host").tolist() == [6.0] * 3
        assert not job.engines[rank].poll(late)
        finished.wait(PATIENCE)
        job.streams[rank, 3].open.set()
        return job.result(rank, late).tolist()

    finished = threading.Barrier(3)
    job.hold(0, 1, 2, size=3)
    order = []
    job.engines[0].events.subscribe(lambda seen: order.extend(seen.names) if isinstance(seen, Finished) else None)
    assert job.run(body) == [[6.0] * 3] * 3
    until(lambda: len(order) == 3)
    assert set(order[:-1]) == {"early", "host"}
    assert order[-1] == "late"


@pytest.fixture
def unpolled(monkeypatch):
    """Without a notice, an end is not seen before the test has failed."""
    monkeypatch.setattr("collectives.engine.runner.POLL_SECONDS", 2 * PATIENCE)


@pytest.mark.parametrize("waits", [True, False])
def test_a_device_wakes_the_engine_when_an_operation_is_over(waits, unpolled, job):
    def body(rank):
        work = job.submit(rank, "x")
        caller = Caller(job.engines[rank], body=lambda engine: engine.synchronize(work)) if waits else None
        until(lambda: job.engines[rank]._loop._runner.flights)
        job.streams[rank, 2].open.set()
        until(lambda: work.done)
        return caller.result() and work.done if waits else work.done

    job.hold(0, 1, size=2)
    assert job.run(body)


def test_an_operation_that_fails_wakes_the_engine(unpolled):
    job = DeviceJob(2, faults={(0, 0): HorovodInternalError("planned")})
    errors = job.run(lambda rank: outcome(lambda: job.result(rank, job.submit(rank, "x"))))
    assert "planned" in str(errors[0])
    job.shutdown()


def test_a_device_that_does_not_notify_is_polled():
    job = DeviceJob(2, notifies=False)
    try:
        assert job.run(lambda rank: job.result(rank, job.submit(rank, "x")).tolist()) == [[3.0] * 3] * 2
    finally:
        job.shutdown()


def test_memory_in_use_is_waited_for_on_the_device(job):
    """As a gradient that a kernel still computes when it is submitted; other operations go on."""

    def body(rank):
        engine, device = job.engines[rank], job.devices[rank]
        source = device.upload(np.full(3, -1.0), DType.FLOAT64)
        computing = Stream()
        computing.open.clear()
        source.ready = computing.enqueue(lambda: np.copyto(device.view(source), ones(engine)))
        work = job.submit(rank, "x", source)
        assert run(engine, ones(engine), "host").tolist() == [3.0] * 3
        assert not work.done
        computing.open.set()
        try:
            return job.result(rank, work).tolist()
        finally:
            computing.close()

    assert job.run(body) == [[3.0] * 3] * 2


def test_parts_of_memory_in_use_are_in_use(job):
    end = job.streams[0, 2].enqueue(lambda: None)
    buffer = job.devices[0].upload(np.ones(4), DType.FLOAT64)
    buffer.ready = end
    assert buffer.part(1, 2).ready is buffer.cast(DType.UINT8).ready is end


def test_a_backend_that_cannot_wait_for_memory_says_so():
    with running(1) as job, pytest.raises(EngineError, match="memory of cpu that is still in use"):
        job.engines[0]._loop._runner.backends()[0].begin_after(DONE)


def test_a_work_is_done_without_a_caller_that_waits(job):
    job.hold(0, 1, size=2)
    began = started(job, 0, "x")
    works = [job.submit(rank, "x") for rank in range(2)]
    assert began.wait(PATIENCE)
    assert not any(work.done for work in works)
    job.release()
    until(lambda: all(work.done for work in works))


def test_an_operation_that_fails_after_it_has_begun_ends_all():
    planned = HorovodInternalError("planned")
    job = DeviceJob(2, faults={(1, 0): planned})
    errors = job.run(lambda rank: outcome(lambda: job.result(rank, job.submit(rank, "x"))))
    assert all(isinstance(error, HorovodInternalError) for error in errors)
    assert "planned" in str(errors[1])
    job.shutdown()


def test_an_abort_fails_what_has_begun(job):
    job.hold(0, 1, size=2)
    began = started(job, 0, "x")
    works = [job.submit(rank, "x") for rank in range(2)]
    assert began.wait(PATIENCE)
    job.engines[0].abort(PeerLostError("told to stop"))
    until(lambda: all(work.done for work in works))
    for rank, work in enumerate(works):
        error = outcome(lambda rank=rank, work=work: job.result(rank, work))
        assert isinstance(error, PeerLostError)
        assert "told to stop" in str(error)


def test_a_shutdown_waits_for_what_has_begun(job, monkeypatch):
    job.hold(0, size=2)
    began = started(job, 0, "x")
    works = [job.submit(rank, "x") for rank in range(2)]
    assert began.wait(PATIENCE)
    released_by_drain(job, monkeypatch)
    job.shutdown()
    assert [job.result(rank, work).tolist() for rank, work in enumerate(works)] == [[3.0] * 3] * 2


@pytest.mark.parametrize("job", [(3, [(0, 1)])], indirect=True)
def test_operations_that_have_begun_end_before_their_process_set_is_removed(job):
    def body(rank):
        work = job.submit(rank, "x", process_set=1) if rank < 2 else None
        if rank == 0:
            assert began.wait(PATIENCE)
        job.engines[rank].remove_process_set(1)
        return work and job.result(rank, work).tolist()

    began = started(job, 0, "x")
    job.hold(0, 1, size=2)
    assert job.run(body) == [[3.0] * 3, [3.0] * 3, None]


@pytest.mark.parametrize("job", [(3, [(0, 1)])], indirect=True)
def test_the_loss_of_a_rank_ends_the_removal_of_a_set_that_waits_for_it(job, monkeypatch):
    """Rank 0 waits for its operation, before the set is removed, and the operation waits for rank 1."""

    def close_later(backend):
        if backend.group.position == 0:
            closing.set()
            assert aborted.wait(PATIENCE), "the abort does not reach a backend that is being closed"
        else:
            ended.wait(PATIENCE)
        close(backend)

    def abort(backend, error):
        abort_now(backend, error)
        if backend.group.size == 2 and backend.group.position == 0:
            aborted.set()

    close, closing, aborted, ended = DeviceBackend.close, threading.Event(), threading.Event(), threading.Event()
    abort_now = DeviceBackend.abort
    monkeypatch.setattr(DeviceBackend, "close", close_later)
    monkeypatch.setattr(DeviceBackend, "abort", abort)
    job.hold(1, size=2)
    began = started(job, 0, "x")
    works = [job.submit(rank, "x", process_set=1) for rank in range(2)]
    assert began.wait(PATIENCE)
    callers = [Caller(engine, body=lambda engine: engine.remove_process_set(1)) for engine in job.engines]
    assert closing.wait(PATIENCE)
    job.vanish(1)
    assert isinstance(callers[0].result(), PeerLostError)
    assert isinstance(works[0].error, PeerLostError)
    ended.set()
    for caller in callers:
        caller.result()


def test_memory_that_a_device_still_uses_after_an_abort_is_kept(monkeypatch):
    monkeypatch.setattr(DeviceBackend, "abort", lambda backend, error: None)
    job = DeviceJob(2)
    job.hold(0, 1, size=2)
    began = started(job, 0, "x")
    works = [job.submit(rank, "x") for rank in range(2)]
    source = works[0].source
    assert began.wait(PATIENCE)
    job.engines[0].abort(PeerLostError("told to stop"))
    until(lambda: all(work.done for work in works))
    assert works[0].source is None
    assert any(source is kept for pair in job.engines[0]._loop._runner._in_use for kept in pair)
    job.release()
    job.shutdown()


@pytest.mark.parametrize(("op", "expected"), [(ReduceOp.SUM, 1.0), (ReduceOp.AVERAGE, 0.5), (ReduceOp.MIN, 1.0)])
def test_a_rank_that_has_joined_stands_in_on_the_device(op, expected, job):
    def body(rank):
        if rank == 1:
            return job.engines[rank].join()
        values = job.result(rank, job.submit(rank, "x", op=op)).tolist()
        job.engines[rank].join()
        return values

    assert job.run(body)[0] == [expected] * 3


def test_adasum_on_the_device(job):
    values = np.array([1.0, 0.0]), np.array([0.0, 2.0])
    results = job.run(lambda rank: job.result(rank, job.submit(rank, "x", values[rank], op=ReduceOp.ADASUM)).tolist())
    assert results == [[1.0, 2.0]] * 2


def test_a_device_without_a_backend_is_refused_and_the_other_rank_hears_of_it():
    with running(2) as job:
        tensor = as_buffer(np.ones(3))
        request = Request("x", Operation.ALLREDUCE, tensor.dtype, tensor.shape, device="cuda")
        with pytest.raises(UnsupportedRequestError, match=r"allreduce 'x': the tensor is on cuda.*tensor\.cpu\(\)"):
            job.engines[0].submit(request, tensor, tensor)
        error = outcome(lambda: run(job.engines[1], np.ones(3), "x"))
        assert isinstance(error, MismatchError)
        assert "rank 0 refused the call: allreduce 'x': the tensor is on cuda" in str(error)
        assert job.run(lambda engine: run(engine, ones(engine), "x")[0]) == [3.0, 3.0]
