"""The last commit of a state, its last full copy, and the steps since."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from collectives import NotInitializedError
from hvd_cluster.core import basics
from hvd_cluster.elastic.parts import Part
from hvd_cluster.elastic.recovery import RowReport, senders_of_rows
from hvd_cluster.elastic.steps import Cycle, Marks, needs_copy
from hvd_cluster.ops.objects import allgather_object
from hvd_cluster.ops.rank_copies import Kept

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Copy:
    """A full copy of ``commit``, made ``at`` this time; it took ``seconds``."""

    commit: int
    light: Mapping[str, Any]
    heavy: Mapping[str, Any]
    at: float
    seconds: float


class Snapshots:
    """For the state that has the ``parts``, by name. ``commit`` is the number of its last commit.

    ``is_broken``: the present values are those of no commit, because they came in part from another rank.
    ``is_unsafe``: the last cycle ended, or was cut off, in a way that needs a full copy.
    """

    def __init__(self, parts: Callable[[], Mapping[str, Part]]) -> None:
        self.commit = 0
        self.is_broken = False
        self.is_unsafe = False
        self._parts = parts
        self._light: Mapping[str, Any] = {}
        self._copy: _Copy | None = None
        self._cycle = Cycle(Marks(0, 0))

    @property
    def copied(self) -> int | None:
        """The commit of the full copy."""
        return None if self._copy is None else self._copy.commit

    def partial(self) -> dict[str, Kept]:
        """The values of the full copy of which this rank has only some rows, by part."""
        heavy = {} if self._copy is None else self._copy.heavy
        return {
            name: kept
            for name, part in self._parts().items()
            if name in heavy and (kept := part.partial(heavy[name])) is not None
        }

    def gather_rows(self) -> None:
        """Make the latest copy whole that all ranks have together. A collective, which changes no present value."""
        partial, rows = self.partial(), {name: part.rows() for name, part in self._parts().items()}
        copies = {name: kept.id for name, kept in partial.items()}
        own = RowReport(self.copied or 0, copies, {name: frozenset(each) for name, each in rows.items()})
        found = senders_of_rows(allgather_object(own, "state.rows_held"))
        if found is None:
            return
        commit, senders = found
        given = {(name, row): rows[name][row] for (name, row), rank in senders.items() if rank == basics.rank()}
        received = {key: row for each in allgather_object(given, "state.rows") for key, row in each.items()}
        for name, kept in partial.items() if self.copied == commit else ():
            kept.add({row.position: data for (part, row), data in received.items() if part == name})

    @property
    def is_exact(self) -> bool:
        """Whether the present state is that of the last commit, but for light values, which it has."""
        now = self._marks()
        return not self.is_broken and self._is_complete and self._cycle.is_untouched(now)

    @property
    def _is_complete(self) -> bool:
        return all(part.is_complete for part in self._parts().values())

    @property
    def _needs_copies(self) -> bool:
        return any(part.needs_copies for part in self._parts().values())

    def lacks_copy(self, commit: int) -> bool:
        """Whether a full copy must be made when ``commit`` comes from a sync."""
        if self.copied is None or self.copied > commit:
            return True
        return (self.is_unsafe or self._needs_copies) and self.copied != commit

    def _marks(self) -> Marks:
        versions = sum(part.versions() for part in self._parts().values())  # waits for a step that still runs
        return Marks(_batches(), versions)

    def step_began(self, in_graph: bool = False) -> None:
        """An optimizer is about to change parameters.

        ``in_graph``: on a thread of a framework that runs a graph, and must not be asked for versions there.
        """
        now = replace(self._cycle.start, batches=_batches()) if in_graph else self._marks()
        self._cycle = self._cycle.step_began(now)

    def replaced(self, *names: str) -> None:
        """The parts ``names`` have other objects now, which take the place of the old ones in the copies, too."""
        copy, parts = self._copy, self._parts()
        self._cycle = Cycle(Marks(-1, -1))
        if copy is not None:
            light = {name: part.light() for name, part in parts.items() if name in names}
            heavy = {name: part.heavy(None) for name, part in parts.items() if name in names}
            self._light = {**self._light, **light}
            self._copy = replace(copy, light={**copy.light, **light}, heavy={**copy.heavy, **heavy})

    def begin_world(self) -> None:
        """The numbers of batches start again."""
        self._cycle = self._cycle.without_batches()

    def confirm(self) -> None:
        """The present state is still that of the last commit, although its versions have moved."""
        self._cycle = Cycle(self._marks())

    def close_cycle(self, full: bool) -> None:
        """The next commit: the present state. With a copy if ``full``, or if it may be needed.

        Raises the errors of :meth:`Part.secure` and :meth:`Part.light`; nothing changes then.
        """
        for part in self._parts().values():
            part.secure()
        now = self._marks()
        survives = all(part.survives for part in self._parts().values())
        self.is_unsafe = not (survives and self._cycle.is_safe(now))
        is_copied = self._cycle.is_untouched(now) and self.copied == self.commit
        is_needed = self._needs_copies or self._needs_copy(self.commit + 1)
        self.record(self.commit + 1, full or is_needed)
        if is_copied and self._copy is not None:  # that of the commit before has the same heavy values
            self._copy = replace(self._copy, commit=self.commit, light=self._light, at=time.perf_counter())

    def _needs_copy(self, commit: int) -> bool:
        copy = self._copy
        if copy is None:
            return True
        cycle_seconds = (time.perf_counter() - copy.at) / max(1, commit - copy.commit)
        return needs_copy(commit, copy.commit, not self.is_unsafe, copy.seconds, cycle_seconds)

    def record(self, commit: int, full: bool) -> None:
        """The present state is that of ``commit``. Raises the errors of :meth:`Part.light`; nothing changes then."""
        parts = self._parts()
        light = {name: part.light() for name, part in parts.items()}
        self.commit, self._light, self.is_broken = commit, light, False
        if full or any(part.keeps_one_copy for part in parts.values()):
            self._make_copy(parts, light)
        elif self._copy is not None and self._copy.commit > commit:  # of commits that are lost
            self._copy = None
        self._cycle = Cycle(self._marks())

    def _make_copy(self, parts: Mapping[str, Part], light: Mapping[str, Any]) -> None:
        earlier, self._copy = {} if self._copy is None else self._copy.heavy, None
        begin = time.perf_counter()
        included = [each for part in parts.values() for each in part.included()]
        for part in parts.values():
            part.leave_out(included)
        heavy = {name: part.heavy(earlier.get(name)) for name, part in parts.items()}
        now = time.perf_counter()
        self._copy = _Copy(self.commit, light, heavy, now, now - begin)

    def go_back(self) -> None:
        """Go back to the last commit: to the full copy, unless nothing was touched since."""
        if self.is_exact:
            self.put_light()
            return
        if self._copy is not None and self.commit > self._copy.commit:
            logger.warning(
                "the state goes back from commit %d to the full copy of commit %d: the steps in between are lost",
                self.commit,
                self._copy.commit,
            )
        self.put_copy()

    def put_light(self) -> None:
        """Give all light values those of the last commit."""
        for name, part in self._parts().items():
            if name in self._light:
                part.put_light(self._light[name])

    def put_copy(self) -> None:
        """Go back to the full copy, whose commit is the last one then. Does nothing without a copy."""
        copy = self._copy
        if copy is None:
            return
        self.is_broken = True
        for name, part in self._parts().items():
            if name in copy.light:
                part.put_heavy(copy.heavy[name])
                part.put_light(copy.light[name])
        self.commit, self._light, self.is_broken = copy.commit, copy.light, False
        self._cycle = Cycle(self._marks())


def _batches() -> int:
    """0 in a world of one, where no other rank can be lost, and no engine."""
    try:
        engine = basics.engine()
    except NotInitializedError:
        return 0
    return engine.batches if engine.topology.size > 1 else 0
