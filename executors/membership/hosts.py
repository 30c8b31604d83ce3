"""The hosts of a job, and which of them may get workers now."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from executors.api import counted

LEAST_SECONDS = 1.0
MOST_SECONDS = 3600.0
SHOWN_PROBLEMS = 3
# Workers of a host with a deadline are left behind so long before it, or at half of the time that it gave.
HANDOVER_SECONDS = 1.0
MOST_DOUBLINGS = 64  # 2.0 ** failures must stay a float


@dataclass(frozen=True, slots=True)
class Cooldown:
    """How long a host gets no new worker after a failure, in seconds: the time doubles with each further failure.

    Raises ValueError unless 1 <= shortest <= longest <= 3600.
    """

    shortest: float
    longest: float

    def __post_init__(self) -> None:
        if not LEAST_SECONDS <= self.shortest <= self.longest <= MOST_SECONDS:
            raise ValueError(
                f"a cool-down of {self.shortest:g} to {self.longest:g} s is not possible; give the shortest time, then "
                f"the longest one, both from {LEAST_SECONDS:g} to {MOST_SECONDS:g} s"
            )

    def seconds(self, failures: int, jitter: float) -> float:
        """The time after failure number ``failures``, from 1 on; ``jitter``, 0 to 1, spreads hosts that fail at once.

        It is shortest * (2 ** failures + jitter), as in Horovod, but at most the longest time.
        """
        return min(self.shortest * (2.0 ** min(failures, MOST_DOUBLINGS) + jitter), self.longest)


@dataclass(slots=True)
class _Host:
    slots: int
    is_here: bool = True
    is_draining: bool = False
    failures: int = 0
    blacklisted_until: float = -math.inf
    leave_by: float = math.inf
    gone_at: float = math.inf


class Hosts:
    """All hosts of a job, in the order in which they were found. Without ``cooldown`` a failure blacklists for ever."""

    def __init__(self, cooldown: Cooldown | None) -> None:
        self._cooldown = cooldown
        self._hosts: dict[str, _Host] = {}
        self._unusable: dict[str, str] = {}  # why a host cannot be used, though the job wants it

    def found(self, name: str, slots: int) -> None:
        """The host has ``slots`` slots, and does not drain. One that comes back is still blacklisted."""
        host = self._hosts.setdefault(name, _Host(slots))
        host.slots, host.is_here, host.is_draining, host.leave_by, host.gone_at = slots, True, False, math.inf, math.inf
        self.unusable(name, None)

    def unusable(self, name: str, text: str | None) -> None:
        """The host cannot be used, for the reason ``text``; None: it can, or the job does not want it any more."""
        self._unusable.pop(name, None)
        if text is not None:
            self._unusable[name] = text

    def problems(self) -> list[str]:
        """A sentence for each host that cannot be used; the rest of many is counted."""
        sentences = [f"Host {name} cannot be used: {text}" for name, text in self._unusable.items()]
        rest = len(sentences) - SHOWN_PROBLEMS
        more = [f"{counted(rest, 'other host')} cannot be used either"] if rest > 0 else []
        return sentences[:SHOWN_PROBLEMS] + more

    def drain(self, name: str, until: float | None, now: float) -> bool:
        """The host will leave, at ``until`` if that is known; the last time counts. Returns whether this is news."""
        host = self._hosts.get(name)
        if host is None or not host.is_here:
            return False
        is_news, host.is_draining = not host.is_draining, True
        if until not in (None, host.gone_at):
            host.gone_at, host.leave_by = until, until - min(HANDOVER_SECONDS, max(0.0, until - now) / 2)
        return is_news

    def overdue(self, now: float) -> list[tuple[str, float]]:
        """The hosts that workers must have left by ``now``, and when each will be gone; each host once."""
        found = [(name, host.gone_at) for name, host in self._hosts.items() if host.leave_by <= now]
        for name, _ in found:
            self._hosts[name].leave_by = math.inf
        return found

    def close_slot(self, name: str) -> None:
        """The host has one slot less, until it is found again."""
        host = self._hosts[name]
        host.slots = max(0, host.slots - 1)

    def lost(self, name: str) -> None:
        """The host is gone."""
        if name in self._hosts:
            self._hosts[name].is_here, self._hosts[name].leave_by = False, math.inf

    def failed(self, name: str, now: float, jitter: float) -> None:
        """A worker of the host failed: the host is blacklisted."""
        host = self._hosts[name]
        host.failures += 1
        wait = self._cooldown.seconds(host.failures, jitter) if self._cooldown else math.inf
        host.blacklisted_until = max(host.blacklisted_until, now + wait)

    def room(self, name: str) -> int:
        """How many workers the host may keep; 0 if it drains or is gone. A blacklisted host keeps its workers."""
        host = self._hosts[name]
        return host.slots if host.is_here and not host.is_draining else 0

    def is_draining(self, name: str) -> bool:
        """Whether the host will leave."""
        return self._hosts[name].is_draining

    def open(self, now: float) -> list[str]:
        """The hosts that may get new workers."""
        return [name for name, host in self._hosts.items() if self.room(name) and host.blacklisted_until <= now]

    def departures(self) -> Iterator[float]:
        """When the workers must have left each host; inf for no such time."""
        return (host.leave_by for host in self._hosts.values())

    def openings(self) -> Iterator[float]:
        """When each blacklisted host may get new workers again; inf for never."""
        return (host.blacklisted_until for name, host in self._hosts.items() if self.room(name))

    def __str__(self) -> str:
        return ", ".join(f"{name}: {_described(host)}" for name, host in self._hosts.items()) or "none was found"


def _described(host: _Host) -> str:
    if not host.is_here:
        return "gone"
    if host.is_draining:
        return "draining"
    slots = counted(host.slots, "slot")
    return f"{slots}, blacklisted after {counted(host.failures, 'failure')}" if host.failures else slots


def spread(number: int, free: Mapping[str, int], present: Mapping[str, int]) -> list[str]:
    """The host of each of up to ``number`` workers, as far as there are ``free`` slots.

    Each gets the host with the fewest workers, of which ``present`` has those that stay: the loss of one host shall
    leave others that have the state of the training. Among equals the first host counts.
    """
    heap = [(present.get(host, 0), order, host, count) for order, (host, count) in enumerate(free.items()) if count > 0]
    heapq.heapify(heap)
    chosen: list[str] = []
    while heap and len(chosen) < number:
        workers, order, host, count = heap[0]
        chosen.append(host)
        if count > 1:
            heapq.heapreplace(heap, (workers + 1, order, host, count - 1))
        else:
            heapq.heappop(heap)
    return chosen
