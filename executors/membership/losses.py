"""Pure: the workers that a job has lost, and whether others took over their work."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Loss:
    is_explained: bool
    had_part: bool
    later: set[str] = field(default_factory=set)
    """The workers of the worlds that have formed without the lost worker since."""


class Losses:
    """The workers that ended in a world of the job without success.

    A loss is repaired when a world without the lost worker has formed since, and one of its workers was done: it had
    the state of the training, and did the rest of the work.
    """

    def __init__(self) -> None:
        self._lost: dict[str, _Loss] = {}
        self._done: set[str] = set()

    def add(self, worker: str, is_explained: bool, had_part: bool) -> None:
        """``worker`` is lost, and ``had_part`` in the work. Unless the loss ``is_explained``, it may have been done."""
        self._lost[worker] = _Loss(is_explained, had_part)

    def has(self, worker: str) -> bool:
        """Whether ``worker`` is lost."""
        return worker in self._lost

    def explain(self, worker: str) -> None:
        """It is certain that ``worker`` was not done."""
        if worker in self._lost:
            self._lost[worker].is_explained = True

    def formed(self, workers: Collection[str]) -> None:
        """A world of ``workers`` has formed. The report of it may come after the loss of one of them."""
        for worker, loss in self._lost.items():
            if worker in workers:
                loss.had_part, loss.later = True, set()
            else:
                loss.later.update(workers)

    def done(self, worker: str) -> None:
        """``worker`` was done, though it may have been taken for lost."""
        self._lost.pop(worker, None)
        self._done.add(worker)

    @property
    def is_open(self) -> bool:
        """Whether a lost worker may still turn out to have been done."""
        return any(not loss.is_explained for loss in self._lost.values())

    def unrepaired(self) -> tuple[str, ...]:
        """The workers whose losses nobody has repaired, in the order in which they were lost.

        Without those whose work others took over, and were lost with it later: these are the reason.
        """
        lost = {worker: loss for worker, loss in self._lost.items() if loss.had_part}
        found = [worker for worker, loss in lost.items() if loss.later.isdisjoint(self._done)]
        return tuple(worker for worker in found if not lost[worker].later) or tuple(found)
