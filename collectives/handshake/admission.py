"""The listening side: a rank admits the ranks that prove that they know the secret of the job."""

from __future__ import annotations

import select
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError, SettingsError
from collectives.handshake.dial import Callee
from collectives.handshake.hello import (
    QUESTION,
    Hello,
    LocalEnd,
    OtherWorldError,
    Peer,
    objection,
    pack_answer,
    unpack_answer,
)
from collectives.handshake.listeners import MOST_CANDIDATES, Candidates, FatalHelloError, Listeners
from collectives.net.attempts import ConnectAttempt
from collectives.net.frames import fingerprint
from collectives.net.wire import send_together

MOST_NAMED = 8
QUESTION_SECONDS = 0.25
"""How long rank 0 waits for replies to its question, in seconds."""


class Admission:
    """Admits the ranks ``expected``, in any order and all at once. A context manager.

    When its block ends with an error, it sends the error to all admitted ranks and closes their connections.
    ``upstream`` is rank 0, for the admission of another rank: an answer of it ends the wait for the expected ranks.
    ``count`` is the number of ranks that come, if not all of the expected ones do.
    """

    HEEDED = select.POLLRDHUP
    """The events of an admitted rank that end the wait for the others, see poll(2)."""

    def __init__(
        self, end: LocalEnd, expected: Collection[int], upstream: Callee | None = None, count: int | None = None
    ) -> None:
        count = len(expected) if count is None else count
        self._end = end
        self._expected = expected
        self._upstream = upstream
        self._absentees = set(expected)
        self._peers: dict[int, Peer] = {}
        self._ranks: dict[int, int] = {}  # of the peers, by descriptor
        self._elsewhere: dict[int, str] = {}
        self._poller = select.poll()
        self._listeners = Listeners(end.hello, end.address, count + MOST_CANDIDATES)
        self._candidates = Candidates(end, self._listeners, self._poller, count, self._admit)

    @property
    def entry(self) -> dict[str, Any]:
        """The description by which the other ranks find this admission."""
        return self._listeners.entry

    def served(self) -> dict[int, tuple[int, ...]]:
        """The ranks for which another one speaks, by that rank, which is one of them: none."""
        return {}

    def hello(self, rank: int) -> Hello:
        """That of an admitted rank."""
        return self._peers[rank].hello

    def __enter__(self) -> Admission:
        self._listeners.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the listeners and the candidates; on an error, send it to the peers and close them, too."""
        self._listeners.__exit__(kind, error, trace)
        self._candidates.close()
        if error is not None:
            self.dismiss(error)

    def dismiss(self, error: BaseException) -> None:
        """Send ``error`` to the admitted ranks and close their connections."""
        while self._peers:
            _, peer = self._peers.popitem()
            self._refuse(peer, error)

    def _refuse(self, peer: Peer, error: BaseException) -> None:
        with suppress(OSError, HorovodInternalError):
            peer.answer(None, error)
        peer.wire.sock.close()

    def admit_all(self) -> dict[int, Peer]:
        """The expected ranks, once they are complete. Raises CollectiveTimeoutError that names the missing ones."""
        if self._upstream is not None:
            self._poller.register(self._upstream.sock, select.POLLIN | select.POLLRDHUP)
        self._candidates.make_room()
        while self._absentees:
            ready = self._end.attempt.poll(self._poller, self._candidates.next_look())
            if self._end.attempt.is_over:
                raise self._absent()
            for descriptor in ready:
                self._attend(descriptor)
            self._candidates.make_room()
        return self._peers

    def answer(self, value: object) -> None:
        """Send ``value`` to all peers. The loss of one is noticed by the next wait, or by the watch of the channel."""
        content, wires = pack_answer(value), {rank: peer.wire for rank, peer in self._peers.items()}
        digest = fingerprint(content)
        late = send_together(wires, self._end.attempt, content, lambda rank: self._peers[rank].proof(digest))
        if late:
            some = f"rank {late[0]}" if len(late) == 1 else f"at least one of ranks {late}"
            text = f"{some} did not read the answers of rank {self._end.hello.rank} in time"
            raise CollectiveTimeoutError(f"{text}; its process may be stopped", late)

    def collect(self) -> dict[int, Any]:
        """The answer of each peer, by rank. Raises a peer's error, PeerLostError, or CollectiveTimeoutError."""
        return self._collect(self._without_offer)

    def confirm(self) -> None:
        """Wait until each peer has confirmed that it is connected within its host. Raises the errors of collect()."""
        self._collect(self._without_confirmation)

    def _collect(self, late: Callable[[Collection[int]], CollectiveTimeoutError]) -> dict[int, Any]:
        """As :meth:`collect`; ``late`` is called with the ranks that have answered when the time is over."""
        found: dict[int, Any] = {}
        ranks = {peer.wire.sock.fileno(): rank for rank, peer in self._peers.items()}
        while len(found) < len(ranks):
            ready = self._end.attempt.wait(dict.fromkeys(ranks, select.POLLIN))
            if not ready:
                raise late(found)
            for rank in [ranks[descriptor] for descriptor in ready]:
                if rank in found:
                    raise self._reason_of(rank, partial(late, found))
                frame = self._read(rank)
                if frame is not None:
                    found[rank] = unpack_answer(frame)
        return found

    def _without_offer(self, found: Collection[int]) -> CollectiveTimeoutError:
        ranks = sorted(set(self._peers).difference(found))
        return CollectiveTimeoutError(f"ranks {ranks} did not send their addresses in time", ranks)

    def _without_confirmation(self, found: Collection[int]) -> CollectiveTimeoutError:
        """Names the ranks that do not answer a question; or, if all do, those that they wait for."""
        waiting = sorted(set(self._peers).difference(found))
        reasons = self._ask(waiting)
        silent = [rank for rank in waiting if rank not in reasons]
        ranks = silent or sorted({rank for reason in reasons.values() for rank in getattr(reason, "ranks", ())})
        text = f"ranks {ranks or waiting} did not connect within their hosts in time; their processes may be stopped"
        return CollectiveTimeoutError(text, ranks or waiting)

    def _ask(self, ranks: Collection[int]) -> dict[int, Exception | None]:
        """Why ``ranks`` have not confirmed, from those that reply at once: a stopped process does not."""
        reasons: dict[int, Exception | None] = {}
        waiting = {self._peers[rank].wire.sock.fileno(): rank for rank in ranks}
        for rank in ranks:
            with suppress(OSError):
                self._peers[rank].answer(QUESTION)
        with ConnectAttempt(QUESTION_SECONDS) as attempt:
            while waiting and (ready := attempt.wait(dict.fromkeys(waiting, select.POLLIN))):
                for rank in [waiting.pop(descriptor) for descriptor in ready]:
                    reasons[rank] = self._reply(rank)
        return reasons

    def _reply(self, rank: int) -> Exception | None:
        try:
            frame = self._peers[rank].wire.read()
        except (OSError, HorovodInternalError) as error:
            return error
        return None if frame is None else self._error_in(frame)

    def _read(self, rank: int) -> bytes | None:
        try:
            return self._peers[rank].wire.read()
        except OSError as error:
            raise self._lost(rank, error) from error

    def _reason_of(self, rank: int, late: Callable[[], CollectiveTimeoutError]) -> Exception:
        """The reason why an admitted rank left: the error that it sent, or its loss; ``late`` where its time is over.

        Such a rank does not know the missing ones.
        """
        try:
            frame = self._peers[rank].wire.read()
        except (OSError, HorovodInternalError) as error:
            return self._lost(rank, error)
        return self._reason_in(rank, frame or b"", late)

    def _reason_in(self, rank: int, frame: bytes, late: Callable[[], CollectiveTimeoutError]) -> Exception:
        """As :meth:`_reason_of`, from the last frame of the rank; empty: there is none."""
        error = self._error_in(frame) if frame else None
        if isinstance(error, SettingsError):
            return error
        if isinstance(error, CollectiveTimeoutError):
            return late()
        return self._lost(rank, error or ConnectionResetError("the other side closed the connection"))

    def _lost(self, rank: int, error: Exception) -> PeerLostError:
        host = self.hello(rank).host
        text = f"rank {rank} on host {host!r} is gone: its process ended or its connection broke ({error}) while the "
        return PeerLostError(text + "ranks connected; look at the output of that rank", [rank], [host])

    @property
    def _missing(self) -> list[int]:
        return [rank for rank in self._expected if rank in self._absentees]

    def _absent(self) -> CollectiveTimeoutError:
        missing, hello = self._missing, self._end.hello
        called = [f"rank {rank} called in {self._elsewhere[rank]}" for rank in missing if rank in self._elsewhere]
        outside = f" ({', '.join(called[:MOST_NAMED])}; rank {hello.rank} is in {hello.world})" if called else ""
        return CollectiveTimeoutError(
            f"ranks {missing} of {hello.size} did not connect to rank {hello.rank} in time; look at their output, or "
            f"raise HOROVOD_GLOO_TIMEOUT_SECONDS{outside}",
            missing,
        )

    def _attend(self, descriptor: int) -> None:
        if self._upstream is not None and descriptor == self._upstream.sock.fileno():
            self._upstream.answer()
            raise self._absent()
        if descriptor in self._ranks:
            self._heed(self._ranks[descriptor])
        else:
            self._candidates.attend(descriptor)

    def _heed(self, rank: int) -> None:
        """An admitted rank has an event while others are awaited."""
        raise self._reason_of(rank, self._absent)

    def _admit(self, peer: Peer) -> None:
        hello = peer.hello
        reason = objection(hello, self._end.hello, self._absentees)
        if reason is None:
            self._absentees.discard(hello.rank)
            self._peers[hello.rank] = peer
            self._ranks[peer.wire.sock.fileno()] = hello.rank
            self._register(peer)
            return
        self._refuse(peer, reason)
        if not isinstance(reason, OtherWorldError) or reason.is_later:
            raise FatalHelloError(reason)
        self._elsewhere[hello.rank] = hello.world
        self._candidates.warn("a rank of another world", f": {reason}")

    def _register(self, peer: Peer) -> None:
        """``peer`` was admitted: hear of its events."""
        self._poller.register(peer.wire.sock, self.HEEDED)

    def _error_in(self, frame: bytes) -> HorovodInternalError | SettingsError | None:
        try:
            unpack_answer(frame)
        except (HorovodInternalError, SettingsError) as error:
            return error
        return None
