"""Tasks meet, and end in order where they cannot; threads are the tasks, and call the driver by real connections."""

import io
import json
import pickle
import queue
import socket
import threading
from contextlib import closing, contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest

from collectives.net.frames import Sealer, nonce
from executors.agents.spark import console as consoles
from executors.agents.spark import meeting as meetings
from executors.agents.spark import rendezvous
from executors.agents.spark import task as tasks
from executors.agents.spark.connection import GOODBYE, MEETING, TaskHello, TaskIdentity
from executors.agents.spark.console import Console
from executors.agents.spark.meeting import TaskMeeting, connect_to_driver
from executors.agents.spark.plan import Plan
from executors.agents.spark.rendezvous import TaskLocation
from executors.agents.spark.task import run_task
from executors.api import JobSecret, RemoteError
from executors.job.output import Output

SECRET = JobSecret()
HOST = "127.0.0.1"
SIZE = 3
PATIENCE = 60
HOSTS = ["a", "b", "a"]
RANKS = [0, 2, 1]
"""By partition, on these hosts."""


class Context:
    """The BarrierTaskContext of each thread."""

    def __init__(self):
        self.barrier = threading.Barrier(SIZE, timeout=PATIENCE)
        self.said = [""] * SIZE
        self.own = threading.local()

    def partitionId(self):
        return self.own.number

    def resources(self):
        return {}

    def getTaskInfos(self):
        return [SimpleNamespace(address=f"{HOST}:1")] * SIZE

    def allGather(self, text):
        self.said[self.own.number] = text
        self.barrier.wait()
        said = list(self.said)
        self.barrier.wait()
        return said


class Stage:
    """A console, and the tasks that call it, each by the plan that ``plans`` has for its partition."""

    def __init__(self, console, listener):
        self.console, self.listener, self.context = console, listener, Context()
        self.plans = [plan_for(console.port)] * SIZE

    def run(self, action):
        """What ``action`` of each partition returned or raised in the thread of its task."""
        found = [None] * SIZE

        def run(number):
            self.context.own.number = number
            try:
                found[number] = action(self, number)
            except Exception as error:  # noqa: BLE001  the test looks at it
                found[number] = error

        threads = [threading.Thread(target=run, args=(number,)) for number in range(SIZE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        return found

    @property
    def was_at_the_barrier(self):
        return any(self.context.said)


def plan_for(port):
    return Plan(b"", SIZE, SECRET, ((HOST,), port), {}, (), None, float(PATIENCE), 5.0, None, None)


@pytest.fixture
def stage(monkeypatch):
    def of(context):
        number = context.partitionId()
        return TaskLocation(HOSTS[number], f"name of {number}", HOST)

    monkeypatch.setattr(TaskLocation, "of", of)
    monkeypatch.setattr(rendezvous, "server_host", lambda locations, nics: HOST)
    listener, output = mock.Mock(), Output(SIZE, stdout=io.StringIO(), stderr=io.StringIO())
    with Console(HOST, SIZE, SECRET, output, listener) as console:
        yield Stage(console, listener)


def meet(stage, number):
    """A whole rendezvous: the rank, the place of the server, whether there is a driver, what the others stored."""
    with rendezvous.rendezvous(stage.plans[number], stage.context) as member:
        member.store.set(f"there/{member.slot.rank}", b"")
        for rank in range(SIZE):
            member.store.get(f"there/{rank}", PATIENCE)
        stage.context.barrier.wait()  # the server goes with its task
        connection = member.connection
        if connection is not None:
            assert not connection.lost
            connection.send(GOODBYE)
        return member.slot.rank, member.environment["HOROVOD_GLOO_RENDEZVOUS_PORT"], connection is not None


def identities():
    return {(RANKS[number], HOSTS[number], f"name of {number}") for number in range(SIZE)}


def told(method):
    return {(call.args[0].rank, call.args[0].host, call.args[0].host_name) for call in method.call_args_list}


class TestRendezvous:
    def test_tasks_that_reach_the_driver_meet_there(self, stage):
        found = stage.run(meet)
        assert [rank for rank, *_ in found] == RANKS
        assert len({port for _, port, _ in found}) == 1
        assert all(connected for *_, connected in found)
        assert not stage.was_at_the_barrier
        assert told(stage.listener.connected) == identities()
        stage.listener.lost.assert_not_called()

    @pytest.mark.parametrize("lonely", [(0,), (1,), (1, 2), (0, 1, 2)])
    def test_where_one_does_not_reach_it_all_are_at_the_barrier(self, stage, monkeypatch, lonely):
        monkeypatch.setattr(meetings, "REACH_SECONDS", 0.0)
        monkeypatch.setattr(consoles, "DECISION_SECONDS", 0.1)
        with socket.create_server((HOST, 0)) as unused:
            port = unused.getsockname()[1]
        for number in lonely:
            stage.plans[number] = plan_for(port)
        found = stage.run(meet)
        assert [rank for rank, *_ in found] == RANKS
        assert [connected for *_, connected in found] == [number not in lonely for number in range(SIZE)]
        assert all(stage.context.said)
        assert told(stage.listener.connected) == {
            identity
            for number, identity in zip(RANKS, sorted(identities(), key=lambda each: each[2]), strict=True)
            if RANKS.index(number) not in lonely
        }
        stage.listener.lost.assert_not_called()

    def test_tasks_of_a_stage_that_begins_again_are_all_refused(self, stage):
        stage.run(meet)
        found = stage.run(meet)
        assert [str(error) for error in found] == ["the driver cancelled this stage, or has other tasks of it"] * SIZE
        assert len(stage.listener.connected.call_args_list) == SIZE

    def test_a_stage_may_begin_again_while_no_task_had_a_rank(self, stage):
        with closing(call(stage, 1).connection), closing(call(stage, 2).connection):
            pass
        assert [rank for rank, *_ in stage.run(meet)] == RANKS
        assert all(stage.context.said)
        stage.listener.lost.assert_not_called()

    @pytest.mark.parametrize("by_driver", [True, False])
    def test_a_server_that_cannot_start_is_the_failure_of_rank_0(self, stage, monkeypatch, by_driver):
        def no_server(*arguments):
            raise OSError("no address is free")

        def rows(stage, number):
            return [row for batch in run_task(stage.plans[number], iter([])) for row in batch.to_pylist()]

        monkeypatch.setattr(rendezvous, "Job", no_server)
        monkeypatch.setattr(tasks.BarrierTaskContext, "get", lambda: stage.context)
        if not by_driver:
            monkeypatch.setattr(consoles, "DECISION_SECONDS", 0.0)
            with closing(call(stage, 0).connection):
                pass
        found = stage.run(rows)
        assert [len(each) for each in found] == [1, 0, 0]
        with pytest.raises(OSError, match="no address is free") as caught:
            pickle.loads(found[0][0]["data"]).unwrap()
        assert isinstance(caught.value.__cause__, RemoteError)
        assert "in no_server" in caught.value.__cause__.traceback
        stage.listener.lost.assert_not_called()
        assert stage.was_at_the_barrier is not by_driver


def call(stage, partition, secret=SECRET, seconds=float(PATIENCE)):
    return connect_to_driver([HOST], stage.console.port, secret, partition, seconds)


@contextmanager
def calls(stage):
    """All tasks have connected."""
    found = [call(stage, number) for number in range(SIZE)]
    yield found
    for each in found:
        each.connection.close()


def identity(rank):
    return TaskIdentity(rank, "a", "name")


LOST = "another task of this stage was lost while the tasks met"


class TestMeeting:
    def test_a_task_that_ends_before_the_decision_sends_all_to_the_barrier(self, stage):
        first, second = call(stage, 0), call(stage, 1)
        first.connection.close()
        assert not second.is_by_driver()
        third = call(stage, 2)
        assert not third.is_by_driver()
        for each in (second, third):
            each.connection.close()

    def test_the_driver_decides_when_the_time_is_over(self, stage, monkeypatch):
        monkeypatch.setattr(consoles, "DECISION_SECONDS", 0.01)
        first = call(stage, 0)
        assert not first.is_by_driver()
        assert not call_and_close(stage, 1)
        assert not call_and_close(stage, 2)
        first.connection.close()

    def test_the_decision_stays(self, stage):
        with calls(stage) as found:
            assert all(each.is_by_driver() for each in found)
            assert not call_and_close(stage, 0)
            for each in found:
                with pytest.raises(ConnectionRefusedError, match=LOST):
                    each.gather("of no use")

    @pytest.mark.parametrize("rounds", [0, 1])
    def test_a_task_that_ends_in_the_middle_ends_the_others(self, stage, rounds):
        with calls(stage) as found:
            assert all(each.is_by_driver() for each in found)
            for _ in range(rounds):
                gather(found)
            assert found[1].identify(identity(1))
            found[2].connection.close()
            with pytest.raises(ConnectionRefusedError, match=LOST):
                found[0].gather("a text")
            with pytest.raises(ConnectionRefusedError, match=LOST):
                found[1].gather("a text")

    def test_a_task_that_ends_afterwards_ends_nothing(self, stage):
        with calls(stage) as found:
            assert all(each.is_by_driver() for each in found)
            gather(found)
            assert all(each.identify(identity(rank)) for rank, each in enumerate(found))
            gather(found)
            lost = queue.SimpleQueue()
            stage.listener.lost.side_effect = lost.put
            found[1].connection.close()
            assert lost.get(timeout=PATIENCE) == identity(1)
            assert call_and_close(stage, 1) is False
            assert not found[0].connection.lost
            assert not found[2].connection.lost

    def test_a_text_of_somebody_without_the_secret_is_not_taken(self, stage):
        with calls(stage) as found:
            assert all(each.is_by_driver() for each in found)
            found[0].connection.send(MEETING, Sealer(nonce()).seal(meetings.SAY + b"a server of mine"))
            for each in found[1:]:
                with pytest.raises(ConnectionRefusedError, match=LOST):
                    each.gather("a text")

    def test_a_text_that_is_sent_again_is_not_taken(self, stage):
        with calls(stage) as found:
            assert all(each.is_by_driver() for each in found)
            again = found[0]._sealer.seal(meetings.SAY + b"a text")
            for _ in range(2):
                found[0].connection.send(MEETING, again)
            for each in found[1:]:
                with pytest.raises(ConnectionRefusedError, match=LOST):
                    each.gather("a text")

    def test_a_driver_that_ends_ends_the_meeting(self, stage, monkeypatch):
        monkeypatch.setattr(consoles, "STOP_SECONDS", 0.1)
        with Console(HOST, SIZE, SECRET, mock.Mock(), stage.listener) as console:
            meeting = connect_to_driver([HOST], console.port, SECRET, 0, float(PATIENCE))
        with pytest.raises(ConnectionRefusedError, match="the driver is gone"):
            meeting.is_by_driver()
        meeting.connection.close()


def gather(found):
    """A round, in which all speak before any of them listens."""
    for number, each in enumerate(found):
        each._send(meetings.SAY + str(number).encode())
    for each in found:
        assert json.loads(each._answer(meetings.TEXTS)[1:]) == [str(number) for number in range(SIZE)]


def call_and_close(stage, partition):
    """Whether another task is told to meet the others at the driver."""
    meeting = call(stage, partition)
    with closing(meeting.connection):
        return meeting.is_by_driver()


class TestDrivers:
    """Of the task's side: what the other side may do."""

    @pytest.fixture
    def ends(self):
        driver, task = socket.socketpair()
        with driver, task:
            yield driver, task

    def meeting(self, task, seconds=float(PATIENCE)):
        return TaskMeeting(task, mock.Mock(), (b"the task's", b"the driver's"), seconds)

    def test_one_that_says_nothing_is_given_up(self, ends):
        with pytest.raises(ConnectionRefusedError, match="was silent for too long"):
            self.meeting(ends[1], 0.01).is_by_driver()

    def test_one_without_the_secret_decides_nothing(self, ends):
        ends[0].sendall(Sealer(b"another's").seal(meetings.BY_DRIVER))
        with pytest.raises(ConnectionRefusedError, match="does not know the secret"):
            self.meeting(ends[1]).is_by_driver()

    def test_a_message_of_the_task_itself_decides_nothing(self, ends):
        ends[0].sendall(Sealer(b"the task's").seal(meetings.BY_DRIVER))
        with pytest.raises(ConnectionRefusedError, match="does not know the secret"):
            self.meeting(ends[1]).is_by_driver()

    def test_keys_are_of_one_connection(self):
        hello, other = TaskHello(1), TaskHello(1)
        keys = {*hello.keys(SECRET, b"one"), *hello.keys(SECRET, b"two"), *other.keys(SECRET, b"one")}
        assert len(keys) == 6
