"""The interface of deciders: ways for the ranks to decide which tensors run next, in one order on all ranks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from collectives.api import Request
from collectives.backends.base import Backend
from collectives.completion import Completion
from collectives.engine.execution import execute
from collectives.engine.reporter import TrialReporter
from collectives.engine.work import Work
from collectives.planning.messages import Response
from collectives.planning.worker import Batch, Refusal, Worker

__all__ = ["Attempt", "Decided", "Decider", "Meanwhile", "Outer", "Trial"]

Meanwhile = Callable[[Sequence[int]], bool]
"""Called every few milliseconds while a trial waits, with the ranks that have not entered its round yet. It returns
whether this rank has other work. It does not raise: an end of the engine aborts the backends instead."""


Follow = Callable[[Completion, Sequence[Work], int, Backend], None]
"""The end of an operation that has begun, its works, the number of its batch, and its backend."""


class Decided:
    """Batches that will run on all of their ranks and have not run on this rank, in order.

    ``since`` is when the first of them was decided, in seconds of ``time.monotonic()``.
    """

    def __init__(self) -> None:
        self.batches: deque[Batch] = deque()
        self.since = 0.0

    def __bool__(self) -> bool:
        return bool(self.batches)

    def add(self, batches: Iterable[Batch]) -> None:
        """Append ``batches``."""
        if not self.batches:
            self.since = time.monotonic()
        self.batches.extend(batches)


class Attempt:
    """The argument of a trial: the works of each batch, and how to run them.

    ``follow`` is called with each batch that all ranks run, when it has begun. ``reporter`` tells observers about the
    batches; None where there are no observers. ``meanwhile`` should be called every few milliseconds until it is known
    whether all ranks run the trial. ``begun`` are the operations that have begun and that nobody follows yet.
    """

    __slots__ = ("_agreed", "_follow", "_reporter", "backend", "batches", "begun", "first", "meanwhile", "works")

    def __init__(
        self,
        first: int,
        batches: Sequence[Sequence[Response]],
        works: Sequence[Sequence[Work]],
        backend: Backend,
        follow: Follow,
        reporter: TrialReporter | None,
        meanwhile: Meanwhile,
    ) -> None:
        self.first = first
        self.batches = batches
        self.works = works
        self.backend = backend
        self.meanwhile = meanwhile
        self._follow = follow
        self._reporter = reporter
        self._agreed = False
        self.begun: list[tuple[Completion, Sequence[Work], int]] = []

    def started(self) -> None:
        """All ranks run the trial. Must be called once, as soon as that is known."""
        self._agreed = True
        if self._reporter is not None:
            self._reporter.agreed(self.works)

    def run(self) -> None:
        """Begin all batches; errors of the backend propagate. A batch may be over before the next one begins."""
        for number, (works, responses) in enumerate(zip(self.works, self.batches, strict=True), self.first):
            if self._reporter is not None:
                self._reporter.begin(number, works)
            self.begun.append((execute(works, responses, self.backend), works, number))
            if self._agreed:
                self.follow()

    def follow(self) -> None:
        """All ranks run the batches that have begun."""
        begun, self.begun = self.begun, []
        for completion, works, number in begun:
            self._follow(completion, works, number, self.backend)


class Trial(ABC):
    """Batches of one process set that run now if all of its ranks try the same; if not, nothing changes."""

    first: int
    """The number of the first batch, the same on all ranks; the others follow."""
    batches: Sequence[Sequence[Response]]

    @abstractmethod
    def run(self, attempt: Attempt) -> bool:
        """Run the batches and set the outputs of their works; return whether they ran, on all ranks or on none.

        No destination may be written before all ranks are known to run the trial. Errors of the backend propagate.
        """


class Decider(ABC):
    """Decides which tensors run next. For the thread that drives the engine, one at a time.

    The deciders of a rank form a chain: each passes what it does not decide to its fallback (:class:`Outer`). The
    exchange knows the outermost only. In each step, it calls :meth:`next` until that returns None, then receives
    messages, and runs the batches in ``decided``.

    All deciders of a rank share ``worker``, which records the tensors that this rank submits.
    """

    def __init__(self, worker: Worker, decided: Decided) -> None:
        self.worker = worker
        self.decided = decided

    def submit(self, request: Request, urgent: bool) -> None:
        """A tensor is ready on this rank; ``urgent`` when a caller waits for it."""
        self.worker.submit(request, urgent)

    def reject(self, request: Request, reason: str) -> None:
        """A call failed on this rank because of its arguments: members that submit the tensor must not wait for it."""
        self.worker.reject(request, reason)

    def abandon(self, key: tuple[int, str]) -> Refusal | None:
        """This rank does not want a tensor any more that it has submitted. Returns its end, if that has come."""
        return self.worker.abandon(key)

    def urge(self, key: tuple[int, str]) -> None:
        """A caller waits for a tensor that was submitted earlier; one that is not in flight any more is ignored."""
        self.worker.urge(key)

    def repeat(self, request: Request) -> Trial | None:
        """The trial of ``request`` alone, which a caller waits for and which was not submitted; None if there is none.

        There is one only if this rank submitted the same request before, and has nothing else to decide. If the trial
        does not run, the request must be submitted.
        """
        return None

    @abstractmethod
    def next(self) -> Trial | None:
        """The trial to run now, or None.

        When there is none, the coordinator has all news of this rank, or a decider holds tensors back that no caller
        waits for.
        """

    @abstractmethod
    def decline(self) -> None:
        """Return no trial until the ranks begin again together: this rank has a message for the coordinator.

        Must also be called after a trial of :meth:`next` that did not run.
        """

    @abstractmethod
    def ran(self, batch: Batch) -> None:
        """The decided ``batch`` has run on this rank."""


class Outer(Decider):
    """A decider with a ``fallback``, to which it passes everything unless a subclass does otherwise."""

    def __init__(self, fallback: Decider) -> None:
        super().__init__(fallback.worker, fallback.decided)
        self.fallback = fallback

    def next(self) -> Trial | None:
        """See :class:`Decider`."""
        return self.fallback.next()

    def decline(self) -> None:
        """See :class:`Decider`."""
        self.fallback.decline()

    def ran(self, batch: Batch) -> None:
        """See :class:`Decider`."""
        self.fallback.ran(batch)
