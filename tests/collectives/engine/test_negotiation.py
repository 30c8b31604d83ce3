"""The negotiation with the coordinator: when it lets the rounds of the bypass begin, and when it ends them."""

import pytest

from collectives.api import Parameters
from collectives.backends.base import Vote
from collectives.controller.messages import Ready, Response, Run, decode
from collectives.controller.worker import Worker
from collectives.engine.bypass import Bypass
from collectives.engine.link import RemoteLink
from collectives.engine.negotiation import Negotiation
from collectives.events import EventStream
from collectives.net.channel import InprocHub
from tests.collectives.controller.negotiation_simulation import tensor

A, B = Response(1, tensor("a")), Response(2, tensor("b"))
FIRST, SECOND = Run(((1,),), (A,), begins_rounds=True), Run(((2,),), (B,), first=1)


class Declined(Vote):
    """A vote that this rank declines; ``sent`` has the messages that it had sent by then."""

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
    """A rank that has submitted a and b: its worker, negotiation, link, bypass and vote."""
    hub = InprocHub(2)
    link, vote, worker = ChangingLink(hub.channel(1), EventStream()), Declined(hub), Worker(Parameters())
    bypass = Bypass(vote, None, worker, link, None, Ignored())
    negotiation = Negotiation(worker, link, bypass, Ignored())
    for response in (A, B):
        worker.submit(response.request)
    negotiation.report()
    hub.channel(0).receive()
    return worker, negotiation, link, bypass, vote


def test_the_rounds_begin_when_the_batch_has_run_and_nothing_is_left(rank):
    _, negotiation, _, bypass, vote = rank
    negotiation.run(Run(((1,), (2,)), (A, B), begins_rounds=True))
    first, last = negotiation.batches
    negotiation.batches.clear()
    negotiation.ran(first)
    assert not bypass.on
    negotiation.ran(last)
    assert bypass.on
    assert vote.sent == []


def test_a_rank_declines_at_once_while_a_tensor_is_in_flight(rank):
    _, negotiation, _, bypass, vote = rank
    negotiation.run(FIRST)
    negotiation.ran(negotiation.batches.popleft())
    assert (bypass.on, vote.sent) == (False, [[]])


def test_a_rank_declines_at_once_while_a_batch_is_left(rank):
    _, negotiation, _, bypass, vote = rank
    negotiation.run(FIRST)
    negotiation.run(SECOND)
    negotiation.ran(negotiation.batches.popleft())
    assert (bypass.on, vote.sent) == (False, [[]])


def test_a_rank_declines_at_once_while_the_parameters_change(rank):
    _, negotiation, link, bypass, vote = rank
    link.is_changing = True
    negotiation.run(Run(((1, 2),), (A, B), begins_rounds=True))
    negotiation.ran(negotiation.batches.popleft())
    assert (bypass.on, vote.sent) == (False, [[]])


def test_a_rank_declines_before_it_sends_news(rank):
    """The other ranks would wait in the round for a rank that runs batches of the coordinator."""
    worker, negotiation, _, bypass, vote = rank
    bypass.begin(is_busy=False)
    negotiation.report()
    assert bypass.on, "there is no news"
    worker.submit(tensor("c"), urgent=True)
    negotiation.report()
    assert (bypass.on, vote.sent) == (False, [[]])
    vote.decline()
    assert vote.sent[1] == [Ready((tensor("c"),), urgent=((0, "c"),))]


def test_a_rank_that_must_decline_does(rank):
    _, _, _, bypass, vote = rank
    bypass.decline()
    assert vote.sent == []
    bypass.begin(is_busy=False)
    bypass.decline()
    assert (bypass.on, vote.sent) == (False, [[]])
