"""The rounds of the bypass: how they begin and end, and what an attempt does."""

import pytest

from collectives.api import Operation, Parameters, Request
from collectives.backends.base import Group, Vote
from collectives.backends.single import SingleBackend
from collectives.controller.messages import Response, Run, Withdraw, decode
from collectives.controller.schedules import Schedule
from collectives.controller.worker import Worker
from collectives.engine.bypass import LARGEST, Bypass
from collectives.engine.link import RemoteLink
from collectives.engine.work import Work
from collectives.events import EventStream
from collectives.net.channel import InprocHub
from tests.collectives.controller.negotiation_simulation import tensor


class Scripted(Vote):
    """A vote that answers as it is told."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.heard = []

    def attempt(self, value, call, waiting, agreed):
        self.heard.append(value)
        waiting([1])
        verdict = self.answers.pop(0)
        if verdict:
            agreed()
            call()
        return verdict

    def decline(self):
        self.heard.append(0)

    def hurry(self):
        self.heard.append("hurry")


class Runner:
    """It follows the operations that all ranks run; ``steps`` has what happens."""

    def __init__(self):
        self.steps = []

    def begin_attempt(self, first, backend):
        self.steps.append(("begin", first))

    def follow_attempt(self, completion, works, batch, backend):
        self.steps.append(("follow", batch, [work.request.name for work in works]))


class Works:
    """A table with a barrier for each response, which runs at once."""

    batch = None

    def find(self, batches):
        return [
            [Work(Request(each.request.name, Operation.BARRIER), None, None) for each in batch] for batch in batches
        ]


def bypass_of(vote, hub=None):
    """The bypass of rank 1 of ``hub``."""
    link = RemoteLink((hub or InprocHub(2)).channel(1), EventStream())
    return Bypass(vote, SingleBackend(Group((0,), 0, ("a",))), Worker(Parameters()), link, Works(), Runner())


def attempt(bypass, number, waited=lambda schedule, absent, since: False):
    """Attempt a schedule without a tensor."""
    return bypass.attempt(Schedule(number, ()), waited)


def test_a_round_that_fails_is_the_last_until_it_begins_again():
    vote, waited = Scripted(True, False, True), []
    bypass = bypass_of(vote)

    def note(schedule, absent, since):
        waited.append((schedule.number, absent))
        return False

    bypass.decline()
    assert not attempt(bypass, 3)
    bypass.begin(is_busy=False)
    assert [attempt(bypass, number, note) for number in (5, 6, 7)] == [True, False, False]
    assert not bypass.on
    bypass.begin(is_busy=False)
    assert attempt(bypass, 8, note)
    assert (vote.heard, waited) == ([5, 6, 8], [(5, [1]), (6, [1]), (8, [1])])


def test_a_busy_rank_declines_the_first_round():
    vote = Scripted()
    bypass = bypass_of(vote)
    bypass.begin(is_busy=True)
    assert (bypass.on, vote.heard) == (False, [0])


def test_a_rank_declines_once():
    vote = Scripted(True)
    bypass = bypass_of(vote)
    bypass.begin(is_busy=False)
    bypass.decline()
    bypass.decline()
    bypass.begin(is_busy=False)
    bypass.withdraw(Withdraw(1))
    assert (bypass.on, vote.heard) == (True, [0, "hurry"])
    bypass.withdraw(Withdraw(2))
    assert (bypass.on, vote.heard) == (False, [0, "hurry", 0])


def test_a_rank_that_has_left_the_round_of_a_waiting_one_makes_sure_that_this_one_can_know():
    vote = Scripted()
    bypass = bypass_of(vote)
    bypass.begin(is_busy=False)
    bypass.decline()
    bypass.withdraw(Withdraw(1))
    assert vote.heard == [0, "hurry"]


def test_a_round_may_be_withdrawn_before_it_has_begun():
    vote = Scripted()
    bypass = bypass_of(vote)
    bypass.withdraw(Withdraw(1))
    assert vote.heard == []
    bypass.begin(is_busy=False)
    assert (bypass.on, vote.heard) == (False, [0])
    bypass.begin(is_busy=False)
    assert (bypass.on, vote.heard) == (True, [0])


def test_a_late_request_to_withdraw_does_not_hide_a_later_one():
    vote = Scripted()
    bypass = bypass_of(vote)
    bypass.withdraw(Withdraw(2))
    bypass.withdraw(Withdraw(1))
    bypass.begin(is_busy=False)
    bypass.begin(is_busy=False)
    assert (bypass.on, vote.heard) == (False, [0, 0])


def test_without_a_vote_there_is_none():
    bypass = bypass_of(None)
    bypass.begin(is_busy=False)
    assert not bypass.on
    assert not attempt(bypass, 1, pytest.fail)
    bypass.decline()
    bypass.withdraw(Withdraw(1))


def test_a_number_that_is_too_large_for_the_vote_is_not_attempted():
    vote = Scripted(True)
    bypass = bypass_of(vote)
    bypass.begin(is_busy=False)
    assert not attempt(bypass, LARGEST + 1)
    assert bypass.on
    assert attempt(bypass, LARGEST)
    assert vote.heard == [LARGEST]


def test_a_rank_asks_again_and_again_but_less_and_less_often(monkeypatch):
    """An answer that does not fit into a connection yet fits later."""
    hub, now = InprocHub(2), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    bypass = bypass_of(Scripted(), hub)
    asked = []
    for now[0] in range(1000):
        bypass.ask_to_withdraw(1)
        asked += [now[0] for _ in hub.channel(0).receive()]
    assert asked == [0, 1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513]


def test_a_rank_asks_the_others_at_once_in_each_round():
    hub = InprocHub(2)
    bypass = bypass_of(Scripted(), hub)
    for round in (1, 1, 3, 2):
        bypass.ask_to_withdraw(round)
    assert [decode(data) for _, data in hub.channel(0).receive()] == [Withdraw(1), Withdraw(3)]


# Attempts.


def try_out(verdict, is_wanted=False):
    """What an attempt does: whether it ran, the worker, whether the link knows, the messages to the other rank, steps.

    ``is_wanted``: this rank has other things to do.
    """
    hub, response = InprocHub(2), Response(1, tensor("a"))
    link = RemoteLink(hub.channel(1), EventStream())
    link.bypassed = {}
    worker, schedule = Worker(Parameters()), Schedule(2, ((response,),))
    worker.submit(response.request)
    worker.outgoing()
    worker.run(Run(((1,),), (response,)))
    worker.submit(response.request, urgent=True)
    runner = Runner()
    bypass = Bypass(Scripted(verdict), SingleBackend(Group((0,), 0, ("a",))), worker, link, Works(), runner)
    bypass.begin(is_busy=False)

    def during_vote(schedule, absent, since):
        runner.steps.append(absent)
        return is_wanted

    ran = bypass.attempt(bypass.next(), during_vote)
    sent = [decode(data) for _, data in hub.channel(0).receive()]
    return ran, worker, link.bypassed == {2: (schedule, 1)}, sent, runner.steps


def test_an_attempt_that_runs_is_over_for_the_worker_and_the_coordinator():
    ran, worker, is_used, sent, steps = try_out(True)
    assert (ran, worker.is_idle, worker.next_batch, is_used, sent) == (True, True, 2, True, [])
    assert steps == [("begin", 1), [1], ("follow", 1, ["a"])]


def test_an_attempt_that_does_not_run_changes_nothing():
    ran, worker, is_used, _, steps = try_out(False)
    assert (ran, [*worker.unreported()], worker.next_batch, is_used) == (False, [1], 1, False)
    assert steps == [("begin", 1), [1]]


def test_a_rank_with_other_things_to_do_asks_the_absent_ranks_to_decline():
    assert try_out(True, is_wanted=True)[3] == [Withdraw(1)]


def test_a_rank_that_has_waited_for_long_asks_the_absent_ranks_to_decline(monkeypatch):
    monkeypatch.setattr("collectives.engine.bypass.LATE_SECONDS", -1.0)
    assert try_out(True)[3] == [Withdraw(1)]
