"""Operations in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from collectives.api import HorovodInternalError, InvalidRequestError
from collectives.engine.work import Work
from hvd_cluster.core import basics

Finish: TypeAlias = Callable[[Work], Any]
"""The user's result of a finished work."""
Kind: TypeAlias = Callable[[Iterable[Any]], Any]
"""Makes a list or a tuple of the results of a group."""


class Handle:
    """An operation in flight; give it to :func:`poll` and :func:`synchronize`."""

    __slots__ = ("_pending",)

    def __init__(self, work: Work, finish: Finish) -> None:
        self._pending: tuple[Work, Finish] | None = work, finish

    def is_done(self) -> bool:
        """Whether the operation has a result or an error."""
        if self._pending is None:
            return True
        work, _ = self._pending
        return (work.done or basics.engine().poll(work)) and _has_ended(work)

    def wait(self) -> None:
        """Return when the operation is done; raises its error."""
        if self._pending is None:
            return
        work, _ = self._pending
        if work.done:
            work.outcome()
        else:
            basics.engine().synchronize(work)

    def take(self) -> Any:
        """The result at the first call, which lets go of all tensors; None afterwards."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        work, finish = pending
        return finish(work)


def _has_ended(work: Work) -> bool:
    """Whether the device does not work on it any more; an error there is for those who synchronize."""
    try:
        return work.end.is_done
    except HorovodInternalError:
        return True


class HandleGroup:
    """The operations of a group in flight; :func:`synchronize` gives the result of each of them, in ``kind``."""

    __slots__ = ("_handles", "_kind")

    def __init__(self, handles: Sequence[Handle], kind: Kind) -> None:
        self._handles: Sequence[Handle] | None = handles
        self._kind = kind

    def is_done(self) -> bool:
        """Whether all operations are done."""
        return all([handle.is_done() for handle in self._handles or ()])

    def wait(self) -> None:
        """Return when all operations are done; raises the error of the group."""
        handles = self._handles or ()
        try:
            for handle in handles:
                handle.wait()
        except HorovodInternalError:
            for handle in handles:
                with suppress(HorovodInternalError):  # the names must be free
                    handle.wait()
            raise

    def take(self) -> Any:
        """The results at the first call; None afterwards."""
        handles, self._handles = self._handles, None
        return None if handles is None else self._kind(handle.take() for handle in handles)


def poll(handle: Handle | HandleGroup) -> bool:
    """Whether :func:`synchronize` would return at once; InvalidRequestError if it is no handle."""
    _require_handle(handle)
    return handle.is_done()


def synchronize(handle: Handle | HandleGroup) -> Any:
    """Wait for the operation; its tensor, (tensor, received_splits) for alltoall, or the tensors of a group.

    None for a handle that was synchronized before.
    """
    _require_handle(handle)
    handle.wait()
    return handle.take()


def run_all(starts: Iterable[Callable[[], Handle | HandleGroup]]) -> list[Any]:
    """Call all ``starts``, and then wait for what they have started; returns the results.

    One that is refused keeps no other from its start: the other ranks wait for these. Raises the first refusal, or
    else the first error, when nothing is in flight any more: all names are free.
    """
    handles: list[Handle | HandleGroup] = []
    errors: list[Exception] = []
    for start in starts:
        try:
            handles.append(start())
        except (InvalidRequestError, HorovodInternalError) as error:
            errors.append(error)
    results = []
    for handle in handles:
        try:
            results.append(synchronize(handle))
        except HorovodInternalError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def _require_handle(handle: Any) -> None:
    if not isinstance(handle, Handle | HandleGroup):
        raise InvalidRequestError(f"{handle!r} is not a handle; give the handle that an *_async function returned")
