"""The state of a training that survives changes of the ranks."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from hashlib import blake2b
from typing import Any

from collectives import HostsUpdatedInterrupt, InvalidRequestError, override
from hvd_cluster import __version__
from hvd_cluster.core import basics
from hvd_cluster.elastic import session
from hvd_cluster.elastic.parts import Attributes, Part
from hvd_cluster.elastic.recovery import (
    Recovery,
    StateReport,
    check_versions,
    decide,
    difference,
    have_one_layout,
    need_rows,
)
from hvd_cluster.elastic.snapshots import Snapshots
from hvd_cluster.ops.objects import allgather_object, broadcast_object

NO_UPDATE, REMOVED = 0, 1
"""Horovod's codes of a change of hosts; others are 2, added, and 3, both."""


class State:
    """The values that training keeps when ranks change. A subclass has :meth:`save`, :meth:`restore` and :meth:`sync`.

    ``bcast_object`` and ``get_rank`` are functions of a binding; a subclass may use them.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call each of ``callbacks`` when the ranks have changed. All ranks register the same ones.

        ``run`` calls them on all ranks, newcomers, too, when all ranks have one state, and before the training goes
        on. So they may run collectives, such as a call of ``fit``, and call ``rank()`` and ``size()``, to change the
        learning rate or to divide data anew. All ranks get the state of rank 0 afterwards.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks have changed: call :meth:`reset` and the callbacks."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def _has_reset(self) -> bool:
        """Whether :meth:`on_reset` runs code of the user."""
        kind = type(self)
        own = kind.reset is not State.reset or kind.on_reset not in (State.on_reset, ObjectState.on_reset)
        return own or bool(self._reset_callbacks)

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Let the next :meth:`check_host_updates` raise, for tests and for drivers of your own: call it on all ranks.

        ``update_res``: 1 if hosts were only removed, 2 if added, 3 for both. An earlier ``timestamp`` is ignored.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, and go on with other ranks if they have changed. All ranks call it, for example each step.

        Raises HostsUpdatedInterrupt, for ``run``, if they have.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt if the ranks are to change. All ranks call it at the same points."""
        update = self._news()
        if update != NO_UPDATE:
            raise HostsUpdatedInterrupt(skip_sync=update == REMOVED)
        session.check()

    def _news(self) -> int:
        update = NO_UPDATE
        while not self._host_messages.empty():
            timestamp, result = self._host_messages.get()
            if timestamp > self._last_updated_timestamp:
                self._last_updated_timestamp = timestamp
                update |= result
        return update

    def interrupted(self) -> None:
        """A collective failed in the training function: be ready for a :meth:`sync` among other ranks."""
        self.restore()

    def save(self) -> None:
        """Keep the present state."""
        raise NotImplementedError(f"{type(self).__name__} has no save()")

    def restore(self) -> None:
        """Go back to the state that was kept last."""
        raise NotImplementedError(f"{type(self).__name__} has no restore()")

    def sync(self) -> None:
        """Give all ranks one state."""
        raise NotImplementedError(f"{type(self).__name__} has no sync()")

    def reset(self) -> None:
        """Adapt to other ranks, before the callbacks; a subclass may do more than this, which does nothing."""
        return


class ObjectState(State):
    """Keeps its attributes, those of ``kwargs``, which cloudpickle must be able to pickle::

        state = ObjectState(hvd.broadcast_object, hvd.rank, epoch=0, batch=0)

    :meth:`sync` gives all ranks one state. At first it is that of rank 0, and so it is in any sync of ranks that have
    not changed. After a change of ranks, it is the one of the latest commit that any rank has. Where all ranks have it
    already, nothing is sent. Ranks agree by their numbers of commits, so all call :meth:`commit` equally often.

    InvalidRequestError on all ranks if an attribute cannot be pickled, or if the ranks' states have other entries.

    ``lost_commits``: how many commits the last sync had to give up, because no rank could show them any more.
    ``agreed_layout``: the :meth:`layout_digest` of all ranks in the last sync; "" before.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] = broadcast_object,
        get_rank: Callable[[], int] = basics.rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._names: list[str] = []
        self._attributes = Attributes(self._values, self._put)
        self._snapshots = Snapshots(self._parts)
        self._committing = False
        self._synced = False
        self._in_doubt = False
        self._world: weakref.ref[Any] | None = None
        self.lost_commits = 0
        self.agreed_layout = ""
        for name, value in kwargs.items():
            self._adopt(name, value)
        self._snapshots.record(0, full=True)

    def _adopt(self, name: str, value: Any) -> None:
        """A new entry of the state."""
        if hasattr(type(self), name) or name in self.__dict__:
            raise InvalidRequestError(f"a state cannot have an attribute {name!r}, which is its own; use another name")
        self._names.append(name)
        setattr(self, name, value)

    def _values(self) -> Mapping[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _put(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def _parts(self) -> Mapping[str, Part]:
        """In the same order on all ranks."""
        return {"": self._attributes}

    def save(self) -> None:
        """Make a full copy of the present state, which is a commit; :meth:`commit` copies only what it must."""
        self._snapshots.close_cycle(full=not self._committing)

    def commit(self) -> None:
        """The present state counts from now on, see :class:`State`.

        Parameters and the state of optimizers are not copied where that is not needed, see ``steps``: the last full
        copy may be older. A state that a loss finds in the middle of a step, on all ranks, goes back to it, and a
        warning in the log says so.
        """
        self._committing = True
        try:
            self.save()
            self.check_host_updates()
        finally:
            self._committing = False

    @override
    def check_host_updates(self) -> None:
        """The present state counts, as after a commit, if the ranks change here."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            if not self._committing:
                self._snapshots.close_cycle(full=False)
            self._in_doubt = True
            raise

    @override
    def interrupted(self) -> None:
        """Which state counts is decided in :meth:`sync`, so nothing changes yet."""
        self._in_doubt = True

    def restore(self) -> None:
        """Go back to the last commit, or to the last full copy if parameters have changed since; then call sync().

        A copy of which this rank has only a part comes back in sync().
        """
        self._in_doubt = True
        if not self._snapshots.partial():
            self._snapshots.go_back()
        self._forget()

    @override
    def on_reset(self) -> None:
        if not self._is_settled():
            self._in_doubt = True
            self._begin_world()
        super().on_reset()

    def _begin_world(self) -> None:
        self._snapshots.begin_world()
        for part in self._parts().values():
            part.begin_world()

    def _forget(self) -> None:
        for part in self._parts().values():
            part.forget()

    # Agreement.

    def sync(self) -> None:
        """Give all ranks one state. All ranks call it. Raises HorovodInternalError when a rank is lost; call it then
        again.

        After an error of this method a rank still has the state of its last commit or full copy.
        """
        is_settled, is_first = self._is_settled(), not self._synced
        reports = self._reports(is_settled)
        if need_rows(reports):
            self._snapshots.gather_rows()
            reports = self._reports(is_settled)
        recovery = decide(reports)
        if not (is_settled or is_first):
            self._forget()
        self._follow(recovery)
        self.lost_commits = recovery.lost
        self._snapshots.record(
            recovery.commit, recovery.present or is_first or self._snapshots.lacks_copy(recovery.commit)
        )
        self._settle()

    def _settle(self) -> None:
        self._synced, self._in_doubt, self._world = True, False, weakref.ref(basics.engine())

    def _reset_together(self) -> None:
        """The ranks have changed, and have one state: call :meth:`on_reset`, and share what it makes of the state.

        That of rank 0 is a commit then. Heavy values travel only if they may have changed on some rank. All ranks call
        this. It raises as :meth:`sync`.
        """
        tells = all(part.tells for part in self._parts().values())
        if not tells and self._snapshots.copied != self._snapshots.commit:
            self._snapshots.record(self._snapshots.commit, full=True)
        self.on_reset()
        reports = self._reports(is_settled=True, tells=tells)
        recovery = decide(reports)
        if all(report.exact for report in reports):
            for part in self._parts().values():
                part.share_light(recovery.source)
            self._snapshots.close_cycle(full=False)
        else:
            self._follow(recovery)
            self._snapshots.record(recovery.commit, full=True)
        self._settle()

    def _is_settled(self) -> bool:
        """Whether nothing has happened since the last sync that may have made ranks differ."""
        is_new = self._world is None or self._world() is not basics.engine()
        if is_new:
            self._begin_world()
        return not (is_new or self._in_doubt)

    def _reports(self, is_settled: bool, tells: bool = True) -> list[StateReport]:
        """Those of all ranks. They travel as plain data, which ranks of other versions can read.

        ``tells``: whether this rank would know of any change of its state since the last commit.
        """
        layout = self._layout()
        report = self._report(is_settled, _digest(layout))
        found = allgather_object(asdict(replace(report, exact=report.exact and tells)), "state.reports")
        check_versions({rank: each["version"] for rank, each in enumerate(found)})
        reports = [StateReport(**each) for each in found]
        if not have_one_layout(reports):
            layouts = allgather_object(layout, "state.layouts")
            raise InvalidRequestError(difference(dict(enumerate(layouts))) or "the states of the ranks differ")
        self.agreed_layout = reports[0].layout
        return reports

    def _report(self, is_settled: bool, layout: str) -> StateReport:
        snapshots = self._snapshots
        is_exact, partial = snapshots.is_exact, snapshots.partial()
        snapshots.is_unsafe |= not is_exact
        return StateReport(
            rank=basics.rank(),
            commit=snapshots.commit if self._synced else None,
            exact=is_exact and self._synced,
            copy=snapshots.copied if self._synced and not partial else None,
            partial=snapshots.copied if self._synced and partial else None,
            settled=is_settled,
            gives=all(part.gives for part in self._parts().values()),
            layout=layout,
            version=__version__,
        )

    @property
    def _is_complete(self) -> bool:
        """Whether this rank has all of its values, and needs no :meth:`sync` where all ranks have the same commit."""
        return all(part.is_complete and not part.needs_copies for part in self._parts().values())

    def layout_digest(self) -> str:
        """Equal on ranks whose states have the same entries, shapes and types."""
        return _digest(self._layout())

    def _layout(self) -> list[tuple[str, str]]:
        return [entry for part in self._parts().values() for entry in part.layout()]

    def _follow(self, recovery: Recovery) -> None:
        """Have the state of ``recovery``, and give it to the receivers.

        A rank that is lost on the way leaves receivers with values of two states: they are no source any more.
        """
        rank, snapshots = basics.rank(), self._snapshots
        if rank in recovery.receivers:
            snapshots.is_broken = True
        elif rank in recovery.returning:
            snapshots.go_back()
        elif recovery.present:
            snapshots.record(recovery.commit, full=False)
        else:
            snapshots.put_light()
        if recovery.receivers or not self._synced:
            try:
                for part in self._parts().values():
                    part.share(recovery.source)
            finally:
                if rank not in recovery.receivers:  # it has got the values that it had
                    snapshots.confirm()


def _digest(layout: list[tuple[str, str]]) -> str:
    return blake2b(repr(layout).encode(), digest_size=16).hexdigest()
