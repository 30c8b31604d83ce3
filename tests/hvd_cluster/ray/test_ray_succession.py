"""Ray Train replaces lost workers of a job: the worlds that follow."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from collectives.store.client import RendezvousClient
from executors.agents.ray.train.replacement import Replacement
from executors.agents.ray.train.succession import NOTHING, Delivered, Succession
from executors.api import JobSecret
from executors.driver.member import Member, WorkerIdentity
from executors.job.job import Job, secret_of
from executors.job.worlds import CALL, LastReport, Published, Report, world_key

SECONDS = 60.0


def names(world):
    return [worker for worker, _ in world.workers]


def test_survivors_keep_their_order_and_the_successor_comes_last():
    succession = Succession(["a", "a", "b"])
    succession.lose(0, "ended")
    worker = succession.succeed(0, "b")
    assert succession.slot(worker).rank == 2
    world = succession.ready(worker).world
    assert (world.round, names(world)) == (1, ["worker-1", "worker-2", "worker-3"])
    assert world.text == "rank 0 on host a lost (ended), rank 2 on host b joined"
    assert succession.workers == ["worker-3", "worker-1", "worker-2"]


def test_no_world_while_a_worker_is_missing():
    succession = Succession(["a"] * 3)
    succession.lose(1, "ended")
    assert succession.cut_off("worker-0", 0) == NOTHING
    assert succession.cut_off("worker-2", 0) == NOTHING
    first = succession.succeed(1, "a")
    succession.lose(2, "ended")
    assert succession.ready(first) == NOTHING
    assert names(succession.ready(succession.succeed(2, "a")).world) == ["worker-0", "worker-3", "worker-4"]


def test_a_successor_that_is_lost_has_one_too():
    succession = Succession(["a"] * 2)
    lost = succession.succeed(1, "a")
    succession.lose(1, "ended")
    assert succession.ready(lost) == NOTHING
    assert names(succession.ready(succession.succeed(1, "a")).world) == ["worker-0", "worker-3"]


def test_all_workers_lost_their_world_and_none_its_process():
    succession = Succession(["a"] * 2)
    assert succession.cut_off("worker-1", 0) == NOTHING
    world = succession.cut_off("worker-0", 0).world
    assert (world.round, names(world), world.text) == (1, ["worker-0", "worker-1"], "the same ranks again")
    assert succession.cut_off("worker-1", 0) == NOTHING  # of the world before
    assert succession.cut_off("worker-0", 1) == NOTHING


class Workers:
    """Members of a job, with the environment that the driver gives them."""

    def __init__(self):
        self.clients = []

    def start(self, environment):
        address = environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environment["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        client = RendezvousClient(*address, secret_of(environment).key)
        self.clients.append(client)
        member = Member(client, WorkerIdentity.of(environment), lambda world: None)
        member.start()
        return member


@pytest.fixture
def job():
    with Job(2, secret=JobSecret()) as job:
        yield job


def test_a_lost_worker_is_replaced(job, caplog):
    workers = Workers()
    with Replacement(job, ["a", "b"]) as replacement:
        first, second = map(workers.start, replacement.environments())
        assert names(first.wait(lambda world: True, SECONDS)) == ["worker-0", "worker-1"]
        replacement.lose(1, "ended")
        second.close()
        environment = replacement.succeed(1, "b")
        assert (environment["HOROVOD_NEWCOMER"], environment["HOROVOD_RANK"]) == ("1", "1")
        third = workers.start(environment)
        first.report(Report("failed", 0, (1,), "lost rank 1"))
        third.report(Report("ready"))
        for member in (first, third):
            assert names(member.wait(lambda world: world.round == 1, SECONDS)) == ["worker-0", "worker-2"]
        first.report(Report("formed", 1, pause=1.5, lost=2, call=3))
        assert job.store.get(CALL, SECONDS) == b"3"
    for member in (first, third):
        assert member.wait(lambda world: False, SECONDS).is_over
    assert "hvd-replacement" not in {thread.name for thread in threading.enumerate()}
    text = (
        "world 1: 2 ranks, rank 1 on host b lost (ended), rank 1 on host b joined, resumed after 1.50 s, 2 steps lost"
    )
    assert caplog.messages == [text]
    assert Published.decode(job.store.get(world_key(2), 0.0)).is_over
    for member in (first, third):
        member.close()
    for client in workers.clients:
        client.close()


def test_a_worker_that_has_finished_gives_its_state_makes_its_last_report_again_and_ends(job, monkeypatch):
    monkeypatch.setattr("executors.agents.ray.train.replacement.SETTLE_SECONDS", 0.01)
    workers = Workers()
    with Replacement(job, ["a", "b"]) as replacement:
        first, second = map(workers.start, replacement.environments())
        second.close()
        replacement.lose(1, "ended")
        third = workers.start(replacement.succeed(1, "b"))
        third.report(Report("ready"))
        last = LastReport("4", "saved").encode()
        called = first.finish(Report("finished", 0, text=last))
        assert called.kind == "return"
        assert names(third.wait(lambda world: world.round >= 1, SECONDS)) == ["worker-0", "worker-2"]
        answers = finish_together([first, third], called.number, 1, last)
        assert {answer.kind for answer in answers} == {"report"}
        first.give_metrics(answers[0].number, b"metrics")
        assert third.metrics_of(answers[1].source, answers[1].number) == b"metrics"
        replacement.delivered(Delivered(("4", "4"), "saved"))
        assert {answer.kind for answer in finish_together([first, third], called.number, 2, last)} == {"end"}
    for member in (first, third):
        member.close()
    for client in workers.clients:
        client.close()


def finish_together(members, round, number, last):
    report = Report("finished", round, text=last, call=number)
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda member: member.finish(report), members))
