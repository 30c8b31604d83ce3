"""pygloo, in an environment of Python 3.10 without torch: ``make test-pygloo``. Elsewhere only the pure parts run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from functools import partial
from importlib.util import find_spec
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.api import (
    DType,
    HorovodInternalError,
    Operation,
    PeerLostError,
    ReduceOp,
    SettingsError,
    ShutDownError,
    Topology,
)
from collectives.backends import registry
from collectives.backends.gloo.library import pack_offer, unpack_offers
from collectives.backends.messaging import MessagingBackend
from collectives.backends.pygloo.bootstrap import PyglooBootstrap
from collectives.backends.pygloo.transport import PyglooTransport, Transfer, in_order
from collectives.backends.registry import preload_gloo
from collectives.kernels.reduction import reduction
from collectives.net.attempts import ConnectAttempt
from collectives.settings import Settings
from hvd_cluster import run
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import global_process_set
from hvd_cluster.ops.arrays import in_place
from hvd_cluster.ops.submission import run as run_operation
from tests.collectives.backends import group_cases
from tests.collectives.backends.group_cases import LENGTHS, SOON
from tests.collectives.backends.matrix import reduce_until_error, run_matrix
from tests.collectives.backends.members import Member, Processes, group_of, in_threads
from tests.collectives.backends.nccl.gpus import gpu_of_each_thread
from tests.collectives.backends.offers import meet
from tests.interrupts import aborted_under

needs_pygloo = pytest.mark.skipif(find_spec("pygloo") is None, reason="there is no pygloo: make test-pygloo has one")
connect, with_backends = (
    partial(group_cases.connect, PyglooBootstrap),
    partial(group_cases.with_backends, PyglooBootstrap),
)


# Pure parts.


def done_by(members: list[list[Transfer]]) -> int:
    """How many transfers take place if each send and each receive blocks until its other side has begun."""
    queues, count = [deque(transfers) for transfers in members], 0
    while True:
        pair = next(((i, j) for i, j in permutations(range(len(queues)), 2) if meets(queues, i, j)), None)
        if pair is None:
            return count
        for member in pair:
            queues[member].popleft()
        count += 1


def meets(queues: list[deque[Transfer]], sender: int, receiver: int) -> bool:
    if not (queues[sender] and queues[receiver]):
        return False
    send, receive = queues[sender][0], queues[receiver][0]
    return (send.peer, send.is_send, receive.peer, receive.is_send) == (receiver, True, sender, False)


def transfers_of(member: int, messages: set[tuple[int, int]]) -> list[Transfer]:
    sends = [Transfer(receiver, True, 0, 1) for sender, receiver in messages if sender == member]
    return sends + [Transfer(sender, False, 0, 1) for sender, receiver in messages if receiver == member]


@given(
    st.integers(2, 7).flatmap(
        lambda size: st.tuples(st.just(size), st.sets(st.tuples(*[st.integers(0, size - 1)] * 2)))
    )
)
def test_no_set_of_messages_blocks(case):
    size, pairs = case
    messages = {pair for pair in pairs if pair[0] != pair[1]}
    members = [in_order(transfers_of(member, messages), member, size) for member in range(size)]
    assert done_by(members) == len(messages)


def test_sends_first_would_block():
    messages = {(0, 1), (1, 0)}
    assert done_by([transfers_of(member, messages) for member in range(2)]) == 0


def test_members_with_different_bindings_are_told():
    offers = [pack_offer("torch", b"end", b"entry"), pack_offer("pygloo", b"entry")]
    with pytest.raises(SettingsError, match="through pygloo, but rank 0 on host 'a' through torch; install the same"):
        unpack_offers("pygloo", offers, group_of(2, 1))
    assert unpack_offers("pygloo", offers[1:], group_of(1)) == [[b"entry"]]


def test_a_signal_handler_may_abort_while_its_thread_notes_an_error():
    transport = PyglooTransport(group_of(2), SimpleNamespace(fileno=lambda: 0, kill=lambda: None), 9.0)
    error = HorovodInternalError("in a signal handler")
    assert aborted_under(transport._error_lock, lambda: transport.abort(error))
    with pytest.raises(HorovodInternalError) as caught:
        transport.barrier()
    assert caught.value is error


@pytest.mark.skipif(find_spec("pygloo") is not None, reason="pygloo is there")
def test_without_pygloo():
    with pytest.raises(ImportError, match=r"pip install 'hvd-cluster\[pygloo\]'"):
        registry.prepare([0, 1], Topology(0, 2, hosts=("a", "a")), Settings(cpu_operations="pygloo"), "127.0.0.1")


def test_a_pygloo_that_cannot_be_imported(tmp_path, monkeypatch):
    package = tmp_path / "pygloo"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libuv.so.1: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"its import fails: libuv\.so\.1: no such file; install it again with: pip"):
        PyglooBootstrap(group_of(2), 20.0)


# With pygloo.


@needs_pygloo
@pytest.mark.parametrize("size", [2, 3])
def test_processes(size):
    with Processes(size, partial(group_cases.work_in_a_process, PyglooBootstrap)) as processes:
        assert processes.results() == ["done"] * size


@needs_pygloo
def test_killed_member():
    with Processes(3, partial(group_cases.reduce_in_a_process, PyglooBootstrap)) as processes:
        for rank in range(3):
            assert processes.hear(rank) == "reducing"
        processes.kill(1)
        killed = time.monotonic()
        assert [processes.hear(rank) for rank in (0, 2)] == ["PeerLostError"] * 2
        assert time.monotonic() - killed < 15  # Gloo's timeout is 20 s


@needs_pygloo
def test_alone():
    with_backends(1, lambda backend: run_matrix(backend, 0, 1))


@needs_pygloo
def test_many_pieces(monkeypatch):
    monkeypatch.setattr("collectives.backends.pygloo.transport.PIECE", 1 << 17)
    with_backends(3, lambda backend: run_matrix(backend, backend.rank, 3))


@needs_pygloo
@LENGTHS
def test_abort_reaches_members_that_do_not_talk_to_the_aborted_one(length):
    group_cases.check_abort_reaches_others(PyglooBootstrap, length)


@needs_pygloo
@LENGTHS
def test_silent_member(length):
    group_cases.check_silent_member(PyglooBootstrap, length)


@needs_pygloo
def test_abort_before_a_call_and_after_close():
    group_cases.check_abort_before_a_call_and_after_close(PyglooBootstrap)


@needs_pygloo
def test_closing_is_idempotent_and_peers_notice():
    group_cases.check_closing(PyglooBootstrap)


@needs_pygloo
def test_other_threads_run_and_waits_are_reported_while_a_member_is_silent():
    def body(backend: MessagingBackend) -> None:
        if backend.rank == 0:
            waits, beats = [], []
            backend.attend(lambda: waits.append(None))
            beating = threading.Thread(target=beat, args=(beats,))
            beating.start()
            reduce_until_error(backend, 8, 20)
            over.set()
            beating.join(10)
            assert len(waits) > 3
            assert len(beats) > 10
        left.wait(20)

    def beat(beats: list[None]) -> None:
        while not over.wait(0.01):
            beats.append(None)

    left, over = threading.Barrier(2), threading.Event()
    with_backends(2, body, timeout=1.5)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # nobody may collect it
    except psutil.NoSuchProcess:
        return True


@needs_pygloo
@pytest.mark.parametrize("with_child", [False, True], ids=["alone", "with a forked child"])
def test_the_helper_ends_with_its_rank(with_child):
    """Also while it is inside Gloo, and while a child of the rank has its descriptors."""
    with Processes(2, partial(_wait_in_gloo, with_child)) as processes:
        helper, child = processes.hear(0)
        assert processes.hear(1) == "here"
        assert psutil.pid_exists(helper)
        processes.kill(0)
        deadline = time.monotonic() + 20
        while not has_ended(helper) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert has_ended(helper)
        if child:
            assert not has_ended(child)
            os.kill(child, signal.SIGKILL)
        assert processes.hear(1) == "PeerLostError"


@needs_pygloo
def test_a_helper_that_ends_by_itself():
    def body(backend: MessagingBackend) -> None:
        if backend.rank == 0:
            backend._transport._helper._process.kill()
            with pytest.raises(HorovodInternalError, match="the helper process of pygloo on this rank has ended"):
                backend.barrier()
        else:
            assert isinstance(reduce_until_error(backend, 8, 20), PeerLostError)
        left.wait(20)

    left = threading.Barrier(2)
    with_backends(2, body, SOON)


@needs_pygloo
def test_nobody_comes():
    """In time; the group has no backend then, and nothing is left."""
    bootstrap = PyglooBootstrap(group_of(2), 20.0)
    missing = PyglooBootstrap(group_of(2, 1), 20.0)
    missing.close()
    with ConnectAttempt(1.0) as attempt, pytest.raises(HorovodInternalError, match="rank 1 on host 'a'"):
        bootstrap.connect([bootstrap.offer, missing.offer], attempt)
    bootstrap.close()
    bootstrap.close()


@needs_pygloo
def test_an_abort_ends_a_connection_attempt():
    """Of a member that waits for the connection of the other one: Gloo lets the lower port connect."""
    error = HorovodInternalError("told to stop")
    assert any(_is_aborted(error) for _ in range(20))


def _is_aborted(error: HorovodInternalError) -> bool:
    bootstrap, other = PyglooBootstrap(group_of(2), 20.0), PyglooBootstrap(group_of(2, 1), 20.0)
    with ConnectAttempt(20.0) as attempt:
        timer = threading.Timer(0.3, attempt.abort, (error,))
        timer.start()
        try:
            bootstrap.connect([bootstrap.offer, other.offer], attempt).close()
        except HorovodInternalError as raised:
            return raised is error
        else:
            return False
        finally:
            timer.join()
            bootstrap.close()
            other.close()


@needs_pygloo
def test_an_address_of_another_host():
    with pytest.raises(SettingsError, match=r"'192\.0\.2\.77'.*interfaces of this host are: .*lo"):
        PyglooBootstrap(group_of(1), 20.0, "192.0.2.77")


@needs_pygloo
@pytest.mark.skipif(find_spec("torch") is not None, reason="torch's Gloo comes first")
def test_gloo_is_pygloo_where_there_is_no_torch():
    assert preload_gloo() == "pygloo"
    topology = Topology(0, 2, hosts=("a", "a"))
    bootstrap, *_ = registry.prepare([0, 1], topology, Settings(cpu_operations="gloo"), "127.0.0.1")
    assert isinstance(bootstrap, PyglooBootstrap)
    bootstrap.close()


@needs_pygloo
@pytest.mark.parametrize("asked", ["gloo", "pygloo"])
def test_a_job(asked):
    assert run(_sums, num_proc=2, env={"HOROVOD_CPU_OPERATIONS": asked}) == [[3.0, 3.0]] * 2


@needs_pygloo
def test_two_hosts():
    with Processes(4, _work_on_two_hosts) as processes:
        assert processes.results() == [["pygloo"] * 3] * 4


def _work_on_two_hosts(member: Member) -> list[str]:
    topology = Topology(member.rank, member.size, hosts=tuple("aabb"))
    bootstrap, *_ = registry.prepare(range(member.size), topology, Settings(cpu_operations="pygloo"), "127.0.0.1")
    backend = meet(bootstrap, member.store, 30.0)
    run_matrix(backend, member.rank, member.size, roundings=2)
    member.meet_others("matrix-done")
    backend.close()
    return [part.name for part in backend._parts]


@needs_pygloo
def test_tensors_on_gpus_travel_as_copies(monkeypatch):
    gpus, met, made = gpu_of_each_thread(monkeypatch), threading.Barrier(2), {}

    def member(rank):
        topology = Topology(rank, 2, rank, 2, hosts=("a", "a"), cores=1)
        made[rank] = registry.prepare([0, 1], topology, Settings(gpu_operations="pygloo"), "127.0.0.1")
        met.wait(SOON)
        with ConnectAttempt(SOON) as attempt:
            backend = made[rank][1].connect([made[each][1].offer for each in range(2)], attempt)
        device = gpus(0, rank)
        tensor = device.upload(np.full(1000, rank + 1.0), DType.FLOAT64)
        assert backend.allreduce([tensor], [tensor], ReduceOp.SUM).wait(SOON)
        met.wait(SOON)
        backend.close()
        registry.discard(made[rank], (), ShutDownError("done"))
        total = set(device.download(tensor))
        device.close()
        return backend.name, total

    assert in_threads(2, member) == [("pygloo", {3.0})] * 2


def _sums() -> list[float]:
    basics.init()
    results = []
    for count in (5, 1 << 18):
        array = np.full(count, basics.rank() + 1, np.float32)
        run_operation(Operation.ALLREDUCE, in_place, array, f"x{count}", global_process_set)
        assert (array == array[0]).all()
        results.append(float(array[0]))
    basics.shutdown()
    return results


def _wait_in_gloo(with_child: bool, member: Member) -> str:
    store = member.store
    backend = connect(group_of(2, member.rank), store)
    backend.barrier()
    if member.rank:
        member.tell("here")
        first = int(store.get("first", 20.0))
        while not has_ended(first):
            time.sleep(0.01)
        return type(reduce_until_error(backend, 8, 60)).__name__
    store.set("first", str(os.getpid()).encode())
    child = os.fork() if with_child else 0
    if with_child and not child:
        time.sleep(60)
        os._exit(0)
    tell = threading.Timer(0.2, member.tell, ((backend._transport._helper._process.pid, child),))
    tell.start()
    array = np.ones(8, np.float32)
    backend.allreduce_arrays([array], [array], reduction(DType.FLOAT32, ReduceOp.SUM))
    return "not reached"


def test_the_helper_imports_neither_numpy_nor_the_rest_of_the_engine():
    """It starts in each group."""
    code = "import sys, collectives.backends.pygloo.helper; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
