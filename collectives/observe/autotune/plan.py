"""The order in which a search tries parameters. Pure: the caller measures each trial and sends its score."""

from __future__ import annotations

import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from collectives.api import Changes
from collectives.observe.autotune.space import Space

FINALISTS = 2
FINAL_ROUNDS = 8
MOST_LOST = 1
MARGIN = 1.01
"""Other parameters than the first ones must be faster by this factor, in all rounds but MOST_LOST: it may be noise."""
FIRST_POSITIONS = ((0.5, 0.6, 0.4, 0.5), (0.9, 0.9, 0.9, 0.8), (0.75, 0.3, 0.6, 0.3), (0.25, 0.1, 0.1, 0.7))
"""Before the search can tell anything it tries positions that are far apart."""


class Search(Protocol):
    """Proposes positions on the knobs of a space, from the scores of earlier ones."""

    def suggest(self) -> list[float]:
        """Positions to try next, each 0 to 1."""

    def register(self, positions: Sequence[float], score: float) -> None:
        """The job had ``score`` at ``positions``; more is better."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The best ``changes``, their ``score``, and how many times as fast as with the first parameters the job is."""

    changes: Changes
    score: float
    gain: float


Plan: TypeAlias = Generator[Changes, float, Choice]
"""Yields the parameters to measure, and takes their score."""


def plan(first: Changes, space: Space, search: Search, warmup: int, most: int) -> Plan:
    """Search ``space`` from the parameters ``first``, in ``most`` trials of its knobs; ``warmup`` trials do not count.

    The first parameters and the best others then compete, in turn, so that a change of the load cannot decide.
    """
    for _ in range(warmup):
        yield first
    base = yield first
    begin, base = yield from _switched(first, base, space)
    trials = yield from _turned(begin, base, space, search, most)
    finalists = _finalists(first, [begin, *trials])
    return (yield from _final(finalists)) if len(finalists) > 1 else Choice(first, base, 1.0)


def _switched(first: Changes, base: float, space: Space) -> Generator[Changes, float, tuple[Changes, float]]:
    """The best of the switches, one after the other, and its score."""
    best = first
    for switch in space.switches:
        changes = {**best, **switch.alternative}
        score = yield changes
        if score > base * MARGIN:
            best, base = changes, score
    return best, base


def _turned(
    begin: Changes, base: float, space: Space, search: Search, most: int
) -> Generator[Changes, float, list[Changes]]:
    """The trials of the knobs, best first."""
    if not space.knobs:
        return []
    search.register(space.positions(begin), 1.0)
    scores: list[tuple[float, Changes]] = []
    for number in range(most):
        known = number < len(FIRST_POSITIONS)
        positions = list(FIRST_POSITIONS[number][: len(space.knobs)]) if known else search.suggest()
        changes = {**begin, **space.changes(positions)}
        score = yield changes
        search.register(positions, score / base)
        scores.append((score, changes))
    return [changes for _, changes in sorted(scores, key=lambda entry: -entry[0])]


def _finalists(first: Changes, candidates: Sequence[Changes]) -> list[Changes]:
    finalists = [first]
    for changes in candidates:
        if changes not in finalists and len(finalists) <= FINALISTS:
            finalists.append(changes)
    return finalists


def _final(finalists: Sequence[Changes]) -> Plan:
    rounds: list[list[float]] = []
    for _ in range(FINAL_ROUNDS):
        rounds.append([])
        for changes in finalists:
            rounds[-1].append((yield changes))
    gains = [_gain(rounds, place) for place in range(len(finalists))]
    best = max(range(len(finalists)), key=gains.__getitem__)
    return Choice(finalists[best], statistics.median(scores[best] for scores in rounds), gains[best])


def _gain(rounds: Sequence[Sequence[float]], place: int) -> float:
    """How many times as fast the finalist of this place is as the first one; 0 if it is not so again and again."""
    ratios = [scores[place] / scores[0] for scores in rounds]
    lost = sum(ratio < MARGIN for ratio in ratios)
    return 0.0 if place and lost > MOST_LOST else statistics.median(ratios)
