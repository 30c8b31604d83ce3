"""How rank 0 exchanges messages with its coordinator, and the coordinator with the other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from collectives.api import Changes, HorovodInternalError, override
from collectives.controller.agreement import name_ranks
from collectives.controller.coordinator import Coordinator
from collectives.controller.errors import pack, unpack
from collectives.controller.messages import (
    COORDINATOR,
    Abort,
    Accusation,
    Inquiry,
    Locate,
    Message,
    Ping,
    Pong,
    RankStatus,
    Status,
    WaitReport,
    Withdraw,
)
from collectives.controller.releases import Outgoing
from collectives.engine.link import FLUSH_SECONDS, Link
from collectives.events import EventStream, Heard
from collectives.net.channel import Channel
from collectives.stalls.deadlocks import DeadlockDetector
from collectives.stalls.inspector import StallReporter
from collectives.stalls.liveness import LivenessCheck, describe_silence, verdict
from collectives.stalls.status import StatusTable
from collectives.stalls.straggler_reports import StragglerReporter


class LocalLink(Link):
    """The link of rank 0, which has the ``coordinator``: forwards messages between it and the other ranks.

    ``stalls`` and ``deadlocks`` watch the tensors that wait in the coordinator, ``stragglers`` the ranks that others
    wait for. ``statuses`` has questions to ranks, and gets the answers. ``hosts`` are those of the ranks, and
    ``variable`` is the setting that bounds operations, both for messages.
    """

    def __init__(
        self,
        channel: Channel,
        coordinator: Coordinator,
        stalls: StallReporter,
        deadlocks: DeadlockDetector,
        stragglers: StragglerReporter,
        statuses: StatusTable,
        events: EventStream,
        hosts: Sequence[str],
        variable: str,
    ) -> None:
        super().__init__(channel, range(1, channel.size), events)
        self._coordinator = coordinator
        self.bypassed = {}
        self._stalls = stalls
        self._deadlocks = deadlocks
        self._stragglers = stragglers
        self._statuses = statuses
        self._liveness = LivenessCheck(self._peers, channel.leaders)
        self._hosts = hosts
        self._variable = variable

    @property
    @override
    def deadline(self) -> float | None:
        times = [self._coordinator.deadline, self._liveness.deadline]
        if not self._liveness.is_accused:
            times += [self._stalls.deadline, self._deadlocks.deadline]
        return min([time for time in times if time is not None], default=None)

    @property
    @override
    def is_holding(self) -> bool:
        return self._coordinator.deadline is not None or self.has_kept

    @property
    @override
    def reaches_all(self) -> bool:
        return True

    @property
    @override
    def is_changing(self) -> bool:
        return self._coordinator.is_changing

    @override
    def tell(self, message: Message) -> None:
        self._receive(COORDINATOR, message)

    def _receive(self, sender: int, message: Message) -> None:
        now = time.monotonic()
        if self.bypassed:
            self._tell_bypassed()
        if Heard in self._events.wanted:
            for (process_set, name), ranks, cached in self._coordinator.submissions(sender, message):
                self._events.publish(Heard(name, process_set, ranks, cached, now))
        self._coordinator.receive(sender, message, now)

    def _tell_bypassed(self) -> None:
        """The coordinator takes part in no round; it only counts the batches, before it decides on others."""
        bypassed, self.bypassed = self.bypassed or {}, {}
        for schedule, times in bypassed.values():
            self._coordinator.use(schedule, times)

    @override
    def hear(self) -> Iterator[Message]:
        kept, self._kept = self._kept, []
        for sender, message in chain(kept, self.arrivals()) if kept else self.arrivals():
            if isinstance(message, Abort | Withdraw):
                yield message
            elif isinstance(message, Inquiry | Pong | Accusation | WaitReport | RankStatus):
                self._hear_aside(sender, message)
            else:
                self._receive(sender, message)
        now = time.monotonic()
        if self._liveness:
            yield from self._results(now)
        if not self._liveness.is_accused:
            fatal = self._stalls.look(self._coordinator, now)
            if fatal is not None:
                self.accuse(fatal)
            self._deadlocks.look(self._coordinator, now)
            yield from self._ask()
        if self.bypassed:
            self._tell_bypassed()
        for outgoing in self._coordinator.decide(now):
            yield from self._send(outgoing)

    @override
    def unanswered(self) -> str:
        return name_ranks(self._coordinator.unanswered())

    # Silent ranks.

    @override
    def attend(self) -> Iterator[Message]:
        for sender, message in self.arrivals():
            if isinstance(message, Abort):
                yield message
            elif isinstance(message, Inquiry | Pong | Accusation | WaitReport | RankStatus):
                self._hear_aside(sender, message)
            else:
                self._kept.append((sender, message))
        yield from self._ask()
        if self._liveness:
            yield from self._results(time.monotonic())

    def _hear_aside(self, sender: int, message: Inquiry | Pong | Accusation | WaitReport | RankStatus) -> None:
        """Messages that have nothing to do with the order of batches."""
        if isinstance(message, WaitReport):
            self._stragglers.hear(sender, message)
        elif isinstance(message, Pong):
            self._liveness.answered(sender, time.monotonic())
            self._stragglers.answered(sender)
        elif isinstance(message, Accusation):
            self.accuse(unpack(message.error))
        elif isinstance(message, RankStatus):
            self.answer(message)
        else:
            now = time.monotonic()
            self._send_directly((sender,), Status(self._stalls.answer(self._coordinator, now)))
            self._ping(self._liveness.inquire(sender, now))

    @override
    def inquire(self) -> bool:
        self._ping(self._liveness.inquire(COORDINATOR, time.monotonic()))
        return False

    @override
    def accuse(self, error: HorovodInternalError) -> None:
        self._ping(self._liveness.accuse(error, time.monotonic()))

    @override
    def report_waits(self, report: WaitReport) -> None:
        self._stragglers.hear(COORDINATOR, report)

    @override
    def answer(self, found: RankStatus) -> None:
        self._statuses.hear(found, time.monotonic())

    def _ask(self) -> Iterator[Message]:
        """Ask ranks where they stand, and yield the question if it is for this rank."""
        ranks = self._statuses.take_questions()
        others = [rank for rank in ranks if rank != COORDINATOR]
        if others:
            self._send_directly(others, Locate())
        if len(others) < len(ranks):
            yield Locate()

    def _ping(self, ranks: Sequence[int]) -> None:
        self._send_directly(ranks, Ping())

    def _results(self, now: float) -> Iterator[Message]:
        """Send the result of the liveness check to the ranks that want it, and yield it if it is for this rank."""
        result = self._liveness.settle(now)
        if result is None:
            return
        silent, seconds, inquirers, accusation = result
        self._stragglers.silent(silent, seconds)
        if accusation is not None:
            states = self.states(silent)
            yield Abort(pack(verdict(accusation, silent, seconds, self._hosts, self._variable, states)))
        elif silent:
            text = describe_silence(silent, self._hosts, seconds, self.states(silent))
            yield from self._send(Outgoing(inquirers, Status(text, silent)))

    def _send(self, outgoing: Outgoing) -> Iterator[Message]:
        """Send to the other ranks, and yield the message if it is for this rank."""
        others = [rank for rank in outgoing.ranks if rank != COORDINATOR]
        if others:
            send = self._send_directly if isinstance(outgoing.message, Status) else self._send_to
            send(others, outgoing.message)
        if len(others) < len(outgoing.ranks):
            yield outgoing.message

    @override
    def settle(self, may_wait: Callable[[], bool]) -> None:
        """The peers run all older batches, then read, so this ends."""
        while self._channel.has_unsent and may_wait():
            self._channel.flush(FLUSH_SECONDS)

    @override
    def propose(self, changes: Changes) -> None:
        self._coordinator.propose(replace(self._coordinator.parameters, **changes))
