"""Operations in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from collectives.api import InvalidRequestError
from collectives.engine.work import Work
from hvd_cluster import basics
from hvd_cluster.torch.operations.compilation import uncompiled

__all__ = ["Finish", "Handle", "HandleGroup", "Kind", "poll", "synchronize"]

Finish: TypeAlias = Callable[[Work], Any]
Kind: TypeAlias = Callable[[Iterable[Any]], Any]


class Handle:
    """An operation in flight; give it to :func:`poll` and :func:`synchronize`."""

    __slots__ = ("_pending",)

    def __init__(self, work: Work, finish: Finish) -> None:
        self._pending: tuple[Work, Finish] | None = work, finish

    def is_done(self) -> bool:
        """Whether the result is there, or an error."""
        if self._pending is None:
            return True
        work, _ = self._pending
        return work.done or basics.engine().poll(work)

    def wait(self) -> None:
        """Return when it is; raises the error."""
        if self._pending is None:
            return
        work, _ = self._pending
        if work.done:
            work.outcome()
        else:
            basics.engine().synchronize(work)

    def take(self) -> Any:
        """The result, the first time; None afterwards, when the handle keeps no tensor any more."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        work, finish = pending
        return finish(work)


class HandleGroup:
    """The operations of a group in flight; :func:`synchronize` gives what each of them gives, in ``kind``."""

    __slots__ = ("_handles", "_kind")

    def __init__(self, handles: Sequence[Handle], kind: Kind) -> None:
        self._handles: Sequence[Handle] | None = handles
        self._kind = kind

    def is_done(self) -> bool:
        """Whether all results are there."""
        return all([handle.is_done() for handle in self._handles or ()])

    def wait(self) -> None:
        """Return when they are; raises the error of the group."""
        for handle in self._handles or ():
            handle.wait()

    def take(self) -> Any:
        """The results, the first time; None afterwards."""
        handles, self._handles = self._handles, None
        return None if handles is None else self._kind(handle.take() for handle in handles)


@uncompiled
def poll(handle: Handle | HandleGroup) -> bool:
    """Whether :func:`synchronize` would return at once; InvalidRequestError for what is no handle."""
    _require_handle(handle)
    return handle.is_done()


@uncompiled
def synchronize(handle: Handle | HandleGroup) -> Any:
    """Wait for the operation; its tensor, (tensor, received_splits) for alltoall, or the tensors of a group.

    None for a handle that was synchronized before.
    """
    _require_handle(handle)
    handle.wait()
    return handle.take()


def _require_handle(handle: Any) -> None:
    if not isinstance(handle, Handle | HandleGroup):
        raise InvalidRequestError(f"{handle!r} is not a handle; give what an *_async function returned")
