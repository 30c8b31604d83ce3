"""Where the ranks of a process set meet before they combine the gradients of a model for the first time in a world.

The name of that exchange is the same for all models. So ranks with different models meet there, and raise one error.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import numpy as np

from collectives import CALL_MISMATCH, Engine, MismatchError, Operation
from hvd_cluster.comparison.models import Model, Names, Told, crossed, difference, entry_of, judge
from hvd_cluster.comparison.twins import ModelPlace, are_swapped, place_of
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.ops.arrays import gathered
from hvd_cluster.ops.objects import allgather_object
from hvd_cluster.ops.refused_calls import refusing
from hvd_cluster.ops.submission import run

T = TypeVar("T")


def require_same(model: Model, call: str, process_set: ProcessSet) -> Names:
    """The names of the tensors of ``model`` for all ranks, which are those of the first rank.

    MismatchError on all ranks where their models differ; it names the first difference. ``call`` is the name of the
    function.
    """
    row = np.array([[basics.rank(), model.digest]], np.int64)
    rows = run(Operation.ALLGATHER, gathered, row, call, process_set)
    if len(set(rows[:, 1].tolist())) == 1:
        return model.names
    models = dict(allgather_object((basics.rank(), model), f"{call}.lists", process_set))
    error = difference(models)
    if error is not None:
        raise MismatchError(f"{call}: the tensors of the ranks differ: {error}")
    return models[min(models)].names


def refusing_list(call: str, process_set: ProcessSet) -> AbstractContextManager[None]:
    """Around what comes before :func:`require_same`: if this rank refuses ``call``, it also fails on the others."""
    return refusing(Operation.ALLGATHER, call, process_set)


def matched(tensors: Sequence[tuple[Any, T]], call: str, process_set: ProcessSet) -> list[tuple[str, T]]:
    """``tensors`` in the order in which all ranks give them, with the names for all ranks; raises as above.

    They come with their names, by which they are matched, or with numbers, their positions.
    """
    is_named = all(isinstance(name, str) for name, _ in tensors)
    ordered = sorted(tensors, key=itemgetter(0)) if is_named else tensors
    model = Model(tuple(entry_of(str(name), tensor) for name, tensor in ordered))
    names = require_same(model, call, process_set)
    return [(name, tensor) for name, (_, tensor) in zip(names, ordered, strict=True)]


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
        self._waiting: dict[object, Model] = {}
        self._places: dict[str, ModelPlace] = {}
        self._leads = False
        self._crossed = 0

    def compare(self, model: Model, known: Callable[[], Collection[Model]], process_set: ProcessSet) -> Agreed:
        with self._changed:
            if model in self._agreed:
                return self._agreed[model]
            self._waiting[me := object()] = model
        try:
            while True:
                agreed = self._wait_for_lead(model) or self._lead(model, known(), process_set)
                if agreed is not None:
                    return agreed
                time.sleep(PAUSE_SECONDS)
        finally:
            with self._changed:
                del self._waiting[me]

    def _wait_for_lead(self, model: Model) -> Agreed | None:
        with self._changed:
            self._changed.wait_for(lambda: model in self._agreed or not self._leads)
            if model not in self._agreed:
                self._leads = True
            return self._agreed.get(model)

    def _lead(self, model: Model, known: Collection[Model], process_set: ProcessSet) -> Agreed | None:
        try:
            return self._exchange(model, known, process_set)
        except MismatchError as error:
            if error.property == CALL_MISMATCH:  # the others wait for gradients, and would wait for more of them
                basics.engine().abort(error)
            raise
        finally:
            with self._changed:
                self._leads = False
                self._changed.notify_all()

    def _exchange(self, model: Model, known: Collection[Model], process_set: ProcessSet) -> Agreed | None:
        row = np.array([[basics.rank(), model.digest, crc32(model.stamp.encode())]], np.int64)
        rows = run(Operation.ALLGATHER, gathered, row, NAME, process_set)
        is_final = len(rows) == len(basics.engine().process_sets.ranks(process_set.process_set_id or 0))
        with self._changed:
            waiting = list(self._waiting.values())
        if len(set(rows[:, 1].tolist())) == 1:
            if len(set(rows[:, 2].tolist())) > 1 and not self._have_same_twin(model, waiting, process_set):
                return None
            agreed = Agreed(model.names, is_final)
            if agreed.is_final:
                self._agreed[model] = agreed
            return agreed
        told = Told(model, list(dict.fromkeys(waiting)), list(known))
        return self._settle(model, dict(allgather_object((basics.rank(), told), f"{NAME}.told", process_set)), is_final)

    def _have_same_twin(self, model: Model, waiting: Sequence[Model], process_set: ProcessSet) -> bool:
        """Whether all ranks wait for one of the models that are alike; if not, other threads may still come."""
        own = [model, *(each for each in waiting if each == model)]
        for each in own:
            if each.stamp not in self._places:
                self._places[each.stamp] = place_of(each.stamp, each.first_shape)
        places = [self._places[each.stamp] for each in own]
        told = dict(allgather_object((basics.rank(), places), f"{NAME}.places", process_set))
        presented = {rank: each[0] for rank, each in told.items()}
        if not are_swapped(presented) or set.intersection(*map(set, told.values())):
            self._crossed = 0
            self._places.clear()
            return True
        self._note_crossed({rank: _described(model, each) for rank, each in presented.items()})
        return False

    def _note_crossed(self, used: Mapping[int, str]) -> None:
        self._crossed += 1
        if self._crossed == ROUNDS:
            self._crossed = 0
            self._places.clear()
            raise MismatchError(crossed(used))

    def _settle(self, model: Model, told: dict[int, Told], is_final: bool) -> Agreed | None:
        judgement = judge(told)
        agreed = {each: Agreed(names, is_final) for each, names in judgement.agreed.items()}
        if is_final:
            self._agreed.update(agreed)
        if judgement.agreed or judgement.error:
            self._crossed = 0
        else:
            self._note_crossed({rank: each.presented.summary for rank, each in told.items()})
        if judgement.error:
            raise MismatchError(f"the models of the ranks differ: {judgement.error}")
        return agreed.get(model)


def require_no_swap(model: Model, process_set: ProcessSet) -> None:
    """MismatchError where ranks use different models that are alike, each of which another rank has, too."""
    place = place_of(model.stamp, model.first_shape)
    told = dict(allgather_object((basics.rank(), place), f"{NAME}.places", process_set))
    if are_swapped(told):
        raise MismatchError(crossed({rank: _described(model, each) for rank, each in told.items()}))


def _described(model: Model, place: ModelPlace) -> str:
    return f"{model.summary}, number {place.number} of {place.total}"


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


def can_overlap(process_set: ProcessSet) -> bool:
    """Whether some rank has a core on which gradients travel during backward. All ranks call it, and get one answer."""
    patience = np.array([basics.engine().patient])
    return not run(Operation.ALLGATHER, gathered, patience, f"{NAME}.cores", process_set).all()


class Comparison:
    """That of one owner of a list of tensors, once in a world. For one thread."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._world: Callable[[], Engine | None] = lambda: None

    @property
    def is_over(self) -> bool:
        """Whether the ranks have compared their lists in this world, or this rank has nothing to compare."""
        return self._world() is basics.engine() or not self._process_set.included() or self._process_set.size() == 1

    def run(self, tensors: Sequence[tuple[str, Any]]) -> None:
        """Compare ``tensors``, which come with their names; raises as :func:`agreed_names`."""
        model, engine = Model(tuple(entry_of(name, tensor) for name, tensor in tensors)), basics.engine()
        if agreed_names(model, lambda: [model], self._process_set).is_final:
            self._world = weakref.ref(engine)
