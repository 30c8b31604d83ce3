"""The NCCL backend on a GPU that is the memory of the host."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from collectives.api import CollectiveTimeoutError, DType, HorovodInternalError, PeerLostError, ReduceOp, ShutDownError
from collectives.backends.adasum import adasum
from collectives.backends.completion import DONE
from collectives.backends.nccl import backend as nccl
from collectives.backends.nccl import watcher
from collectives.backends.nccl.backend import NcclBackend
from collectives.backends.nccl.interface import NcclConnection
from collectives.backends.nccl.watcher import LOOK_SECONDS, Watcher
from tests.collectives.backends.device import Uploading
from tests.collectives.backends.matrix import reduce_until_error, run_matrix, shorten
from tests.collectives.backends.members import group_of, in_threads
from tests.collectives.backends.nccl.fake import FakeDevice, FakeLibrary, FakeNetwork, connector
from tests.collectives.backends.nccl.streams import PATIENCE, LateStream


def with_backends(size, body, timeout=PATIENCE):
    """``body(backend, device)`` on a thread of each member; what they return."""

    def member(rank):
        device, group = FakeDevice(rank), group_of(size, rank)
        backend = NcclBackend(group, connector(FakeLibrary(network), b"id", group, device), Watcher(), timeout)
        try:
            return body(backend, device)
        finally:
            backend.close()
            device.close()

    network = FakeNetwork()
    return in_threads(size, member)


def floats(device, *values):
    return device.upload(np.array(values, np.float32), DType.FLOAT32)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_matrix(size, monkeypatch):
    shorten(monkeypatch, "collectives.backends.nccl.backend.LARGE", "collectives.backends.nccl.backend.ROOM")
    with_backends(
        size, lambda backend, device: run_matrix(Uploading(backend, device), backend.group.position, size, size + 1)
    )


def test_matrix_in_small_pieces(monkeypatch):
    """Packed memory is shorter than the tensors."""
    shorten(monkeypatch)
    monkeypatch.setattr(nccl, "ROOM", 1 << 17)
    monkeypatch.setattr(nccl, "LARGE", 1 << 12)
    with_backends(2, lambda backend, device: run_matrix(Uploading(backend, device), backend.group.position, 2, 3))


def test_no_operation_waits():
    """The streams stand still until the end of the last one is awaited."""

    def body(backend, device):
        tensor = floats(device, 1.0, 2.0)
        ends = [backend.allreduce([tensor], [tensor], ReduceOp.SUM) for _ in range(3)]
        before = device.download(tensor).tolist()
        assert ends[-1].wait(PATIENCE)
        return before, device.download(tensor).tolist(), all(end.is_done for end in ends)

    assert with_backends(2, body) == [([1.0, 2.0], [8.0, 16.0], True)] * 2


def test_a_contiguous_tensor_is_not_copied():
    def body(backend, device):
        tensor = floats(device, 1.0, 2.0)
        assert backend.allreduce([tensor], [tensor], ReduceOp.SUM, 1.0, 0.5).wait(PATIENCE)
        return device.launches

    assert with_backends(2, body) == [[], []]


def test_small_tensors_are_packed_by_one_kernel_and_large_ones_stay():
    def body(backend, device):
        large = device.upload(np.ones(nccl.LARGE, np.uint8), DType.UINT8)
        tensors = [device.upload(np.full(9, number, np.uint8), DType.UINT8) for number in range(50)]
        tensors.insert(20, large)
        assert backend.allreduce(tensors, tensors, ReduceOp.SUM).wait(PATIENCE)
        assert device.download(large).max() == 2
        assert [device.download(tensor)[0] for tensor in tensors[:20]] == [2 * number for number in range(20)]
        return device.launches

    assert with_backends(2, body) == [["pack", "unpack"]] * 2


def test_operations_begin_after_the_memory_is_ready_and_results_are_used_after_their_end():
    def body(backend, device):
        user = LateStream()
        tensor, copy = floats(device, 0.0), floats(device, 0.0)
        tensor.ready = user.enqueue(lambda: device.upload_into(tensor, 5.0))
        backend.begin_after(tensor.ready)
        end = backend.allreduce([tensor], [tensor], ReduceOp.SUM)
        end.precede(user.handle)
        used = user.enqueue(lambda: device.upload_into(copy, device.download(tensor)[0] + 1.0))
        assert used.wait(PATIENCE)
        user.close()
        return device.download(copy).tolist()

    assert with_backends(2, body) == [[11.0]] * 2


def test_an_output_that_is_not_ready_is_waited_for():
    """Memory that an allocator gives out again may be in use by the kernels of its last owner."""

    def body(backend, device):
        user = LateStream()
        source, output = floats(device, 1.0), floats(device, 0.0, 0.0)
        output.ready = user.enqueue(lambda: device.upload_into(output, -1.0))
        assert backend.allgather([source], [output], [4, 4]).wait(PATIENCE)
        user.catch_up()
        user.close()
        return device.download(output).tolist()

    assert with_backends(2, body) == [[1.0, 1.0]] * 2


def test_the_members_connect_on_the_gpu_of_the_first_tensor():
    def member(rank):
        device, group = FakeDevice(), group_of(2, rank)
        connect = connector(FakeLibrary(network), b"id", group, device)
        backend = NcclBackend(group, lambda *given: addresses.append(given[0]) or connect(*given), Watcher())
        tensor = floats(device, 1.0)
        backend.begin_after(DONE)
        assert backend.allreduce([tensor], [tensor], ReduceOp.SUM).wait(PATIENCE)
        backend.close()
        device.close()
        return tensor.pointer

    network, addresses = FakeNetwork(), []
    assert sorted(in_threads(2, member)) == sorted(addresses)


def test_memory_that_is_dropped_too_early_is_noticed():
    """This test tests the fake: without an owner, a tensor is somebody else's memory."""

    def body(backend, device):
        source, output = floats(device, 1.0), floats(device, 0.0)
        end = backend.allreduce([source], [output], ReduceOp.SUM)
        del source
        assert end.wait(PATIENCE)
        return device.download(output).tolist()

    assert all(result != [2.0] for result in with_backends(2, body))


def test_the_packed_memory_is_reused_in_order():
    """Also where it grows while earlier operations have not run."""

    def body(backend, device):
        pairs = [[floats(device, *[1.0] * length), floats(device, 2.0)] for length in (1, 10, 300_000)]
        ends = [backend.allreduce(pair, pair, ReduceOp.SUM) for pair in pairs]
        assert ends[-1].wait(PATIENCE)
        return [(device.download(long).min(), device.download(short).max()) for long, short in pairs]

    assert with_backends(2, body) == [[(2.0, 4.0)] * 3] * 2


def test_the_average_of_one_tensor_of_the_widest_integers():
    """It travels in its own type, and yet not in place."""

    def body(backend, device):
        tensor = device.upload(np.array([7, -7]), DType.INT64)
        assert backend.allreduce([tensor], [tensor], ReduceOp.AVERAGE).wait(PATIENCE)
        return device.download(tensor).tolist()

    assert with_backends(2, body) == [[7, -7]] * 2


def test_adasum():
    def body(backend, device):
        values = [1.0, 0.0] if backend.group.position else [0.0, 2.0]
        tensor = device.upload(np.array(values), DType.FLOAT64)
        assert adasum(backend, [tensor], [tensor]).wait(PATIENCE)
        return device.download(tensor).tolist()

    assert with_backends(2, body) == [[1.0, 2.0]] * 2


# Ends.


def test_an_abort_ends_what_has_begun_with_its_error():
    """Rank 1 never comes, so the kernel of rank 0 would run for ever."""
    error, aborted = HorovodInternalError("told to stop"), threading.Event()

    def body(backend, device):
        assert backend.barrier().wait(PATIENCE)
        if backend.group.position:
            return aborted.wait(PATIENCE)
        tensor = floats(device, 1.0)
        end = backend.allreduce([tensor], [tensor], ReduceOp.SUM)
        device.queue.catch_up()
        backend.abort(error)
        for call in (lambda: end.wait(PATIENCE), backend.barrier, lambda: end.precede(device.stream)):
            with pytest.raises(HorovodInternalError) as caught:
                call()
            assert caught.value is error
        aborted.set()
        return True

    assert with_backends(2, body) == [True, True]


def test_communicators_are_aborted_in_one_group():
    """Those of two process sets on one GPU."""

    def member(rank):
        device, watcher, group, library = FakeDevice(), Watcher(), group_of(2, rank), FakeLibrary(network)
        both = [NcclBackend(group, connector(library, id, group, device), watcher) for id in (b"one", b"two")]
        for backend in both:
            assert backend.barrier().wait(PATIENCE)
        met.wait(PATIENCE)
        with watcher._changed:  # so that it sees both at once
            for backend in both:
                backend._life._error = HorovodInternalError("told to stop")
        for backend in both:
            backend.abort(HorovodInternalError("told to stop"))
            backend.close()
        device.close()
        return [is_grouped for _, is_grouped in library.aborts]

    network, met = FakeNetwork(), threading.Barrier(2)
    assert in_threads(2, member) == [[True, True]] * 2


def test_the_next_round_has_a_communicator_of_its_own():
    """On the same GPU and with the same watcher, after the abort of one whose kernel waited for a rank for ever."""

    def member(rank):
        device, watcher, group, library = FakeDevice(), Watcher(), group_of(2, rank), FakeLibrary(network)
        first, second = (NcclBackend(group, connector(library, id, group, device), watcher) for id in (b"1", b"2"))
        assert first.barrier().wait(PATIENCE)
        lost, tensor = first._link.communicator, floats(device, 1.0)
        if rank == 0:
            stuck = first.allreduce([tensor], [floats(device, 0.0)], ReduceOp.SUM)
            device.queue.catch_up()
        met.wait(PATIENCE)
        first.abort(PeerLostError("rank 1 is gone"))
        first.close()
        if rank == 0:
            with pytest.raises(PeerLostError, match="rank 1 is gone"):
                stuck.wait(PATIENCE)
        assert second.allreduce([tensor], [tensor], ReduceOp.SUM).wait(PATIENCE)
        second.close()
        device.close()
        return device.download(tensor).tolist(), [aborted is lost for aborted, _ in library.aborts]

    network, met = FakeNetwork(), threading.Barrier(2)
    assert in_threads(2, member) == [([2.0], [True])] * 2


def test_a_failure_of_a_communicator_ends_the_operations():
    def body(backend, device):
        assert backend.barrier().wait(PATIENCE)
        met.wait(PATIENCE)
        backend._link.communicator.trouble = "remote error"
        error = reduce_until_error(Uploading(backend, device), 5, PATIENCE)
        assert "lost the connection to rank" in str(error)
        assert str(error).endswith("remote error")
        return error.ranks

    met = threading.Barrier(2)
    assert with_backends(2, body) == [(1,), (0,)]


def test_an_operation_that_takes_too_long_is_ended():
    def body(backend, device):
        assert backend.barrier().wait(PATIENCE)
        if backend.group.position:
            return late.wait(PATIENCE)
        end = backend.barrier()
        with pytest.raises(CollectiveTimeoutError, match=r"rank 1 on host 'a' did not finish.*within 0\.5 s.*TIMEOUT"):
            end.wait(PATIENCE)
        return late.set() is None

    late = threading.Event()
    assert with_backends(2, body, timeout=0.5) == [True, True]


def test_an_operation_that_waits_for_kernels_of_its_own_rank_is_not_late():
    """The GPU may have work for minutes before it."""

    def body(backend, device):
        user = LateStream()
        assert backend.barrier().wait(PATIENCE)
        user.hold()
        backend.begin_after(user.enqueue(lambda: None))
        end = backend.barrier()
        assert not end.wait(0.6)
        user.release()
        assert end.wait(PATIENCE)
        user.close()
        return end.is_done

    assert with_backends(2, body, timeout=0.3) == [True, True]


def test_a_call_of_nccl_that_does_not_return_is_ended():
    """NCCL connects to the members that an operation needs, and one of them may hang."""
    aborted, met = threading.Event(), threading.Barrier(2)

    def stuck(*_):
        assert aborted.wait(PATIENCE)
        raise HorovodInternalError("the communicator was aborted")

    def body(backend, device):
        assert backend.barrier().wait(PATIENCE)
        met.wait(PATIENCE)
        if backend.group.position:
            return aborted.wait(PATIENCE)
        communicator = backend._link.communicator
        abort, communicator.allreduce = communicator.abort, stuck
        communicator.abort = lambda: (abort(), aborted.set())
        with pytest.raises(CollectiveTimeoutError, match=r"rank 1 .* did not connect for an operation .* 0\.3 s"):
            backend.barrier()
        return True

    assert with_backends(2, body, timeout=0.3) == [True, True]


def test_a_look_that_fails_ends_the_operations():
    """As an error of NCCL does; and the watcher lives on."""

    def fail():
        raise OSError("a bug")

    device, group, library = FakeDevice(), group_of(1), FakeLibrary(FakeNetwork())
    backend = NcclBackend(group, connector(library, b"id", group, device), Watcher())
    assert backend.barrier().wait(PATIENCE)
    backend._link.communicator.error = fail
    end = backend.barrier()
    assert backend._life._is_aborted.wait(PATIENCE)
    with pytest.raises(HorovodInternalError, match="a look at NCCL failed: OSError"):
        end.wait(PATIENCE)
    backend.close()
    device.close()
    assert len(library.aborts) == 1


def test_an_abort_that_fails_does_not_keep_the_others_from_theirs(caplog):
    def fail():
        raise OSError("a bug")

    library, device = FakeLibrary(FakeNetwork()), FakeDevice()
    communicators = [library.connect(id, 1, 0, device, None) for id in (b"one", b"two")]
    communicators[0].abort = fail
    watcher._abort([NcclConnection(library, device, communicator) for communicator in communicators])
    assert [aborted for aborted, _ in library.aborts] == communicators[1:]
    assert "the abort of a communicator failed" in caplog.text
    device.close()


def test_a_member_that_does_not_come_to_connect():
    def body(backend, device):
        with pytest.raises(CollectiveTimeoutError, match=r"at least one of ranks 1, 2 .* did not connect to NCCL"):
            backend.barrier()
        return True

    def member(rank):
        if rank == 0:
            device, group = FakeDevice(), group_of(3)
            backend = NcclBackend(group, connector(FakeLibrary(FakeNetwork()), b"id", group, device), Watcher(), 0.3)
            body(backend, device)
            backend.close()
            device.close()

    in_threads(1, member)


def test_an_abort_ends_the_connecting():
    device, group, error = FakeDevice(), group_of(2), PeerLostError("rank 1 is gone")
    backend = NcclBackend(group, connector(FakeLibrary(FakeNetwork()), b"id", group, device), Watcher())
    inside = threading.Event()
    backend.attend(inside.set)
    aborter = threading.Thread(target=lambda: inside.wait(PATIENCE) and backend.abort(error))
    aborter.start()
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        backend.barrier()
    aborter.join(PATIENCE)
    backend.close()
    device.close()


def test_close_waits_for_the_operations_and_releases_the_communicator():
    def body(backend, device):
        tensor = floats(device, 1.0)
        backend.allreduce([tensor], [tensor], ReduceOp.SUM)
        communicator = backend._link.communicator
        backend.close()
        with pytest.raises(ShutDownError):
            backend.barrier()
        return device.download(tensor).tolist(), communicator.is_destroyed

    assert with_backends(2, body) == [([2.0], True)] * 2


def test_a_communicator_that_is_being_released_is_not_asked():
    """NCCL frees it meanwhile."""

    def release():
        begun.set()
        asked.wait(5 * LOOK_SECONDS)

    def error():
        if begun.is_set():
            asked.set()
        return ""

    begun, asked = threading.Event(), threading.Event()
    device, group, library = FakeDevice(), group_of(1), FakeLibrary(FakeNetwork())
    backend = NcclBackend(group, connector(library, b"id", group, device), Watcher())
    assert backend.barrier().wait(PATIENCE)
    backend._link.communicator.destroy, backend._link.communicator.error = release, error
    backend.close()
    device.close()
    assert begun.is_set()
    assert not asked.is_set()


def test_a_backend_that_was_never_used_has_no_thread():
    backend = NcclBackend(group_of(2), None, Watcher())
    backend.abort(HorovodInternalError("no matter"))
    backend.close()
