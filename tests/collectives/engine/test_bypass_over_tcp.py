"""Ranks that agree over TCP, where a vote may not fit into its connection at first."""

from __future__ import annotations

import pytest

from collectives.backends.tcp.link import TcpLink
from collectives.engine.engine import Engine
from tests.collectives.engine.bypass_job import all_bypass, bypass_of, warm_up
from tests.collectives.engine.job import Job, SocketTransport, ones, running, submit, until, wait
from tests.collectives.engine.job import run as run_one


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
