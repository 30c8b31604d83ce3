"""The names in flight of lists of gradients, which a framework may only know when it runs a graph.

A graph that is built, or a function that is traced, does not run yet, and may run in several worlds. So a bucket has a
*static* name there, of positions: ``gradients.3..0``. When it runs, the :class:`Roster` of its list gives the name in
flight, which has the names of variables on which the ranks agree.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence

from collectives import Engine
from hvd_cluster.comparison.meeting import agreed_names, require_no_swap
from hvd_cluster.comparison.models import Model, Names
from hvd_cluster.comparison.twins import place_of
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet

KEPT = 1024
"""The number of lists that are known; those in graphs are not counted."""
_STATIC = re.compile(r"(gradients?)\.(\d+)(?:\.\.(\d+))?")


def static_name(positions: Sequence[int]) -> str:
    """The name of a bucket of the variables at ``positions``."""
    first, last = positions[0], positions[-1]
    return f"gradient.{first}" if len(positions) == 1 else f"gradients.{first}..{last}"


class Roster:
    """That of the lists of gradients of one ``model``. For any thread.

    ``number`` identifies it in this process; it is a part of graphs.
    """

    def __init__(self, number: int, model: Model, process_set: ProcessSet) -> None:
        self.number = number
        self.model = model
        self._process_set = process_set
        self._names = model.names
        self._first_stamp: str | None = None
        self._may_tag = True
        self._places: dict[str, int] = {}
        self._in_flight: dict[str, str] = {}
        self._world: weakref.ref[Engine] | None = None

    def is_of(self, process_set: ProcessSet) -> bool:
        """Whether it is that of ``process_set``, and not of one that had the same id before."""
        return self._process_set is process_set

    def is_entered(self, engine: Engine) -> bool:
        """Whether the ranks have compared the models in the world of ``engine``."""
        return self._world is not None and self._world() is engine

    def enter(self, model: Model | None = None) -> None:
        """All ranks compare the models, the first time in a world; MismatchError where they differ.

        ``model``: the one in use, which may have another stamp than that of the last graph.
        """
        engine = basics.engine()
        if self.is_entered(engine):
            return
        self._first_stamp, self._may_tag = (model or self.model).stamp, True
        self._places.clear()
        self._in_flight.clear()
        if engine.topology.size > 1:
            agreed = agreed_names(model or self.model, self._known, self._process_set)
            self._names = agreed.names
            self._in_flight.clear()
            if not agreed.is_final:
                return
        self._world = weakref.ref(engine)

    def tag(self, model: Model) -> int:
        """0, but for a model that is like another one that this rank has combined before, and is not the same.

        Ranks that combine different ones of them have different tags: see :meth:`compare_again`.
        """
        if not self._may_tag or model.stamp == self._first_stamp:
            return 0
        if model.stamp not in self._places:
            self._places[model.stamp] = place_of(model.stamp, model.first_shape).number + 1
        return self._places[model.stamp]

    def compare_again(self, model: Model) -> None:
        """The ranks have different tags for ``model``. MismatchError if it is certain that they combine different ones.

        Otherwise ranks have made different numbers of models, and tags have no meaning any more.
        """
        require_no_swap(model, self._process_set)
        self._may_tag = False

    def _known(self) -> list[Model]:
        with _lock:
            return [each.model for each in _rosters.values() if each._process_set is self._process_set]

    @property
    def names(self) -> Names:
        """The names for all ranks, each with its position; before :meth:`enter`, those of this rank."""
        return tuple(f"{position}.{name}" for position, name in enumerate(self._names))

    def name_in_flight(self, static: str) -> str:
        """The name for all ranks of a bucket with the ``static`` name, which others may have extended at its end."""
        name = self._in_flight.get(static)
        if name is None:
            name = self._in_flight[static] = self._name(static)
        return name

    def _name(self, static: str) -> str:
        found = _STATIC.match(static)
        if found is None:
            return static
        kind, first, last = found.groups()
        names = self.names
        return f"{kind}.{names[int(first)]}{f'..{names[int(last)]}' if last else ''}{static[found.end() :]}"


# Owned by this module, held for a look-up.
_lock = threading.Lock()
_rosters: OrderedDict[tuple[int, Model, str], Roster] = OrderedDict()
_numbered: dict[int, Roster] = {}


def roster_of(model: Model, process_set: ProcessSet, in_graph: bool) -> Roster:
    """The roster of ``model``; ``in_graph``: until the end of the process, for :class:`NodeNaming`."""
    key = process_set.process_set_id or 0, model, model.stamp if in_graph else ""
    with _lock:
        roster = _rosters.get(key)
        if roster is None or roster._process_set is not process_set:
            roster = _rosters[key] = Roster(len(_numbered) + 1, model, process_set)
            if len(_rosters) > KEPT:
                _rosters.popitem(last=False)
        if in_graph:
            roster.number = next((number for number, each in _numbered.items() if each is roster), len(_numbered) + 1)
            _numbered[roster.number] = roster
        return roster


class NodeNaming:
    """The name in flight of a node of a graph: ``path``, and what the roster with the ``number`` makes of ``static``.

    A node that has the number 0, or that of another process, has no roster, and the ``first`` name in all worlds.
    """

    def __init__(self, number: int, path: str, static: str) -> None:
        self.first = path + static or None
        self._path = path
        self._static = static
        self._roster = _numbered.get(number)
        self._world: weakref.ref[Engine] | None = None

    def is_done(self, engine: Engine) -> bool:
        """Whether the node has its name in the world of ``engine``."""
        return self._roster is None or (self._world is not None and self._world() is engine)

    def name_in(self, engine: Engine) -> str | None:
        """The name in the world of ``engine``, see :meth:`Roster.enter`."""
        if self._roster is None:
            return self.first
        self._roster.enter()
        if self._roster.is_entered(engine):
            self._world = weakref.ref(engine)
        return self._path + self._roster.name_in_flight(self._static)
