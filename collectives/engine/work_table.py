"""The works of one rank in flight, by name."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from collectives.api import DuplicateNameError, Operation, Request
from collectives.controller.agreement import SET_CHANGES
from collectives.controller.messages import Response
from collectives.engine.threads import CommandKind, CommandQueue
from collectives.engine.work import Work, fresh
from collectives.logs import about

UNNAMED = 256
"""The number of names for unnamed tensors of one kind; then the names repeat, to profit from the response cache."""

SHOWN_NAMES = 6
SHOWN_CHARACTERS = 100

Key = tuple[int, str]


class WorkTable:
    """Gives each name to one work at a time. All methods are safe from any thread.

    ``queue`` gets the works that begin to be negotiated, in their order, and what a caller waits for. ``running`` are
    the works of the operation that runs now, which are not in the table any more. ``batch`` is the number of the batch
    that runs now, or in which an operation failed; None where there is none. ``cut_off_since`` is when the oldest work
    that :meth:`close` has found was submitted, in monotonic seconds; None if it found none.
    """

    def __init__(self, rank: int, queue: CommandQueue) -> None:
        self._rank = rank
        self._queue = queue
        # Owned by the table, held for a few instructions. Reentrant, because a signal handler may call shutdown() at
        # any point of the main thread.
        self._lock = threading.RLock()
        self._works: dict[Key, Work] = {}
        self._queued: dict[Key, deque[Work]] = {}
        self._rejected: dict[Key, Work] = {}
        self._counters: dict[tuple[Operation, int, bool], int] = {}
        self._token = object()
        self._ended: Callable[[Request], Exception] | None = None
        self._refused: dict[Key, Exception] = {}
        self.running: Sequence[Work] = ()
        self.cut_off_since: float | None = None
        self.batch: int | None = None
        self._last: Request | None = None
        self._last_since = 0.0

    def __bool__(self) -> bool:
        return bool(self._works or self._queued)

    def enter(self, works: Sequence[Work], unnamed: bool) -> None:
        """Put ``works`` in flight, all or none; several are a group.

        Raises DuplicateNameError for a name in flight, or the error of :meth:`refuse` or :meth:`close`. ``unnamed``
        works get names, and wait their turn while those are in flight.
        """
        with self._lock:
            if self._ended is not None:
                raise fresh(self._error_after_end(self._ended, works, unnamed))
            if unnamed:
                self._name(works)
            else:
                self._check_free(works)
            is_held = bool(self._rejected) and self._is_rejected(works[0].request)
            first = [work for work in works if not self._waits(work, is_held)]
            self._queue.put(CommandKind.SUBMIT, first)
            if self._rejected:
                self._urge_behind({work.request.key for work in works})

    def admit(self, work: Work) -> bool:
        """Put ``work`` in flight without submitting it; False if it would wait its turn, or none may enter."""
        key = work.request.key
        with self._lock:
            if self._ended is not None or key in self._works or key in self._queued or key in self._rejected:
                return False
            work.owner = self._token
            work.since = self._last_since = time.monotonic()
            self._last = work.request
            self._works[key] = work
        return True

    def _error_after_end(
        self, ended: Callable[[Request], Exception], works: Sequence[Work], unnamed: bool
    ) -> Exception:
        if unnamed and self._refused:
            self._name(works)
        return self.refusal(works) or ended(works[0].request)

    def refuse(self, errors: Mapping[Key, Exception]) -> None:
        """After the end, a work of these names raises these errors: other ranks have refused the call."""
        with self._lock:
            self._refused = dict(errors)

    def refusal(self, works: Iterable[Work]) -> Exception | None:
        """The error of :meth:`refuse` for ``works``, one call."""
        return next((error for work in works if (error := self._refused.get(work.request.key))), None)

    def reject(self, works: Sequence[Work], unnamed: bool) -> None:
        """Report ``works``, one call, which has failed because of its arguments on this rank.

        Their names stay in use until all ranks have made that call: the next work of such a name waits its turn. Names
        in flight are not reported, as the call would be wrong anyway.
        """
        with self._lock:
            if self._ended is not None:
                return
            if unnamed:
                self._name(works)
            elif any(self._is_in_flight(work.request.key) for work in works):
                return
            is_held = self._is_rejected(works[0].request)
            self._queue.put(CommandKind.SUBMIT, [work for work in works if not self._waits(work, is_held)])

    def _check_free(self, works: Sequence[Work]) -> None:
        seen: set[Key] = set()
        for work in works:
            key = work.request.key
            if key in self._works or key in seen or (self._queued and self._is_queued(key)):
                raise DuplicateNameError(
                    f"tensor {key[1]!r} is still in flight on rank {self._rank}; "
                    "synchronize it first, or give each tensor its own name"
                )
            seen.add(key)

    def _is_in_flight(self, key: Key) -> bool:
        return key in self._works or self._is_queued(key)

    def _is_queued(self, key: Key) -> bool:
        return any(work.error is None for work in self._queued.get(key, ()))

    def _name(self, works: Sequence[Work]) -> None:
        """The n-th unnamed call of one kind has the same name on every member."""
        request = works[0].request
        kind = (request.operation, request.process_set, bool(request.group))
        number = self._counters.get(kind, 0)
        if request.operation is not Operation.JOIN:  # which ends for all ranks at once, and may be tried again
            self._counters[kind] = number + 1
        name = f"{request.group or request.name}.noname.{number % UNNAMED}"
        for place, work in enumerate(works):
            work.is_counted = True
            work.request = (
                work.request.changed(name=f"{name}[{place}]", group=name)
                if request.group
                else request.changed(name=name)
            )

    def _is_rejected(self, request: Request) -> bool:
        """Whether a call of the group of ``request`` has failed here; its length may differ on other ranks."""
        group = (request.process_set, request.group)
        return bool(request.group) and any(
            (other.request.process_set, other.request.group) == group for other in self._rejected.values()
        )

    def _waits(self, work: Work, is_held: bool) -> bool:
        key = work.request.key
        work.owner = self._token
        work.since = self._last_since = time.monotonic()
        self._last = work.request
        waits = is_held or key in self._works or key in self._rejected
        if waits:
            self._queued.setdefault(key, deque()).append(work)
        elif work.error is None:
            self._works[key] = work
        else:
            self._rejected[key] = work
        return waits

    def _place(self, key: Key, work: Work) -> None:
        (self._works if work.error is None else self._rejected)[key] = work

    @property
    def last(self) -> tuple[Request, float] | None:
        """The request that was submitted last, and when, in monotonic seconds; None before the first one."""
        with self._lock:
            return None if self._last is None else (self._last, self._last_since)

    def urged(self) -> list[Work]:
        """The works that a caller waits for."""
        with self._lock:
            return [work for work in self._awaited() if work.urged]

    def owns(self, work: Work) -> bool:
        """Whether ``work`` was entered here."""
        return work.owner is self._token

    def has(self, work: Work) -> bool:
        """Whether ``work`` is in flight, and does not wait its turn."""
        return self._works.get(work.request.key) is work

    def withdraw(self, works: Sequence[Work]) -> bool:
        """Take out ``works``, one call, if all of them wait their turn; whether they did."""
        with self._lock:
            queues = [self._queued.get(work.request.key, deque()) for work in works]
            waits = all(work in queue for work, queue in zip(works, queues, strict=True))
            for work, queue in zip(works, queues, strict=True) if waits else ():
                queue.remove(work)
                if not queue:
                    del self._queued[work.request.key]
        return waits

    def urge(self, work: Work) -> None:
        """A caller waits for ``work``, and so for those of its name that run before it: no rank may hold them back."""
        key = work.request.key
        with self._lock:
            work.urged = True
            if self._works.get(key) is not work:
                for earlier in self._ahead(work):
                    earlier.urged = True
        self._queue.put(CommandKind.URGE, key)

    def _ahead(self, work: Work) -> Iterator[Work]:
        key = work.request.key
        if key in self._works:
            yield self._works[key]
        yield from takewhile(lambda other: other is not work, self._queued.get(key, ()))

    def is_urged(self, requests: Iterable[Request]) -> bool:
        """Whether a caller waits for one of ``requests``."""
        works = (self._works.get(request.key) for request in requests)
        return any(work is not None and work.urged for work in works)

    def find(self, batches: Iterable[Sequence[Response]]) -> list[list[Work]] | None:
        """The works of ``batches``, batch by batch; None if one of them is missing."""
        try:
            return [[self._works[response.request.key] for response in batch] for batch in batches]
        except KeyError:
            return None

    def take(self, key: Key) -> Work | None:
        """Remove and return the work called ``key``, if there is one; the next of that name takes its place."""
        with self._lock:
            rejected = None if key in self._works else self._rejected.pop(key, None)
            work = rejected or self._works.pop(key, None)
            if self._queued:
                for each in (key,) if rejected is None else self._behind(rejected.request):
                    self._advance(each)
            return work

    def _behind(self, request: Request) -> list[Key]:
        """The names that are free for the next call now: for a group, only after its last tensor, and all at once."""
        if not request.group:
            return [request.key]
        group = (request.process_set, request.group)
        queued = (work for queue in self._queued.values() for work in queue)
        works = [work for work in queued if (work.request.process_set, work.request.group) == group]
        if not works or self._is_rejected(request):
            return []
        works.sort(key=lambda work: work.since)
        return [work.request.key for work in works[: works[0].request.group_size]]

    def remove(self, works: Iterable[Work]) -> None:
        """Take out each of ``works``, as :meth:`take` does."""
        with self._lock:
            for work in works:
                self._works.pop(work.request.key, None)
                if self._queued:
                    self._advance(work.request.key)

    def _advance(self, key: Key) -> None:
        queue = self._queued.get(key)
        if queue:
            following = queue.popleft()
            if not queue:
                del self._queued[key]
            self._place(key, following)
            self._queue.put(CommandKind.SUBMIT, [following])
            self._urge_behind((key,))

    def _urge_behind(self, keys: Iterable[Key]) -> None:
        for key in keys:
            following = next((work for work in self._queued.get(key, ()) if work.error is None), None)
            if following is not None and key in self._rejected:  # the others may never make that call: a stall
                self.urge(following)

    def oldest(self) -> float | None:
        """When the oldest work that a caller may wait for was submitted, in monotonic seconds; None without one."""
        with self._lock:
            return min((work.since for work in self._awaited()), default=None)

    def since(self) -> dict[Key, float]:
        """When each work that runs or is in flight was submitted, in monotonic seconds."""
        with self._lock:
            return {work.request.key: work.since for work in (*self._works.values(), *self.running) if work.since}

    def describe(self) -> str:
        """The names of works that a caller may wait for, for messages; a long list is cut short."""
        names = self._names()
        more = len(names) - SHOWN_NAMES
        shown = ", ".join(repr(name[:SHOWN_CHARACTERS]) for name in names[:SHOWN_NAMES])
        return f"{shown} and {more} more" if more > 0 else shown

    def _names(self) -> list[str]:
        with self._lock:
            return list(dict.fromkeys(work.request.name for work in self._awaited()))

    def about(self) -> dict[str, Any]:
        """The ``extra`` of a record of the log about these works."""
        return about(self._names(), self.batch)

    def _awaited(self) -> Iterator[Work]:
        """The works that run, are in flight, or wait their turn, perhaps behind a call that failed on this rank."""
        yield from (work for work in self.running if work.since)  # not those that stand in for a joined rank
        yield from self._works.values()
        yield from (work for queue in self._queued.values() for work in queue if work.error is None)

    def take_set(self, process_set: int) -> list[Work]:
        """Remove and return all works of the set."""
        with self._lock:
            works = [work for key, work in self._works.items() if key[0] == process_set] + self.queued(process_set)
            for work in works:
                self._works.pop(work.request.key, None)
                self._queued.pop(work.request.key, None)
            self._rejected = {key: work for key, work in self._rejected.items() if key[0] != process_set}
            return [work for work in works if not work.done]

    def put_back(self, works: Iterable[Work]) -> None:
        """Works of a batch that did not finish fail together with everything else."""
        with self._lock:
            for work in works:
                self._queued.setdefault(work.request.key, deque()).append(work)

    def restart_names(self, process_set: int) -> None:
        """Count the unnamed tensors of the set from zero again, as all members do at this point of the order.

        Changes of process sets keep their count: each rank has made the same number, and may wait for the next.
        """
        with self._lock:
            self._counters = {
                kind: number
                for kind, number in self._counters.items()
                if kind[1] != process_set or kind[0] in SET_CHANGES
            }

    def queued(self, process_set: int) -> list[Work]:
        """The unnamed works of the set that are not negotiated yet, because their name is in flight."""
        with self._lock:
            return [work for key, queue in self._queued.items() if key[0] == process_set for work in queue]

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._ended is not None

    def close(self, error: Callable[[Request], Exception]) -> list[Work]:
        """Admit no more works, but raise the ``error`` of their request; returns the works in flight."""
        with self._lock:
            self._ended = self._ended or error
            works = [*self._works.values(), *(work for queue in self._queued.values() for work in queue)]
            if self.cut_off_since is None:
                self.cut_off_since = min((work.since for work in (*works, *self.running) if work.since), default=None)
            self._works.clear()
            self._queued.clear()
            self._rejected.clear()
            return works

    def disown(self, error: Callable[[Request], Exception]) -> None:
        """In a forked child: admit no more works, but raise the ``error`` of their request.

        Takes no lock: the thread that held it at the fork, and would release it, does not exist in the child.
        """
        self._lock = threading.RLock()
        self._ended = self._ended or error
        self._works, self._queued = {}, {}
