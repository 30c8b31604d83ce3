"""Events of the engine, as values. Timeline, metrics and the like subscribe; the engine knows none of them.

``time`` is ``time.monotonic()`` in seconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, get_args

from collectives.api import Parameters
from collectives.stalls.stragglers import Straggler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A tensor was submitted on this rank; ``nbytes`` are its bytes here."""

    name: str
    process_set: int
    operation: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    time: float


@dataclass(frozen=True, slots=True)
class Heard:
    """On rank 0: the coordinator learned that ``ranks`` have submitted a tensor; ``cached``: by its id alone.

    The coordinator does not hear of tensors that bypass it, so they have no such event.
    """

    name: str
    process_set: int
    ranks: tuple[int, ...]
    cached: bool
    time: float


@dataclass(frozen=True, slots=True)
class Decided:
    """This rank knows that a batch will run: on rank 0 since it was decided, elsewhere since the message came.

    ``batch`` is the number of the batch, the same on all ranks; in later events, too.
    """

    batch: int
    names: tuple[str, ...]
    process_set: int
    time: float


@dataclass(frozen=True, slots=True)
class Started:
    """A batch of fused tensors begins on this rank, on the backend called ``backend``.

    ``version`` is that of the :class:`collectives.api.Parameters` in use. A join and a change of the process
    sets are decided, but neither started nor finished: they run on no backend.
    """

    batch: int
    names: tuple[str, ...]
    process_set: int
    operation: str
    nbytes: int
    backend: str
    version: int
    time: float


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a batch inside of the backend: ``calls`` between ``time`` and ``end``, which took ``seconds`` together.

    A batch that goes through a pipeline in many pieces has two such events for each part: the first call, in which a
    rank that is late shows, and all others. Events of several parts overlap. They are published when the batch is over.
    In a bypass, a rank copies its data in and waits for the other ranks before the batch is decided: these phases begin
    before the batch does.
    """

    batch: int
    name: str
    time: float
    end: float
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The batch is done on this rank."""

    batch: int
    names: tuple[str, ...]
    process_set: int
    time: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A tensor ended with ``error`` on this rank, in the batch of this number, None if no batch with it had started."""

    batch: int | None
    name: str
    process_set: int
    error: Exception
    time: float


@dataclass(frozen=True, slots=True)
class Switched:
    """This rank uses new ``parameters`` from the batch of this number on, as all members of its process set do."""

    batch: int
    parameters: Parameters
    time: float


@dataclass(frozen=True, slots=True)
class Stalled:
    """A tensor has waited for so many ``seconds`` that a report about it was due.

    ``missing`` are the ranks that have not submitted it, as far as this rank knows: rank 0 knows all of them, as do
    ranks that wait in a bypass. Other ranks know none, or rank 0 when it does not answer.
    """

    name: str
    process_set: int
    missing: tuple[int, ...]
    seconds: float
    time: float


@dataclass(frozen=True, slots=True)
class Straggling:
    """On rank 0: other ranks wait for ``straggler`` again and again, or no longer, if that ``is_over``."""

    straggler: Straggler
    is_over: bool
    time: float


@dataclass(frozen=True, slots=True)
class Sent:
    """A control message, such as a ``Ready``, left for ``ranks``; ``nbytes`` is its size, once for all of them."""

    message: str
    ranks: tuple[int, ...]
    nbytes: int
    time: float


@dataclass(frozen=True, slots=True)
class Received:
    """A control message came from ``rank``, the lowest of several for which its host sent it."""

    message: str
    rank: int
    nbytes: int
    time: float


Event: TypeAlias = (
    Submitted
    | Heard
    | Decided
    | Started
    | Phase
    | Finished
    | Failed
    | Switched
    | Stalled
    | Straggling
    | Sent
    | Received
)


Subscriber: TypeAlias = Callable[[Event], None]
EVERY_KIND: frozenset[type] = frozenset(get_args(Event))


class EventStream:
    """Hands each event to its subscribers, on the thread where it happened.

    A subscriber that raises is removed, and logged once: an observer never harms the job. Only events of the kinds that
    are ``wanted`` need to be built.
    """

    def __init__(self) -> None:
        # Owned by the stream, held for a few instructions while the subscribers change. Reentrant, because a signal
        # handler may publish.
        self._changing = threading.RLock()
        self._subscribers: tuple[tuple[Subscriber, frozenset[type]], ...] = ()
        self._of_kind: Mapping[type, Sequence[Subscriber]] = {}
        self.wanted: frozenset[type] = frozenset()

    def subscribe(self, subscriber: Subscriber, kinds: Iterable[type] = EVERY_KIND) -> Callable[[], None]:
        """Call ``subscriber`` for every event of ``kinds`` from now on; the returned function ends that."""
        with self._changing:
            self._set((*self._subscribers, (subscriber, frozenset(kinds))))

        def end() -> None:
            self._remove(subscriber)

        return end

    def _set(self, subscribers: tuple[tuple[Subscriber, frozenset[type]], ...]) -> None:
        self._subscribers = subscribers
        kinds = {kind for _, wanted in subscribers for kind in wanted}
        self._of_kind = {kind: [each for each, wanted in subscribers if kind in wanted] for kind in kinds}
        self.wanted = frozenset(kinds)

    def publish(self, event: Event) -> None:
        """Hand ``event`` to all that have subscribed to its kind."""
        for subscriber in self._of_kind.get(type(event), ()):
            try:
                subscriber(event)
            except Exception:
                if self._remove(subscriber):
                    logger.exception("event subscriber %r failed and is removed", subscriber)

    def _remove(self, subscriber: Subscriber) -> bool:
        """Whether ``subscriber`` was still there: it may raise on several threads at once."""
        with self._changing:
            left = tuple(entry for entry in self._subscribers if entry[0] is not subscriber)
            was_there = len(left) < len(self._subscribers)
            self._set(left)
            return was_there
