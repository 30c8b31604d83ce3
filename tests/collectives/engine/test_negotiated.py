"""The decider that asks the coordinator: when it lets the rounds of other deciders begin, and when it ends them."""

import pytest

from collectives.api import Parameters
from collectives.backends.base import Vote
from collectives.controller.messages import Ready, Response, Run, decode
from collectives.controller.worker import Worker
from collectives.engine.bypass import Negotiated, Rounds
from collectives.engine.link import RemoteLink
from collectives.events import EventStream
from collectives.net.channel import InprocHub
from tests.collectives.controller.test_negotiation import tensor

A, B = Response(1, tensor("a")), Response(2, tensor("b"))
FIRST, SECOND = Run(((1,),), (A,), begins_rounds=True), Run(((2,),), (B,), first=1)


class Declined(Vote):
    """A board on which this rank declines; ``sent`` has the messages that it had sent by then."""

    def __init__(self, hub):
        self.sent = []
        self._hub = hub

    def attempt(self, value, call, waiting, agreed):
        raise AssertionError("nothing attempts here")

    def decline(self):
        self.sent.append([decode(data) for _, data in self._hub.channel(0).receive()])


class ChangingLink(RemoteLink):
    """The link of a rank whose coordinator has new parameters, on demand."""

    is_changing = False


class Ignored:
    """The receiver of the coordinator's answers."""

    def announce(self, batches):
        assert batches

    def refuse(self, refusal):
        raise AssertionError(refusal)


@pytest.fixture
def rank():
    """A rank that has submitted a and b: its decider, link, rounds and board."""
    hub = InprocHub(2)
    link, board, worker = ChangingLink(hub.channel(1), EventStream()), Declined(hub), Worker(Parameters())
    rounds = Rounds(board, worker, link)
    negotiated = Negotiated(worker, link, rounds, Ignored())
    for response in (A, B):
        negotiated.submit(response.request, urgent=False)
    negotiated.next()
    hub.channel(0).receive()
    return negotiated, link, rounds, board


def test_the_rounds_begin_when_the_batch_has_run_and_nothing_is_left(rank):
    negotiated, _, rounds, board = rank
    negotiated.run(Run(((1,), (2,)), (A, B), begins_rounds=True))
    first, last = negotiated.decided.batches
    negotiated.decided.batches.clear()
    negotiated.ran(first)
    assert not rounds.on
    negotiated.ran(last)
    assert rounds.on
    assert board.sent == []


def test_a_rank_declines_at_once_while_a_tensor_is_in_flight(rank):
    negotiated, _, rounds, board = rank
    negotiated.run(FIRST)
    negotiated.ran(negotiated.decided.batches.popleft())
    assert (rounds.on, board.sent) == (False, [[]])


def test_a_rank_declines_at_once_while_a_batch_is_left(rank):
    negotiated, _, rounds, board = rank
    negotiated.run(FIRST)
    negotiated.run(SECOND)
    negotiated.ran(negotiated.decided.batches.popleft())
    assert (rounds.on, board.sent) == (False, [[]])


def test_a_rank_declines_at_once_while_the_parameters_change(rank):
    negotiated, link, rounds, board = rank
    link.is_changing = True
    negotiated.run(Run(((1, 2),), (A, B), begins_rounds=True))
    negotiated.ran(negotiated.decided.batches.popleft())
    assert (rounds.on, board.sent) == (False, [[]])


def test_a_rank_declines_before_it_sends_news(rank):
    """The other ranks would wait in the round for a rank that runs batches of the coordinator."""
    negotiated, _, rounds, board = rank
    rounds.begin(is_busy=False)
    negotiated.next()
    assert rounds.on, "there is no news"
    negotiated.submit(tensor("c"), urgent=True)
    negotiated.next()
    assert (rounds.on, board.sent) == (False, [[]])
    board.decline()
    assert board.sent[1] == [Ready((tensor("c"),), urgent=((0, "c"),))]


def test_a_rank_that_must_decline_does(rank):
    negotiated, _, rounds, board = rank
    negotiated.decline()
    assert board.sent == []
    rounds.begin(is_busy=False)
    negotiated.decline()
    assert (rounds.on, board.sent) == (False, [[]])
