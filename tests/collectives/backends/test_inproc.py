from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from collectives.api import (
    CollectiveTimeoutError,
    DType,
    EngineError,
    HorovodInternalError,
    PeerLostError,
    ReduceOp,
    ShutDownError,
)
from collectives.kernels.reduction import ReductionKernel, reduction
from tests.collectives.backends.inproc import InprocBackend, InprocGroup
from tests.collectives.backends.matrix import abort_from_thread, reduce_until_error, run_matrix, shorten
from tests.collectives.backends.members import group_of, in_threads


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_matrix(size, monkeypatch):
    shorten(monkeypatch)
    group = InprocGroup(size)
    in_threads(size, lambda rank: run_matrix(InprocBackend(group_of(group.size, rank), group), rank, size))
    assert not group.fired


def test_a_fault_strikes_at_its_rank_and_step_and_is_counted():
    planned = HorovodInternalError("planned")
    group = InprocGroup(3, faults={(1, 2): planned})
    results = in_threads(3, lambda rank: _steps_until_error(InprocBackend(group_of(group.size, rank), group)))
    assert [steps for steps, _ in results] == [2, 2, 2]
    assert results[1][1] is planned
    assert all(type(results[rank][1]) is PeerLostError for rank in (0, 2))
    assert "rank 1 on host 'a' left: planned" in str(results[0][1])
    assert group.fired == {(1, 2): 1}


def test_a_callable_fault_runs_and_the_call_goes_on():
    seen: list[str] = []
    group = InprocGroup(2, faults={(0, 1): lambda: seen.append(threading.current_thread().name)})
    in_threads(2, lambda rank: _barriers(InprocBackend(group_of(group.size, rank), group), 3))
    assert len(seen) == 1
    assert group.fired == {(0, 1): 1}


def test_a_silent_rank_is_named():
    group = InprocGroup(3)
    with pytest.raises(
        CollectiveTimeoutError, match=r"ranks 1, 2 on host 'a' did not enter the operation within 0\.05 s"
    ) as caught:
        InprocBackend(group_of(group.size, 0), group, timeout=0.05).barrier()
    assert caught.value.ranks == (1, 2)
    with pytest.raises(PeerLostError):
        InprocBackend(group_of(group.size, 1), group).barrier()


def test_abort_from_another_thread():
    group = InprocGroup(2)
    stuck, peer = InprocBackend(group_of(group.size, 0), group), InprocBackend(group_of(group.size, 1), group)
    abort_from_thread(stuck, np.ones(3, np.float32))
    assert isinstance(reduce_until_error(peer, 3, 5), PeerLostError)


def test_closing_is_idempotent_and_ends_the_membership():
    group = InprocGroup(2)
    backend = InprocBackend(group_of(group.size, 0), group)
    backend.close()
    backend.close()
    with pytest.raises(ShutDownError):
        backend.barrier()
    with pytest.raises(PeerLostError, match="rank 0 on host 'a' left"):
        InprocBackend(group_of(group.size, 1), group).barrier()


def test_a_member_may_close_while_others_still_leave_the_last_call():
    def body(rank: int) -> None:
        backend = InprocBackend(group_of(group.size, rank), group)
        _barriers(backend, 50)
        backend.close()

    group = InprocGroup(4)
    in_threads(4, body)


def test_kernels_that_do_the_same_are_one_call():
    """Threads that ask for a kernel at once may get two of them."""
    group = InprocGroup(2)

    def body(rank):
        numbers = np.array([rank + 1.0])
        kernel = ReductionKernel(DType.FLOAT64, ReduceOp.SUM, 0.5)
        InprocBackend(group_of(2, rank), group).allreduce_arrays([numbers], [numbers], kernel)
        return numbers[0]

    assert in_threads(2, body) == [1.5, 1.5]


def test_members_that_call_different_things_are_told():
    calls: list[Callable[[InprocBackend], None]] = [
        InprocBackend.barrier,
        lambda backend: backend.broadcast_bytes(np.ones(1, np.uint8), np.ones(1, np.uint8), 0),
    ]

    def body(rank: int) -> str:
        with pytest.raises(EngineError) as caught:
            calls[rank](InprocBackend(group_of(group.size, rank), group))
        return str(caught.value)

    group = InprocGroup(2)
    texts = in_threads(2, body)
    assert texts[0] == texts[1]
    assert "0: ('barrier',), 1: ('broadcast', 0, 1)" in texts[0]


def _barriers(backend: InprocBackend, count: int) -> None:
    for _ in range(count):
        backend.barrier()


def _steps_until_error(backend: InprocBackend) -> tuple[int, HorovodInternalError]:
    values = np.ones(2)
    for step in range(10):
        try:
            backend.allreduce_arrays([values], [values], reduction(DType.FLOAT64, ReduceOp.SUM))
        except HorovodInternalError as error:
            return step, error
    raise AssertionError("no error came")
