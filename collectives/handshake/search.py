"""The search for rank 0, which may listen in another start or round than this rank expects."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError, SettingsError
from collectives.handshake.dial import Callee, GoneError, NoListenerError, call, dial
from collectives.handshake.entries import Entries
from collectives.handshake.hello import Hello, LocalEnd
from collectives.handshake.leaders import Forwarder, Superior
from collectives.net.attempts import ConnectAttempt

FIRST_LOOK_SECONDS = 1.0
LONGEST_LOOK_SECONDS = 10.0
"""A look into the store ends after this time at the latest: hundreds of ranks may wait for rank 0."""
CALL_SECONDS = 0.5
"""How long a rank tries to reach a rank 0 of another round, in seconds."""


class _LaterStartError(PeerLostError):
    """Rank 0 is in a later start."""


def find_center(end: LocalEnd, entries: Entries, forwarder: Forwarder | None = None) -> tuple[Callee, int, Any]:
    """Rank 0, which has admitted this rank, the number of the start, and the first answer.

    In a large world the other end may be the leader of this host in the place of rank 0. This rank is one itself if it
    has a ``forwarder``.
    """
    start, refused = entries.next, None
    while True:
        entry = _look_up(end, entries, start, refused)
        try:
            if entry is not None:
                center, first = _reach(end, entries, start, entry, forwarder)
                return center, start, first
        except (NoListenerError, _LaterStartError) as error:
            refused = PeerLostError(f"{error}, where it listened for an earlier start", error.ranks)
        except BaseException as error:
            if isinstance(error, PeerLostError):
                entries.check(start)
            if isinstance(error, GoneError) and 0 in error.ranks:
                entries.leave_reason(start, error)
            entries.failed(start)
            raise
        start += 1


def _reach(end: LocalEnd, entries: Entries, start: int, entry: Any, forwarder: Forwarder | None) -> tuple[Callee, Any]:
    """The other end, rank 0 at ``entry`` or the leader of this host, and the first answer."""
    pause, make = (
        partial(_await_later_start, end, entries, start),
        Callee if forwarder is None else partial(Superior, forwarder),
    )
    if entry["host"] != end.hello.host:
        if forwarder is not None:
            forwarder.publish(entries, entry["id"])
        elif end.may_follow and (leader := _await_leader(end, entries, start, entry["id"])) is not None:
            with suppress(NoListenerError, GoneError):  # then rank 0 names the leader, if this rank comes
                return call(end, leader, leader["rank"], pause)
    return call(end, entry, 0, pause, make)


def _await_leader(end: LocalEnd, entries: Entries, start: int, center: str) -> Any:
    """The entry of the leader of this host to ``center``; None if it is not there in half of the time of this rank.

    Such a rank calls rank 0, which then misses the leader only. Raises _LaterStartError, and NoListenerError where the
    start has failed, or rank 0 is in a later round.
    """
    seconds, least = FIRST_LOOK_SECONDS, end.attempt.remaining / 2
    while (left := end.attempt.remaining - least) > 0:
        with suppress(CollectiveTimeoutError):
            return entries.leader(center, min(seconds, left))
        _await_later_start(end, entries, start, 0.0)
        if entries.get(start, 0.0) is None or entries.current()[0] > end.hello.round:
            raise NoListenerError("rank 0 has given up", [0])
        seconds = min(2 * seconds, LONGEST_LOOK_SECONDS)
    return None


def _await_later_start(end: LocalEnd, entries: Entries, start: int, seconds: float) -> None:
    """Return after ``seconds``; _LaterStartError as soon as rank 0 listens in the start after ``start``."""
    end.attempt.check()
    with suppress(CollectiveTimeoutError):
        entries.get(start + 1, seconds)
        raise _LaterStartError("rank 0 listens elsewhere now", [0])


def _look_up(end: LocalEnd, entries: Entries, start: int, refused: PeerLostError | None) -> Any:
    """Where rank 0 listens in this start, None if the start has failed.

    Raises CollectiveTimeoutError, PeerLostError where an earlier start is over, and the reason why the one before has
    failed, if rank 0 does not start again during the first look.
    """
    seconds, called = FIRST_LOOK_SECONDS, ""
    while True:
        end.attempt.check()
        try:
            return entries.get(start, min(seconds, end.attempt.remaining))
        except CollectiveTimeoutError as error:
            seconds = min(2 * seconds, LONGEST_LOOK_SECONDS)
            round, entry = entries.current()
            if round != end.hello.round and entry["id"] != called:
                called = entry["id"]
                _call(end, entry)
            if round > end.hello.round:
                raise _outdated(end.hello, round) from error
            if start > entries.next:
                entries.check(start - 1)
            if end.attempt.remaining:
                continue
            if refused is not None:
                raise refused from error
            raise _without_center(end.hello, round) from error


def _call(end: LocalEnd, entry: Any) -> None:
    """Let a rank 0 of another round refuse this rank, so that it knows of the other round, too."""
    problems = OSError, HorovodInternalError, SettingsError
    with suppress(*problems), ConnectAttempt(CALL_SECONDS, end.attempt.check) as attempt:
        caller = replace(end, attempt=attempt)
        wire = dial(caller, entry, 0)
        with closing(wire.sock):
            Callee(caller, 0, wire).greet(entry)
    end.attempt.check()


def _outdated(hello: Hello, round: int) -> PeerLostError:
    """Rank 0 is in the later ``round``: it will never join that of ``hello``."""
    return PeerLostError(
        f"rank {hello.rank} is in {hello.world}, rank 0 in {replace(hello, round=round).world}; only ranks of one "
        "world can connect: ask the launcher for the current one",
        [0],
    )


def _without_center(hello: Hello, round: int) -> CollectiveTimeoutError:
    """Rank 0 has published no start of this world; ``round`` is the last round that it has published."""
    behind = f": it is still in round {round}" if round < hello.round else ""
    text = f"rank 0 of {hello.world} did not come in time{behind}; look at its output, or raise "
    return CollectiveTimeoutError(text + "HOROVOD_GLOO_TIMEOUT_SECONDS", [0])
