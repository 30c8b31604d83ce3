"""How rank 0 admits the ranks of a large world: leaders speak for the other ranks of their hosts."""

from __future__ import annotations

import math
import select
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from collectives.api import CollectiveTimeoutError, HorovodInternalError, SettingsError, override
from collectives.handshake.admission import MOST_NAMED, Admission
from collectives.handshake.hello import Hello, LocalEnd, objection, unpack_answer, unpack_hello
from collectives.net.relay import GONE, unpack_envelope

ENVELOPE = b"\0"
"""An envelope begins so, and no frame of a rank about itself."""


@dataclass(frozen=True, slots=True)
class _Led:
    """A rank that ``leader`` has admitted, and its hello."""

    hello: Hello
    leader: int


class HostsAdmission(Admission):
    """Admits ranks, or their leaders for them: a connection for each host is enough. A context manager."""

    HEEDED = select.POLLIN | select.POLLRDHUP

    def __init__(self, end: LocalEnd, expected: Collection[int]) -> None:
        hosts = len(expected) // end.local_size  # as far as the launcher tells; descriptors are set aside for so many
        super().__init__(end, expected, count=hosts + end.local_size)
        self._led: dict[int, _Led] = {}

    @override
    def served(self) -> dict[int, tuple[int, ...]]:
        """Leader -> the ranks that it speaks for, itself included."""
        found: dict[int, list[int]] = {}
        for rank in sorted(self._led):
            found.setdefault(self._led[rank].leader, []).append(rank)
        return {leader: (leader, *ranks) for leader, ranks in found.items()}

    @override
    def hello(self, rank: int) -> Hello:
        """That of an admitted rank."""
        return self._led[rank].hello if rank in self._led else super().hello(rank)

    @override
    def collect(self) -> dict[int, Any]:
        found: dict[int, Any] = {}
        late = partial(self._without_offer, found)
        poller = select.poll()
        ranks = {peer.wire.sock.fileno(): rank for rank, peer in self._peers.items()}
        for descriptor in ranks:
            poller.register(descriptor, select.POLLIN)
        while len(found) < len(self._expected):
            ready = [ranks[each] for each in self._end.attempt.poll(poller, math.inf) if each in ranks]
            if not ready:
                raise late()
            for sender, data in self._heard(ready):
                if sender in found or data == GONE:
                    raise self._reason_in(sender, data, late)
                found[sender] = unpack_answer(data)
        return found

    def _heed(self, rank: int) -> None:
        for sender, data in self._heard([rank]):
            known = self._led.get(sender)
            if sender == rank or (known is not None and known.leader == rank):
                raise self._reason_in(sender, data, self._absent)
            self._admit_led(rank, data)

    def _heard(self, ranks: Collection[int]) -> Iterator[tuple[int, bytes]]:
        """The senders and the frames that have come from ``ranks``; from leaders also those of other senders."""
        for rank in ranks:
            while (frame := self._read(rank)) is not None:
                senders, data = unpack_envelope(frame) if frame.startswith(ENVELOPE) else ((rank,), frame)
                yield senders[0], data

    def _admit_led(self, leader: int, data: bytes) -> None:
        hello, mine = unpack_hello(data)[0], self._end.hello
        reason = objection(hello, mine, self._absentees)
        if reason is not None:
            raise reason
        if hello.configuration == mine.configuration:  # thousands of copies would fill the memory
            hello = replace(hello, configuration=mine.configuration)
        self._led[hello.rank] = _Led(hello, leader)
        self._absentees.discard(hello.rank)

    # Ranks that are late.

    def _absent(self) -> CollectiveTimeoutError:
        stopped = self._stopped()
        if stopped is None:
            return super()._absent()
        text = f"{stopped}; ranks {self._missing[:MOST_NAMED]} did not come, which may be of their hosts"
        return CollectiveTimeoutError(text, stopped.ranks)

    def _without_offer(self, found: Collection[int]) -> CollectiveTimeoutError:
        if (stopped := self._stopped()) is not None:
            return stopped
        ranks = sorted((self._peers.keys() | self._led.keys()).difference(found))
        return CollectiveTimeoutError(f"ranks {ranks} did not send their addresses in time", ranks)

    def _stopped(self) -> CollectiveTimeoutError | None:
        """Names the ranks that do not answer a question: a stopped leader keeps those of its host away, too."""
        replies = self._ask(self._peers)
        silent = [rank for rank in self._peers if rank not in replies]
        if not silent:
            return None
        text = f"ranks {silent} were reached, but did not answer in time; their processes may be stopped"
        return CollectiveTimeoutError(text, silent)

    def _error_in(self, frame: bytes) -> HorovodInternalError | SettingsError | None:
        return None if frame.startswith(ENVELOPE) else super()._error_in(frame)
