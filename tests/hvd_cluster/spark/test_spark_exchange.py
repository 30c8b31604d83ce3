"""The decision of the driver: one way for all tasks of a stage, in whatever order things happen."""

import copy
import json

import pytest

from executors.agents.spark.exchange import BROKEN, BY_BARRIER, BY_DRIVER, ROUNDS, TEXTS, TextExchange


class Story:
    """An exchange of two tasks, what its callers do, and what each was told.

    A caller is a partition and the number of the attempt of the stage. It may connect, speak in each round when it was
    told the way and the texts of the round before, and leave. The time may be over at any point.
    """

    CALLERS = (0, 1), (1, 1), (0, 2), (1, 2)

    def __init__(self):
        self.exchange = TextExchange(2)
        self.told = {}
        self.said = dict.fromkeys(self.CALLERS, 0)
        self.gone = set()
        self.is_late = False

    def moves(self):
        """All that may happen next."""
        here = [caller for caller in self.told if caller not in self.gone]
        return [
            *([] if self.is_late else [("expire",)]),
            *(("join", caller) for caller in self.CALLERS if caller not in self.told),
            *(("say", caller) for caller in here if self.may_speak(caller)),
            *(("leave", caller) for caller in here),
        ]

    def may_speak(self, caller):
        heard = self.told[caller]
        return self.said[caller] < ROUNDS and len(heard) == self.said[caller] + 1 and BROKEN not in heard[-1:]

    def play(self, name, *callers):
        """Make a move, and check what it led to."""
        getattr(self, name)(*callers)
        for caller, heard in self.told.items():
            kinds = [message[:1] for message in heard]
            assert kinds in ([], [BY_BARRIER]) or kinds[0] == BY_DRIVER
            assert kinds.count(BY_DRIVER) + kinds.count(BY_BARRIER) <= 1
            assert kinds.count(TEXTS) <= self.said[caller]
            assert BROKEN not in kinds[:-1]

    def expire(self):
        self.is_late = True
        self.deliver(self.exchange.expire())

    def join(self, caller):
        self.told[caller] = []
        self.deliver(self.exchange.join(caller, caller[0]))
        if len(self.told) > 2:
            assert self.told[caller] == [BY_BARRIER]

    def say(self, caller):
        if self.told[caller] == [BY_BARRIER]:
            self.said[caller] = ROUNDS  # there, and of no interest here
        else:
            self.said[caller] += 1
            self.deliver(self.exchange.say(caller, f"{caller[0]} in {self.said[caller]}"))

    def leave(self, caller):
        self.gone.add(caller)
        messages = self.exchange.leave(caller)
        assert caller not in messages
        self.deliver(messages)

    def deliver(self, messages):
        for caller, message in messages.items():
            self.told[caller].append(message)
            if message[:1] == TEXTS:
                number = self.said[caller]
                assert json.loads(message[1:]) == [f"{partition} in {number}" for partition in (0, 1)]

    @property
    def key(self):
        """Two stories with the same go on in the same way."""
        inside = [sorted(each.items()) if isinstance(each, dict) else each for each in vars(self.exchange).values()]
        return repr((sorted(self.told.items()), self.said, sorted(self.gone), self.is_late, inside))


def test_no_order_of_events_sends_tasks_two_ways():
    """All orders with two attempts of a stage; each state once."""
    seen, waiting, ends = set(), [Story()], set()
    while waiting:
        story = waiting.pop()
        for move in story.moves():
            later = copy.deepcopy(story)
            later.play(*move)
            if later.key not in seen:
                seen.add(later.key)
                waiting.append(later)
                ends |= {tuple(message[:1] for message in heard) for heard in later.told.values()}
    assert len(seen) > 1000
    by_driver = [(BY_DRIVER, *[TEXTS] * rounds) for rounds in range(ROUNDS + 1)]
    assert ends == {(), (BY_BARRIER,), *by_driver, *((*heard, BROKEN) for heard in by_driver[:-1])}


def test_all_are_told_when_the_last_one_comes():
    exchange = TextExchange(3)
    assert exchange.join("c", 2) == exchange.join("a", 0) == {}
    assert exchange.join("b", 1) == dict.fromkeys("abc", BY_DRIVER)
    assert exchange.expire() == {}


def test_texts_are_in_the_order_of_partitions():
    exchange = TextExchange(2)
    exchange.join("late", 1)
    exchange.join("early", 0)
    assert exchange.say("late", "one") == {}
    assert exchange.say("early", "zero") == dict.fromkeys(["early", "late"], TEXTS + b'["zero", "one"]')


@pytest.mark.parametrize("end", ["leave", "join"])
def test_one_who_leaves_or_comes_again_sends_all_to_the_barrier(end):
    exchange = TextExchange(3)
    exchange.join("a", 0)
    exchange.join("b", 1)
    messages = exchange.leave("b") if end == "leave" else exchange.join("again", 1)
    assert messages == dict.fromkeys(["a"] if end == "leave" else ["a", "b", "again"], BY_BARRIER)
    assert exchange.join("c", 2) == {"c": BY_BARRIER}
    assert exchange.expire() == exchange.leave("a") == exchange.say("a", "a text of no use") == {}
