"""The agents of other hosts, whose supervisor and connections are stand-ins."""

from types import SimpleNamespace

import pytest

from executors.agents.hosts.messages import AgentHello, AgentLaunch, AgentLeave, Begin, EndAll
from executors.agents.hosts.remote import AgentPlan, OtherHosts
from executors.agents.hosts.shell import NO_INPUT, RemoteShell
from executors.agents.local.supervisor import Ended, WorkerStarted
from executors.agents.local.work import CommandWork
from executors.api import JobSecret


class Crew:
    """Records what it shall do; calls from other threads run at once."""

    def __init__(self):
        self.started, self.killed, self.alarms = [], [], []

    def launch(self, number, command, environment, output, *, stdin, in_background):
        self.started.append((number, command[-2]))

    def kill(self, number):
        self.killed.append(number)

    def after(self, seconds, action):
        self.alarms.append((seconds, action))

    def soon(self, action):
        action()


class Reporter:
    def __init__(self):
        self.lost, self.unusable, self.changes = [], [], 0

    def agents_changed(self):
        self.changes += 1

    def happened(self, event):
        """Not of interest here."""

    def not_started(self, number, text):
        self.lost.append((number, text))

    def host_lost(self, host, text):
        self.lost.append((host, text))

    def host_unusable(self, host, text):
        self.unusable.append((host, text))


class Link:
    def __init__(self, host):
        self.hello = AgentHello(host)
        self.sent = []
        self.is_closed = False

    def send(self, message):
        self.sent.append(message)

    def close(self):
        self.is_closed = True


@pytest.fixture
def hosts():
    """With ``supervisor`` and ``reporter`` as attributes."""
    supervisor, reporter = Crew(), Reporter()
    plan = AgentPlan(RemoteShell("ssh"), CommandWork(("true",)), 30.0, 5.0, most=2)
    job = SimpleNamespace(host="127.0.0.1", secret=JobSecret())
    others = OtherHosts(job, plan, supervisor, None, reporter)
    return SimpleNamespace(others=others, supervisor=supervisor, reporter=reporter)


def connected(hosts, name="b"):
    link = Link(name)
    hosts.others.connected(link)
    return link


def test_a_host_is_ready_when_its_agent_has_connected(hosts):
    hosts.others.wanted({"b": 4})
    assert hosts.supervisor.started == [(-1, "b")]
    assert hosts.others.ready() == {}
    link = connected(hosts)
    assert hosts.others.ready() == {"b": 4}
    (begin,) = link.sent
    assert isinstance(begin, Begin)
    assert begin.ranks == 2  # no more ranks ever run


def test_the_secret_does_not_travel_with_a_worker(hosts):
    hosts.others.wanted({"b": 1})
    link = connected(hosts)
    hosts.others.start(0, "b", {"HOROVOD_RANK": "0", "_HOROVOD_SECRET_KEY": "s"})
    assert link.sent[-1] == AgentLaunch(0, {"HOROVOD_RANK": "0"})


def test_a_host_that_is_wanted_again_while_its_agent_leaves_gets_another_one(hosts):
    hosts.others.wanted({"b": 1})
    link = connected(hosts)
    hosts.others.wanted({})
    assert isinstance(link.sent[-1], AgentLeave)
    hosts.others.wanted({"b": 2})
    hosts.others.disconnected(link, "its agent has ended")
    assert hosts.supervisor.started == [(-1, "b"), (-2, "b")]
    connected(hosts)
    assert hosts.others.ready() == {"b": 2}
    assert not hosts.reporter.lost


def test_a_host_that_is_wanted_again_before_its_agent_connected_gets_another_one(hosts):
    hosts.others.wanted({"b": 1})
    hosts.others.wanted({})
    assert hosts.supervisor.killed == [-1]
    hosts.others.wanted({"b": 1})
    hosts.others.agent_ended(Ended(-1, 1))
    assert hosts.supervisor.started == [(-1, "b"), (-2, "b")]


def test_a_remote_shell_is_ended_with_the_connection_of_its_agent(hosts):
    """A cut link does not end it."""
    hosts.others.wanted({"b": 1})
    link = connected(hosts)
    hosts.others.wanted({})
    hosts.others.disconnected(link, "timed out")
    assert hosts.supervisor.killed == [-1]


def test_an_agent_that_does_not_obey_counts_as_lost(hosts):
    hosts.others.wanted({"b": 1})
    link = connected(hosts)
    hosts.others.start(0, "b", {})
    hosts.others.end(None)
    assert link.sent[-1] == EndAll(None)
    hosts.supervisor.alarms[-1][1]()
    assert link.is_closed
    hosts.others.disconnected(link, "aborted")
    assert hosts.reporter.lost == [("b", "aborted")]
    assert hosts.others.leave()


def test_a_host_is_tried_again_less_and_less_often_and_for_ever(hosts):
    hosts.others.wanted({"b": 1})
    waits = []
    for number in range(1, 1100):
        hosts.others.agent_ended(Ended(-number, 255))
        wait, again = hosts.supervisor.alarms[-1]
        waits.append(wait)
        again()
    assert waits[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    link = connected(hosts)
    hosts.others.received(link, WorkerStarted(0, 1))
    assert hosts.others.ready() == {"b": 1}


def test_an_agent_that_this_host_cannot_start_is_tried_again(hosts, monkeypatch):
    def fail(*_, **__):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(hosts.supervisor, "launch", fail)
        hosts.others.wanted({"b": 1})
    [(name, text)] = hosts.reporter.unusable
    assert (name, text.partition(";")[0]) == ("b", "its agent could not be started ([Errno 24] Too many open files)")
    hosts.supervisor.alarms[-1][1]()
    assert hosts.supervisor.started == [(-2, "b")]
    connected(hosts)
    assert hosts.others.ready() == {"b": 1}


def test_the_shell_is_to_blame_only_before_the_agent_has_connected(hosts):
    hosts.others.wanted({"b": 1})
    hosts.others.agent_ended(Ended(-1, 255))
    hosts.supervisor.alarms[-1][1]()
    hosts.others.disconnected(connected(hosts), "its agent has ended")
    by_hand = "its agent ended with exit code 255 before it connected; run 'ssh b true' by hand to see why"
    by_itself = "its agent has ended; look at that host and at its network; it is tried again"
    assert hosts.reporter.unusable == [("b", by_hand), ("b", by_itself)]


def test_a_shell_without_standard_input_is_named(hosts):
    hosts.others.wanted({"b": 1})
    hosts.others.agent_ended(Ended(-1, 0))
    [(_, said)] = hosts.reporter.unusable
    assert said == f"its agent ended with exit code 0 before it connected; {NO_INPUT}"


def test_an_agent_of_another_version_gets_no_advice_about_the_shell(hosts, monkeypatch):
    hosts.others.wanted({"b": 1})
    monkeypatch.setattr("executors.agents.hosts.messages.VERSION", "9.9")
    connected(hosts)
    [(_, text)] = hosts.reporter.unusable
    assert text.endswith("; install the same versions")


def test_a_worker_on_a_host_without_an_agent_is_not_started(hosts):
    hosts.others.wanted({"b": 1})
    hosts.others.disconnected(connected(hosts), "its agent has ended")
    hosts.others.start(3, "b", {})
    assert hosts.reporter.lost[-1] == (3, "was not started, because the agent of host b is lost")
