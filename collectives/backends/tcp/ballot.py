"""The members of a group vote, round by round, whether to run an operation. Short messages travel with the votes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

import numpy as np

from collectives.api import EngineError, HorovodInternalError
from collectives.backends.base import Call, Group, OnMissing
from collectives.backends.tcp.link import Script, TcpLink
from collectives.backends.tcp.pump import Pump

RIDING = 1 << 16
"""Bytes of a message that travels with a vote, at most; both ends know its length. Longer ones follow the votes."""

Views = Sequence[memoryview]

DROPPED = 1 << 16


class BallotDisagreement(Exception):
    """Not all members vote for the same."""


class Question(NamedTuple):
    """A vote that travels with the next exchange, see :meth:`Ballot.ask`."""

    value: int
    waiting: OnMissing
    agreed: Call


def _nothing() -> None:
    return


class Ballot(ABC):
    """The votes of a member over its ``links``, by position, whose data ``pump`` moves.

    Every member takes part in every round, once. A member may leave a round before the votes of all others have come:
    those arrive in order, before anything else on their link. ``riding``: messages up to so many bytes travel with the
    votes; all members have the same.
    """

    def __init__(self, links: Mapping[int, TcpLink], pump: Pump, riding: int) -> None:
        self.riding = riding
        self._links = links
        self._pump = pump
        self._question: Question | None = None
        self._late = 0.0

    @property
    def is_asking(self) -> bool:
        """Whether the next exchange carries a vote."""
        return self._question is not None

    def ask(self, value: int, waiting: OnMissing, agreed: Call) -> None:
        """Vote for ``value``, which is not 0, with the next exchange: it raises Disagreement if not all do so.

        It raises as soon as it is known that another member has voted for anything else. Until then ``waiting`` is
        called every few milliseconds with the positions of the members of which it is known that they have not voted.
        As soon as all have voted for ``value``, ``agreed`` is called.
        """
        self._question = Question(value, waiting, agreed)

    def withdraw(self) -> None:
        """Take the question back, if no exchange has carried it."""
        self._question = None

    def carry(
        self, outgoing: Mapping[int, Views], incoming: Mapping[int, Views], spare: bool
    ) -> tuple[dict[int, Views], dict[int, Views]]:
        """Ask, and exchange the short ones of the messages to and from other members, by position.

        ``spare``: the memory for incoming ones is of no worth, and may be written before all have agreed. Returns the
        messages that are left.
        """
        question, self._question = self._question, None
        assert question is not None
        riding_out, left_out = self._split(outgoing)
        riding_in, left_in = self._split(incoming)
        self._vote(question, riding_out, riding_in, spare)
        return left_out, left_in

    @abstractmethod
    def _vote(
        self, question: Question, outgoing: Mapping[int, Views], incoming: Mapping[int, Views], spare: bool
    ) -> None:
        """Take part in a round with ``question``, and exchange these messages if all agree."""

    @abstractmethod
    def decline(self) -> None:
        """Vote for nothing. Neither waits nor raises: the next exchange tells if a member is lost."""

    def flush(self) -> None:
        """Send what could not be sent before, as far as possible. Does not raise."""
        with suppress(HorovodInternalError):
            self._pump.flush()

    def waited(self) -> float:
        """How long this member has waited for votes since the last call, in seconds."""
        late, self._late = self._late, 0.0
        return late

    def _await(self, is_decided: Callable[[], bool], waiting: Call, early: Call = _nothing) -> None:
        begin = monotonic()
        self._pump.run_until(is_decided, early, waiting)
        self._late += monotonic() - begin

    def _split(self, messages: Mapping[int, Views]) -> tuple[dict[int, Views], dict[int, Views]]:
        """The messages that travel with the votes, and those that follow."""
        riding: dict[int, Views] = {}
        left: dict[int, Views] = {}
        if not messages:
            return riding, left
        for position, views in messages.items():
            if length := length_of(views):
                (riding if length <= self.riding else left)[position] = views
        return riding, left


def check_length(group: Group, position: int, length: int, expected: int) -> None:
    """Raise EngineError if the message with the vote of the member at ``position`` has not the ``expected`` length."""
    if length != expected:
        raise EngineError(
            f"{group.describe([position])} sent {length} bytes with its vote, and {expected} were expected: the ranks "
            "have agreed on tensors of different shapes, which is a defect of hvd-cluster; please report it"
        )


def length_of(views: Views) -> int:
    """The bytes of ``views`` together."""
    return sum(map(len, views))


def dropped(length: int) -> Script:
    """Receive ``length`` bytes that nobody wants."""
    while length:
        part = min(length, DROPPED)
        yield memoryview(bytearray(part))
        length -= part


def scatter(source: memoryview, targets: Views) -> None:
    """Copy ``source`` to ``targets``, one after the other."""
    start = 0
    for target in targets:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)[start : start + len(target)])
        start += len(target)
