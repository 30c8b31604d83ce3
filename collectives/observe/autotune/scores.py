"""The speed of a job under its present parameters, from the batches that start. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable

SETTLING_STEPS = 3
"""Steps after a change that do not count: the ranks learn again which tensors come together."""
MICROSECONDS = 1e6
MOST_NAMES = 100_000
"""If more names come without one that repeats often enough, the count starts again."""


class Scores:
    """A score is the median of ``samples`` samples, in bytes per microsecond.

    A sample lasts until any tensor has come ``steps`` times.
    """

    def __init__(self, steps: int, samples: int) -> None:
        self._steps = steps
        self._samples = samples
        self.restart()

    def restart(self) -> None:
        """The parameters have changed: drop the measurements."""
        self._rates: list[float] = []
        self._begin: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._counts: Counter[str] = Counter()
        self._bytes = 0

    def start(self, names: Iterable[str], nbytes: int, time: float) -> float | None:
        """A batch of ``names``, with ``nbytes``, starts at ``time``, in seconds. Returns a score that is complete."""
        score = None
        if not nbytes:
            return None
        if self._is_complete(names):
            score = self._complete(time)
            self._begin = time
            self._clear()
        elif len(self._counts) > MOST_NAMES:
            self.restart()
        self._bytes += nbytes
        self._counts.update(names)
        return score

    def _is_complete(self, names: Iterable[str]) -> bool:
        steps = SETTLING_STEPS if self._begin is None else self._steps
        return any([self._counts[name] >= steps for name in names])

    def _complete(self, time: float) -> float | None:
        if self._begin is None:
            return None
        self._rates.append(self._bytes / max(1e-9, time - self._begin) / MICROSECONDS)
        if len(self._rates) < self._samples:
            return None
        score = statistics.median(self._rates)
        self._rates.clear()
        return score
