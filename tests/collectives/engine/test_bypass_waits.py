"""Ranks that wait in a round for others, which come late, want something else, end, or are stuck."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collectives.api import (
    CollectiveTimeoutError,
    HorovodInternalError,
    Operation,
    PeerLostError,
    ShutDownError,
)
from collectives.backends.tcp.link import TcpLink
from collectives.engine.engine import Engine
from tests.collectives.engine.bypass_job import (
    NOTHING,
    all_bypass,
    bypass_of,
    round_of,
    warm_up,
    warm_up_without_rows,
    worker_of,
)
from tests.collectives.engine.job import TIMEOUTS, Caller, Job, SocketTransport, ones, run, running, submit, until, wait
from tests.collectives.engine.job import run as run_one


def test_a_rank_that_does_not_come_declines_on_its_communication_thread(start, monkeypatch):
    with start(3) as job:
        job.run(warm_up)
        callers = [Caller(job.engines[rank], "x") for rank in (0, 2)]
        until(lambda: not bypass_of(job.engines[1]).on)
        assert run(job.engines[1], ones(job.engines[1]), "x")[0] == 6.0
        assert [caller.result()[0] for caller in callers] == [6.0] * 2
        monkeypatch.setattr("collectives.engine.bypass.LATE_SECONDS", 1000.0)
        job.run(warm_up)
        assert all_bypass(job)


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_tensor_of_another_thread_runs_while_a_rank_waits(start, waiting, monkeypatch):
    """It submits something that all ranks submit, while one waits in the bypass for what the others do later."""
    monkeypatch.setattr("collectives.engine.bypass.LATE_SECONDS", 1000.0)
    with start(2) as job:
        job.run(warm_up)
        caller = Caller(job.engines[waiting], "x")
        until(lambda: round_of(job.engines[waiting]) > round_of(job.engines[1 - waiting]))
        assert job.run(lambda engine: run(engine, ones(engine), "y")[0]) == [3.0] * 2
        assert run(job.engines[1 - waiting], ones(job.engines[1 - waiting]), "x")[0] == 3.0
        assert caller.result()[0] == 3.0


@pytest.mark.parametrize("ending", ["own shutdown", "shutdown elsewhere", "own abort", "abort elsewhere", "vanishing"])
@pytest.mark.parametrize("waiting", [0, 1])
def test_a_rank_that_waits_in_the_bypass_learns_of_the_end(start, ending, waiting, monkeypatch):
    monkeypatch.setattr("collectives.engine.bypass.LATE_SECONDS", 1000.0)
    endings = {
        "own shutdown": (lambda job: job.engines[waiting].shutdown(), ShutDownError),
        "shutdown elsewhere": (lambda job: job.engines[1 - waiting].shutdown(), ShutDownError),
        "own abort": (lambda job: job.engines[waiting].abort(HorovodInternalError("enough")), HorovodInternalError),
        "abort elsewhere": (
            lambda job: job.engines[1 - waiting].abort(HorovodInternalError("enough")),
            HorovodInternalError,
        ),
        "vanishing": (lambda job: job.vanish(1 - waiting), PeerLostError),
    }
    end, kind = endings[ending]
    with start(2) as job:
        job.run(warm_up)
        caller = Caller(job.engines[waiting], "x")
        until(lambda: round_of(job.engines[waiting]) > round_of(job.engines[1 - waiting]))
        end(job)
        assert type(caller.result()) is kind


@pytest.mark.parametrize("fatal", [False, True])
def test_a_rank_that_can_do_nothing_is_reported(start, caplog, fatal):
    """One that is stopped, or whose interpreter is held, cannot decline."""
    settings = {"stall_warning": 0.05, "stall_shutdown": 1.0 if fatal else 0.0}
    with start(3, **settings) as job:
        job.run(warm_up)
        stuck = job.engines[1]._progress._driving.lock
        until(lambda: stuck.acquire(blocking=False))
        callers = [Caller(job.engines[rank], "x") for rank in (0, 2)]
        if not fatal:
            until(lambda: caplog.text.count("missing rank 1: 'x'") >= 2)
        else:
            error = callers[0].result()
            assert isinstance(error, CollectiveTimeoutError)
            assert "missing rank 1: 'x'" in str(error)
            assert "submitted by ranks 0, 2" in str(error)
        stuck.release()
        if not fatal:
            assert run(job.engines[1], ones(job.engines[1]), "x")[0] == 6.0
            assert [caller.result()[0] for caller in callers] == [6.0] * 2


def test_a_rank_that_has_not_run_an_empty_batch_yet_hears_of_the_next_round(monkeypatch):
    monkeypatch.setattr(Job, "transport", SocketTransport)
    monkeypatch.setattr("collectives.engine.bypass.LATE_SECONDS", 0.0)
    with running(2, shared_memory=True) as job:
        first, second = job.engines
        for name in ("x", "empty"):
            job.run(lambda engine, name=name: warm_up_without_rows(engine, name))
        job.run(lambda engine: [wait(engine, work) for work in [submit(engine, ones(engine), name) for name in "yz"]])
        job.run(lambda engine: run(engine, NOTHING, "empty", Operation.ALLGATHER))
        assert not all_bypass(job)
        work = submit(second, NOTHING, "empty", Operation.ALLGATHER)
        until(lambda: not second._loop.commands and not worker_of(second)._ready_ids)
        until(lambda: second._progress._driving.lock.acquire(blocking=False))
        run(first, NOTHING, "empty", Operation.ALLGATHER)
        before = round_of(first)
        caller = Caller(first, body=lambda engine: run(engine, NOTHING, "x", Operation.ALLGATHER))
        until(lambda: bypass_of(first)._asked > before)
        second._progress._driving.lock.release()
        wait(second, work)
        until(lambda: not bypass_of(first).on)
        run(second, NOTHING, "x", Operation.ALLGATHER)
        assert caller.result().size == 0


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.usefixtures("unhurried")
def test_a_shutdown_does_not_wait_forever_for_a_rank_that_can_do_nothing(start, rank):
    with start(3, timeouts=replace(TIMEOUTS, shutdown=0.2)) as job:
        job.run(warm_up)
        stuck = job.engines[1]._progress._driving.lock
        until(lambda: stuck.acquire(blocking=False))
        callers = [Caller(job.engines[rank], "x") for rank in (0, 2)]
        for engine in (job.engines[0], job.engines[2]):
            until(lambda engine=engine: round_of(engine) > round_of(job.engines[1]))
        job.engines[rank].shutdown()
        assert not job.engines[rank].is_ending
        assert [type(caller.result()) for caller in callers] == [ShutDownError] * 2
        stuck.release()


def link_of(job: Job, rank: int, other: int) -> TcpLink:
    link: TcpLink = job.backends[rank][0].by_device["cpu"]._tcp._links[other]
    return link


def fill(job: Job, rank: int, other: int) -> None:
    """The connection from ``rank`` to ``other`` takes no more until the other one reads."""
    link, sent = link_of(job, rank, other), 0
    while True:
        try:
            sent += link._socket.send(bytes(1 << 16))
        except BlockingIOError:
            break
    link_of(job, other, rank).receive(iter([memoryview(bytearray(sent))]))


@pytest.mark.parametrize(
    ("leaver", "waiter", "in_star"),
    [(0, 1, False), (1, 2, False), (2, 0, False), (0, 1, True), (1, 0, True), (2, 0, True)],
)
def test_a_rank_hears_of_a_vote_that_did_not_fit(
    monkeypatch: pytest.MonkeyPatch, leaver: int, waiter: int, in_star: bool
) -> None:
    """The leaver has other news, its vote for the waiting rank is stuck, and nothing else would move it."""
    monkeypatch.setattr(Job, "transport", SocketTransport)

    def body(engine: Engine) -> list[float]:
        rank = engine.topology.rank
        if rank == leaver:
            other = submit(engine, ones(engine), "other")
            until(lambda: not bypass_of(engine).on)
            left.append(link_of(job, leaver, waiter).is_sending)
            first = submit(engine, ones(engine), "x")
            return [wait(engine, first)[0], wait(engine, other)[0]]
        if rank == waiter:
            until(lambda: bool(left))
        return [run_one(engine, ones(engine), "x")[0], run_one(engine, ones(engine), "other")[0]]

    left: list[bool] = []
    with running(3, over_tcp=True, in_star=in_star) as job:
        job.run(warm_up)
        until(lambda: all_bypass(job))
        fill(job, leaver, waiter)
        assert job.run(body) == [[6.0, 6.0]] * 3
    assert left == [True]
