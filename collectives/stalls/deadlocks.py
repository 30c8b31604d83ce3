"""Calls that wait for each other for ever: of one name and different kinds, or of different names.

Rank 0 may wait in an allreduce that rank 1 does not call before the end of another one, in which it waits for rank 0.

Source: the deadlock of processes that each need all of several resources, as in Chandy, Misra and Haas (1983),
"Distributed deadlock detection", found here by one rank that knows all requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from collectives.api import Operation
from collectives.controller.agreement import Disagreement, with_ranks
from collectives.controller.coordinator import Coordinator
from collectives.controller.kind_mismatch import is_certain
from collectives.controller.waits import Key, Pending, RankStatus, cut
from collectives.stalls.status import StatusTable

_GRADIENT = re.compile(r"(^|[./])(gradient|delta)s?\.")
"""In the names of the collectives of a step, of the optimizers of all frameworks."""
_STEP = re.compile(r"(^|[./])(gradient|delta)s?\.|\.optimizer\.models")
"""In those names, and in those of the comparison of the models of the ranks."""
_SET_CHANGES = (Operation.ADD_PROCESS_SET, Operation.REMOVE_PROCESS_SET)

FEWER = "it has had fewer batches; let each rank call hvd.join() after its last batch"
LEFT_FIT = (
    "it has left fit() of Keras, where hvd.join() has no place; give all ranks the same steps_per_epoch, of a dataset "
    "that repeats, and let callbacks such as EarlyStopping decide alike on all ranks"
)
NO_JOIN = "it has not called hvd.join(), which each rank must call after its last batch"
NO_SET = "it has not made this call, which all ranks must make, also those that are not in the process set"
NOTHING = "it has called no collective; let all ranks make the same calls, whatever their rank is"
OTHER_CALLBACKS = "it has not called {!r}; give fit() the same callbacks and the same number of epochs on all ranks"
OTHER_CALL = "it has not called {!r}; let all ranks make that call, whatever their rank is"
OTHER_EPOCHS = "it has had fewer batches, and last called {!r}; give all ranks the same number of batches and of epochs"

SAME_CALLS = "let all ranks make the same calls in the same order"
SAME_OPTIMIZERS = (
    "let all ranks have the same models, and make, change and step their optimizers, or use their tapes, in the same "
    "order"
)


def remedy_of_calls(names: Iterable[str]) -> str:
    """The change that the script needs where ranks wait for each other in the calls ``names``; without a period."""
    return SAME_OPTIMIZERS if all(map(_STEP.search, names)) else SAME_CALLS


def remedy(last: str, operation: Operation, waits: str, is_in_fit: bool) -> str:
    """The deed of the rank that has ended, "it", and the change that the script needs; without a period.

    ``last`` is the name of the collective that it submitted last, empty for none. The rank that gets the error waits
    for the ``operation`` with the name ``waits``, or comes too late with it, perhaps ``is_in_fit`` of Keras.
    """
    if operation is Operation.JOIN:
        return NO_JOIN
    if operation in _SET_CHANGES:
        return NO_SET
    if not last:
        return NOTHING
    if not _GRADIENT.search(waits):
        return (OTHER_CALLBACKS if is_in_fit else OTHER_CALL).format(waits)
    if is_in_fit:
        return LEFT_FIT
    return FEWER if _GRADIENT.search(last) else OTHER_EPOCHS.format(last)


CALL_MISMATCH = "call"
"""The ``property`` of a MismatchError that ends a deadlock."""
SHOWN_CALLS = 6


class Deadlock(NamedTuple):
    """The tensors ``keys`` wait for each other's ranks; ``why`` tells of the calls of all ranks."""

    keys: tuple[Key, ...]
    why: Disagreement


def suspects(pending: Pending) -> set[int]:
    """The ranks that may be deadlocked: those that wait for each other as far as rank 0 knows. Usually there are none.

    ``pending`` has the tensors that callers wait for.
    """
    called = {rank for waiting in pending.values() for rank in waiting.submitted}
    calls: dict[int, list[Key]] = {}
    for key, waiting in pending.items():
        if not called.issuperset(waiting.missing):
            continue  # it lacks a rank that has made no call
        for rank in waiting.submitted:
            calls.setdefault(rank, []).append(key)
    return _remaining(calls.keys(), lambda rank, ranks: any(_lacks(pending, key, ranks) for key in calls[rank]))


def deadlock(pending: Pending, answers: Iterable[RankStatus]) -> Deadlock | None:
    """The deadlock of ranks whose ``answers`` make it certain; None if there is none.

    Each of these ranks waits on all threads that may make a call. Each tensor that it waits for is in ``pending``, and
    lacks ranks of the deadlock alone. ``answers`` are those given since the last tensor was submitted.
    """
    waits = {each.rank: [(call.process_set, call.name) for call in each.waits] for each in answers if each.is_held}
    held = {
        rank
        for rank, keys in waits.items()
        # A rank that lacks in what it waits for has made that call: rank 0 has yet to hear of it.
        if keys and all(key in pending and rank not in pending[key].missing for key in keys)
    }
    ranks = _remaining(held, lambda rank, ranks: all(_lacks(pending, key, ranks) for key in waits[rank]))
    if not ranks:
        return None
    keys = dict.fromkeys(key for rank in sorted(ranks) for key in waits[rank])
    return Deadlock(tuple(keys), _describe({rank: waits[rank] for rank in sorted(ranks)}))


def _remaining(ranks: Collection[int], stays: Callable[[int, Collection[int]], bool]) -> set[int]:
    """The largest part of ``ranks`` in which each rank ``stays``, given the others that do."""
    found, before = set(ranks), -1
    while len(found) != before:
        before = len(found)
        found = {rank for rank in found if stays(rank, found)}
    return found


def _lacks(pending: Pending, key: Key, ranks: Collection[int]) -> bool:
    """Whether a tensor lacks some of ``ranks``, and no others."""
    missing = pending[key].missing
    return bool(missing) and all(rank in ranks for rank in missing)


def _describe(waits: Mapping[int, Sequence[Key]]) -> Disagreement:
    values = {rank: _calls(keys) for rank, keys in waits.items()}
    listed = with_ranks(values, "; ")
    change = remedy_of_calls(name for keys in waits.values() for _, name in keys)
    text = f"the ranks wait for each other in different calls, and none of them can go on: {listed}; {change}"
    return Disagreement(text, CALL_MISMATCH, tuple(values.items()))


def _calls(keys: Sequence[Key]) -> str:
    shown = [f"{cut(name)!r}" + (f" on process set {set}" if set else "") for set, name in keys[:SHOWN_CALLS]]
    more = len(keys) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


PATIENCE_SECONDS = 1.0
"""Calls that have waited for less are left alone, so that a busy job has hardly any cost."""
ANSWER_SECONDS = 0.5
"""A rank that waits in a call answers within this time; otherwise it gets a few times as long."""
LONGEST_SECONDS = 5.0
"""Then the ranks are asked again."""


class DeadlockDetector:
    """Asks the ranks of such calls where they stand: only they know whether they can still make another call.

    ``statuses`` has the questions and the answers. ``deadline`` is the time of the next look, in monotonic seconds;
    None when callers waited for one tensor or none at the last one.
    """

    def __init__(self, statuses: StatusTable) -> None:
        self._statuses = statuses
        self._asked: float | None = None
        self.deadline: float | None = None

    def look(self, coordinator: Coordinator, now: float) -> None:
        """End the calls of which the ranks have told that it is certain; ask about the others."""
        if self.deadline is None:
            if coordinator.may_wait_for_each_other:
                self.deadline = now + PATIENCE_SECONDS
        elif now >= self.deadline:
            if self._asked is None:
                self._question(coordinator, now)
            else:
                self._judge(coordinator, self._asked, now)

    def _question(self, coordinator: Coordinator, now: float) -> None:
        ranks = _ranks(coordinator, now - PATIENCE_SECONDS)
        for rank in ranks:
            self._statuses.ask((rank,), now)
        self._asked = now if ranks else None
        self._plan(coordinator, now, ANSWER_SECONDS if ranks else PATIENCE_SECONDS)

    def _judge(self, coordinator: Coordinator, asked: float, now: float) -> None:
        for mismatch in coordinator.kind_mismatches(asked):
            if is_certain(mismatch, self._answers(mismatch.submitted, asked)):
                coordinator.fail(mismatch.keys, mismatch.why)
        awaited = coordinator.awaited(asked)
        found = deadlock(awaited, self._answers(suspects(awaited), asked))
        if found is not None:
            coordinator.fail(found.keys, found.why)
        ranks = _ranks(coordinator, asked)
        is_over = len(self._answers(ranks, asked)) == len(ranks) or now >= asked + LONGEST_SECONDS
        self._asked = None if is_over else asked
        self._plan(coordinator, now, PATIENCE_SECONDS if is_over else ANSWER_SECONDS)

    def _answers(self, ranks: Iterable[int], asked: float) -> list[RankStatus]:
        answers = (self._statuses.answer_to(rank, asked) for rank in ranks)
        return [answer for answer in answers if answer is not None]

    def _plan(self, coordinator: Coordinator, now: float, seconds: float) -> None:
        self.deadline = now + seconds if coordinator.may_wait_for_each_other else None


def _ranks(coordinator: Coordinator, before: float) -> list[int]:
    """The ranks in calls that may wait for each other, submitted ``before`` a time; usually there are none."""
    mismatch = {rank for mismatch in coordinator.kind_mismatches(before) for rank in mismatch.submitted}
    return sorted(mismatch | suspects(coordinator.awaited(before)))
