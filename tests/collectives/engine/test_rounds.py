"""The rounds on a board: how they begin and end, and how deciders share them."""

import pytest

from collectives.api import Parameters
from collectives.backends.base import Vote
from collectives.controller.messages import Response, Run, Withdraw, decode
from collectives.controller.schedules import Schedule
from collectives.controller.worker import Worker
from collectives.engine.bypass import LARGEST, Rounds, ScheduledTrial
from collectives.engine.link import RemoteLink
from collectives.events import EventStream
from collectives.net.channel import InprocHub
from tests.collectives.controller.test_negotiation import tensor


class Scripted(Vote):
    """A board that answers as it is told."""

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


def rounds_on(board, hub=None):
    """The rounds of rank 1 of ``hub``."""
    link = RemoteLink((hub or InprocHub(2)).channel(1), EventStream())
    return Rounds(board, Worker(Parameters()), link)


def put(rounds, lane, number):
    """Attempt a schedule whose course is of no interest."""
    return rounds.attempt(lane, number, lambda: None, lambda: None, lambda round, absent: None)


def test_a_round_that_fails_is_the_last_until_it_begins_again():
    board, ran, waited = Scripted(True, False, True), [], []
    rounds = rounds_on(board)
    lane = rounds.lane()

    def attempt(id):
        call, agreed = (lambda: ran.append(id)), (lambda: ran.append(-id))
        return rounds.attempt(lane, id, call, agreed, lambda round, absent: waited.append((round, absent)))

    rounds.decline()
    assert not attempt(3)
    rounds.begin(is_busy=False)
    assert (attempt(5), attempt(6), attempt(7)) == (True, False, False)
    assert not rounds.on
    rounds.begin(is_busy=False)
    assert attempt(8)
    assert (board.heard, ran, waited) == ([5, 6, 8], [-5, 5, -8, 8], [(1, [1]), (2, [1]), (3, [1])])


def test_a_busy_rank_declines_the_first_round():
    board = Scripted()
    rounds = rounds_on(board)
    rounds.begin(is_busy=True)
    assert (rounds.on, board.heard) == (False, [0])


def test_a_rank_declines_once():
    board = Scripted(True)
    rounds = rounds_on(board)
    rounds.begin(is_busy=False)
    rounds.decline()
    rounds.decline()
    rounds.begin(is_busy=False)
    rounds.withdraw(Withdraw(1))
    assert (rounds.on, board.heard) == (True, [0, "hurry"])
    rounds.withdraw(Withdraw(2))
    assert (rounds.on, board.heard) == (False, [0, "hurry", 0])


def test_a_rank_that_has_left_the_round_of_a_waiting_one_makes_sure_that_this_one_can_know():
    board = Scripted()
    rounds = rounds_on(board)
    rounds.begin(is_busy=False)
    rounds.decline()
    rounds.withdraw(Withdraw(1))
    assert board.heard == [0, "hurry"]


def test_a_round_may_be_withdrawn_before_it_has_begun():
    board = Scripted()
    rounds = rounds_on(board)
    rounds.withdraw(Withdraw(1))
    assert board.heard == []
    rounds.begin(is_busy=False)
    assert (rounds.on, board.heard) == (False, [0])
    rounds.begin(is_busy=False)
    assert (rounds.on, board.heard) == (True, [0])


def test_a_late_request_to_withdraw_does_not_hide_a_later_one():
    board = Scripted()
    rounds = rounds_on(board)
    rounds.withdraw(Withdraw(2))
    rounds.withdraw(Withdraw(1))
    rounds.begin(is_busy=False)
    rounds.begin(is_busy=False)
    assert (rounds.on, board.heard) == (False, [0, 0])


def test_without_a_board_there_is_none():
    rounds = rounds_on(None)
    lane = rounds.lane()
    rounds.begin(is_busy=False)
    assert not rounds.on
    assert not rounds.attempt(lane, 1, pytest.fail, pytest.fail, pytest.fail)
    rounds.decline()
    rounds.withdraw(Withdraw(1))


def test_the_deciders_of_a_rank_put_different_numbers_on_the_board():
    board = Scripted(*[True] * 30)
    rounds = rounds_on(board)
    lanes = [rounds.lane() for _ in range(3)]
    rounds.begin(is_busy=False)
    for number in range(1, 11):
        for lane in lanes:
            assert put(rounds, lane, number)
    assert len(set(board.heard)) == 30
    assert 0 not in board.heard


def test_a_number_that_is_too_large_for_the_board_is_not_attempted():
    board = Scripted(True)
    rounds = rounds_on(board)
    lanes = [rounds.lane(), rounds.lane()]
    rounds.begin(is_busy=False)
    assert not put(rounds, lanes[0], LARGEST // 2 + 1)
    assert rounds.on
    assert put(rounds, lanes[1], LARGEST // 2)
    assert board.heard == [LARGEST]


def test_a_rank_asks_again_and_again_but_less_and_less_often(monkeypatch):
    """An answer that does not fit into a connection yet fits later."""
    hub, now = InprocHub(2), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    rounds = rounds_on(Scripted(), hub)
    asked = []
    for now[0] in range(1000):
        rounds.ask_to_withdraw(1)
        asked += [now[0] for _ in hub.channel(0).receive()]
    assert asked == [0, 1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513]


def test_a_rank_asks_the_others_at_once_in_each_round():
    hub = InprocHub(2)
    rounds = rounds_on(Scripted(), hub)
    for round in (1, 1, 3, 2):
        rounds.ask_to_withdraw(round)
    assert [decode(data) for _, data in hub.channel(0).receive()] == [Withdraw(1), Withdraw(3)]


# Trials.


class Used(RemoteLink):
    """A link that records the schedules that ran."""

    def __init__(self, hub):
        super().__init__(hub.channel(1), EventStream())
        self.schedules = []

    def used(self, schedule):
        self.schedules.append(schedule)


class Course:
    """The attempt of a trial, as the runner gives it; ``is_wanted``: this rank has other things to do."""

    def __init__(self, is_wanted=False):
        self.is_wanted = is_wanted
        self.steps = []

    def run(self):
        self.steps.append("run")

    def started(self):
        self.steps.append("started")

    def meanwhile(self, absent):
        self.steps.append(absent)
        return self.is_wanted


def try_out(verdict, course):
    """The result of a trial: whether it ran, the worker, the schedules that ran, and the messages to the other rank."""
    hub, response = InprocHub(2), Response(1, tensor("a"))
    worker, link, schedule = Worker(Parameters()), Used(hub), Schedule(2, ((response,),))
    worker.submit(response.request)
    worker.outgoing()
    worker.run(Run(((1,),), (response,)))
    worker.submit(response.request, urgent=True)
    rounds = Rounds(Scripted(verdict), worker, link)
    trial = ScheduledTrial(rounds, rounds.lane(), schedule)
    rounds.begin(is_busy=False)
    assert (trial.first, trial.batches) == (1, schedule.batches)
    ran = trial.run(course)
    sent = [decode(data) for _, data in hub.channel(0).receive()]
    return ran, worker, link.schedules == [schedule], sent


def test_a_trial_that_runs_is_over_for_the_worker_and_the_coordinator():
    course = Course()
    ran, worker, is_used, sent = try_out(True, course)
    assert (ran, worker.is_idle, worker.next_batch, is_used, sent) == (True, True, 2, True, [])
    assert course.steps == [[1], "started", "run"]


def test_a_trial_that_does_not_run_changes_nothing():
    ran, worker, is_used, _ = try_out(False, Course())
    assert (ran, [*worker.unreported()], worker.next_batch, is_used) == (False, [1], 1, False)


def test_a_rank_with_other_things_to_do_asks_the_absent_ranks_to_decline():
    assert try_out(True, Course(is_wanted=True))[3] == [Withdraw(1)]


def test_a_rank_that_has_waited_for_long_asks_the_absent_ranks_to_decline(monkeypatch):
    monkeypatch.setattr("collectives.engine.bypass.LATE_SECONDS", -1.0)
    assert try_out(True, Course())[3] == [Withdraw(1)]
