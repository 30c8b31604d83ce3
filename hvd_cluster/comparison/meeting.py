"""Where the ranks of a process set meet before they combine the gradients of a model for the first time in a world.

The name of that exchange is the same for all models. So ranks with different models meet there, and raise one error.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple
from zlib import crc32

import numpy as np

from collectives.api import MismatchError, Operation
from collectives.engine.engine import Engine
from hvd_cluster import basics
from hvd_cluster.comparison.models import Model, Names, Told, crossed, judge
from hvd_cluster.comparison.twins import are_swapped, place_of
from hvd_cluster.objects import allgather_object
from hvd_cluster.operations.arrays import gathered
from hvd_cluster.operations.operands import run
from hvd_cluster.process_sets import ProcessSet

__all__ = ["Agreed", "agreed_names", "require_no_swap"]

NAME = "optimizer.models"
ROUNDS = 40
PAUSE_SECONDS = 0.05
"""Threads of one process may present their models in another order than on other ranks. So ranks that present different
models, which all of them have, meet again up to ROUNDS times, in case other threads come."""


class Agreed(NamedTuple):
    """The names for all ranks. ``is_final``: no rank has joined, which would compare its model later."""

    names: Names
    is_final: bool = True


class Meeting:
    """That of one process set in one world. For any thread."""

    def __init__(self) -> None:
        # Owned by this object, held for a few instructions. Each wait ends with the exchange of the thread that leads.
        self._changed = threading.Condition()
        self._agreed: dict[Model, Agreed] = {}
        self._waiting: Counter[Model] = Counter()
        self._leads = False
        self._crossed = 0

    def compare(self, model: Model, known: Callable[[], Collection[Model]], process_set: ProcessSet) -> Agreed:
        """See :func:`agreed_names`."""
        with self._changed:
            if model in self._agreed:
                return self._agreed[model]
            self._waiting[model] += 1
        try:
            while True:
                agreed = self._wait_for_lead(model) or self._lead(model, known(), process_set)
                if agreed is not None:
                    return agreed
                time.sleep(PAUSE_SECONDS)
        finally:
            with self._changed:
                self._waiting[model] -= 1

    def _wait_for_lead(self, model: Model) -> Agreed | None:
        with self._changed:
            self._changed.wait_for(lambda: model in self._agreed or not self._leads)
            if model not in self._agreed:
                self._leads = True
            return self._agreed.get(model)

    def _lead(self, model: Model, known: Collection[Model], process_set: ProcessSet) -> Agreed | None:
        try:
            return self._exchange(model, known, process_set)
        finally:
            with self._changed:
                self._leads = False
                self._changed.notify_all()

    def _exchange(self, model: Model, known: Collection[Model], process_set: ProcessSet) -> Agreed | None:
        row = np.array([[basics.rank(), model.digest, crc32(model.stamp.encode())]], np.int64)
        rows = run(Operation.ALLGATHER, gathered, row, NAME, process_set)
        is_final = len(rows) == len(basics.engine().process_sets.ranks(process_set.process_set_id or 0))
        if len(set(rows[:, 1].tolist())) == 1:
            if len(set(rows[:, 2].tolist())) > 1:
                require_no_swap(model, process_set)
            agreed = Agreed(model.names, is_final)
            if agreed.is_final:
                self._agreed[model] = agreed
            return agreed
        with self._changed:
            waiting = [each for each, count in self._waiting.items() if count]
        told = dict(allgather_object((basics.rank(), Told(model, waiting, list(known))), f"{NAME}.told", process_set))
        return self._settle(model, told, is_final)

    def _settle(self, model: Model, told: dict[int, Told], is_final: bool) -> Agreed | None:
        judgement = judge(told)
        agreed = {each: Agreed(names, is_final) for each, names in judgement.agreed.items()}
        if is_final:
            self._agreed.update(agreed)
        self._crossed = 0 if judgement.agreed or judgement.error else self._crossed + 1
        if judgement.error:
            raise MismatchError(f"the models of the ranks differ: {judgement.error}")
        if self._crossed == ROUNDS:
            self._crossed = 0
            raise MismatchError(crossed({rank: each.presented.summary for rank, each in told.items()}))
        return agreed.get(model)


def require_no_swap(model: Model, process_set: ProcessSet) -> None:
    """MismatchError where ranks use different models that are alike, each of which another rank has, too."""
    place = place_of(model.stamp, model.first_shape)
    told = dict(allgather_object((basics.rank(), place), f"{NAME}.places", process_set))
    if are_swapped(told):
        texts = {rank: f"{model.summary}, number {each.number} of {each.total}" for rank, each in told.items()}
        raise MismatchError(crossed(texts))


_meetings: weakref.WeakKeyDictionary[Engine, dict[int, Meeting]] = weakref.WeakKeyDictionary()
# Owned by this module, held for a look-up.
_lock = threading.Lock()


def agreed_names(model: Model, known: Callable[[], Collection[Model]], process_set: ProcessSet) -> Agreed:
    """The names of the tensors of ``model`` for all ranks; the first time in a world, the ranks compare theirs.

    All members of ``process_set`` call it, each before it sends anything of ``model``. ``known`` gives the models that
    this rank has. MismatchError on all ranks where their models differ; it names the first difference.
    """
    with _lock:
        meetings = _meetings.setdefault(basics.engine(), {})
        meeting = meetings.setdefault(process_set.process_set_id or 0, Meeting())
    return meeting.compare(model, known, process_set)
