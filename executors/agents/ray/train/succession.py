"""Pure: the worlds of a job whose lost workers have successors, and its end. The number of workers stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from executors.api import Slot, worker_id
from executors.job.worlds import Answer, LastReport, Published, describe

OVER = "all workers have finished"
# The ranks make a last report that got lost so often again, after each loss.
MOST_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Turn:
    """The consequences of an event: the next ``world``, and the ``answers`` to workers that have finished.

    It ``is_early`` if the last report of the workers may still be on its way: call :meth:`Succession.conclude` later.
    """

    world: Published | None = None
    answers: Mapping[str, Answer] = field(default_factory=dict)
    is_early: bool = False


NOTHING = Turn()


@dataclass(frozen=True, slots=True)
class Delivered:
    """The last report that Ray Train has taken of all workers: the digests of ``metrics`` by place, its checkpoint."""

    metrics: tuple[str, ...]
    path: str = ""

    def has(self, place: int, report: LastReport) -> bool:
        """Whether ``report`` of the worker in ``place`` is a part of it."""
        is_same = place < len(self.metrics) and self.metrics[place] == report.metrics
        return is_same and not report.is_left_out and report.path in ("", self.path)


class Succession:
    """The worker in each place, and the present :attr:`world`. The first worker in place ``p`` is on ``hosts[p]``.

    Places stay; ranks do not. Survivors keep the order of their ranks, and their successors come after them, so that
    rank 0 has the state. A worker that has finished waits for an answer: it gives its state to a successor if no other
    worker can, makes its last report again if Ray Train has left it out, or ends. All end together, so that a worker
    with the state is there as long as another one may be lost.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts: dict[str, str] = {}
        self._lost: dict[str, str] = {}
        self._ready: set[str] = set()
        self._cut_off: set[str] = set()
        self._finished: dict[str, LastReport | None] = {}
        self._delivered: Delivered | None = None
        self._repeats = 0
        self._repetitions = 0
        self._is_over = False
        self.workers = [self._name(host) for host in hosts]
        """By their places."""
        self._trained = set(self.workers)
        self.world = Published(0, self._with_hosts(self.workers))

    def slot(self, worker: str) -> Slot:
        """That of ``worker``: in the present world, or in the next one for a successor."""
        return self.world.slots().get(worker) or Published(-1, self._with_hosts(self._next_order())).slots()[worker]

    def lose(self, place: int, text: str) -> None:
        """The worker in ``place`` is gone: ``text`` says how."""
        worker = self.workers[place]
        self._lost.setdefault(worker, text)
        self._finished.pop(worker, None)
        self._repeats = 0

    def succeed(self, place: int, host: str) -> str:
        """A successor has come into ``place``, on ``host``: its name."""
        self.lose(place, "was replaced")
        worker = self.workers[place] = self._name(host)
        return worker

    def ready(self, worker: str) -> Turn:
        """``worker`` waits for its first world."""
        self._ready.add(worker)
        return self._next()

    def cut_off(self, worker: str, round: int) -> Turn:
        """``worker`` has left the world of ``round``, which broke."""
        if round == self.world.round:
            self._cut_off.add(worker)
        return self._next()

    def formed(self, round: int) -> None:
        """All workers of the world of ``round`` have the state."""
        if round == self.world.round:
            self._trained.update(worker for worker, _ in self.world.workers)

    def finished(self, worker: str, round: int, report: LastReport | None) -> Turn:
        """The function of ``worker`` has returned, in the world of ``round``, after its last ``report`` to Ray Train.

        It had the state then, and so all workers of that world did.
        """
        if worker not in self.workers:
            return NOTHING
        self.formed(round)
        self._trained.add(worker)
        self._finished[worker] = report
        return self._next()

    def delivered(self, delivered: Delivered) -> Turn:
        """Ray Train has taken a report of all workers."""
        self._delivered = delivered
        return self._next()

    def conclude(self) -> Turn:
        """A while has passed since a :class:`Turn` that was early."""
        return self._next(is_late=True)

    def change(self, before: Published) -> str:
        """How the workers changed from ``before`` to the present world."""
        return describe(before, self.world, self._lost, {})

    # Decisions.

    def _next(self, is_late: bool = False) -> Turn:
        if self._lost.keys() & set(self.workers):
            return NOTHING
        newcomers = [worker for worker in self.workers if worker not in self._trained]
        if not self._ready.issuperset(newcomers):
            return NOTHING
        if self._is_over:
            return self._turn_away() if newcomers else NOTHING
        active = self._active()
        if newcomers:
            return self._admit(active or self._done(), newcomers)
        if active:
            return self._publish(active) if self._cut_off.issuperset(active) else NOTHING
        return self._end(is_late)

    def _admit(self, stay: Sequence[str], newcomers: Sequence[str]) -> Turn:
        """Workers that train give the newcomers the state; only where there are none, those that have finished do."""
        order = [*stay, *newcomers]
        is_same = order == [worker for worker, _ in self.world.workers] and not self._finished.keys() & set(stay)
        return NOTHING if is_same and not self._cut_off.issuperset(order) else self._publish(order)

    def _turn_away(self) -> Turn:
        """A successor that comes when all have finished has nothing left to do."""
        self.world = Published(self.world.round + 1, text=OVER, is_over=True)
        return Turn(self.world)

    def _end(self, is_late: bool) -> Turn:
        """All have finished: with their last report, or after they have made it once more."""
        reports = [(place, report) for place, worker in enumerate(self.workers) if (report := self._finished[worker])]
        delivered = self._delivered or Delivered(())
        has_all = not self._lost or all(delivered.has(place, report) for place, report in reports)
        if has_all or self._repeats == MOST_REPEATS:
            self._is_over = True
            return self._answer(Answer("end"))
        if not is_late and not any(report.is_left_out for _, report in reports):
            return Turn(is_early=True)
        self._repeats += 1
        self._repetitions += 1
        return self._answer(Answer("report", self._repetitions, source=self.workers[reports[0][0]]))

    def _answer(self, answer: Answer) -> Turn:
        answers = dict.fromkeys(self._finished, answer)
        self._finished.clear()
        return Turn(answers=answers)

    def _publish(self, order: Sequence[str]) -> Turn:
        before, number = self.world, self.world.round + 1
        self.world = Published(number, self._with_hosts(order))
        self._cut_off.clear()
        self.world = Published(number, self.world.workers, text=self.change(before))
        called = [worker for worker in order if worker in self._finished]
        for worker in called:
            del self._finished[worker]
        return Turn(self.world, dict.fromkeys(called, Answer("return", number)))

    # Parts of decisions.

    def _active(self) -> list[str]:
        """The workers with the state that have not finished, in the order of their ranks."""
        return [worker for worker in self._survivors() if worker not in self._finished]

    def _done(self) -> list[str]:
        return [worker for worker in self._survivors() if worker in self._finished]

    def _survivors(self) -> list[str]:
        ranks = [worker for worker, _ in self.world.workers]
        present = [worker for worker in ranks if worker in self.workers]
        others = [worker for worker in self.workers if worker not in present]
        return [worker for worker in (*present, *others) if worker in self._trained]

    def _next_order(self) -> list[str]:
        survivors = self._survivors()
        return [*survivors, *(worker for worker in self.workers if worker not in survivors)]

    def _name(self, host: str) -> str:
        worker = worker_id(len(self._hosts))
        self._hosts[worker] = host
        return worker

    def _with_hosts(self, workers: Sequence[str]) -> tuple[tuple[str, str], ...]:
        return tuple((worker, self._hosts[worker]) for worker in workers)
