"""This process in an elastic job: newcomers come in, all ranks go on to the next world, removed ones leave."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from collectives import (
    VERSION,
    HorovodInternalError,
    InvalidRequestError,
    MismatchError,
    NotInitializedError,
    ShutDownError,
    World,
    process_meter,
)
from executors import FailureKind, Report, brief, kind_of_chain
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.core.worlds import RemovedError
from hvd_cluster.elastic.notice import heed_notice, tell_of_uncaught
from hvd_cluster.elastic.sampler import samplers
from hvd_cluster.ops.objects import allgather_object
from hvd_cluster.ops.submission import barrier

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Change:
    """This process is in another world now; the same on all of its ranks.

    ``resets``: whether the state of any rank has code of the user to run after a change. ``skips_sync``: whether no
    rank needs a sync, because all left the world before together with one state.
    """

    resets: bool
    skips_sync: bool = False


def is_elastic() -> bool:
    """Whether a driver of an elastic job started this process."""
    return basics.worlds() is not None


def check() -> None:
    """Raise HostsUpdatedInterrupt if the ranks leave this world at this commit. A job that is not elastic never does.

    All ranks do at the same commit, as long as no operation is in flight.
    """
    worlds = basics.worlds()
    if worlds is not None:
        worlds.check(basics.engine())


def drain() -> None:
    """Ask the driver to go on without this process: it hands over at one of its next commits, and ends.

    Raises InvalidRequestError outside of an elastic job.
    """
    worlds = basics.worlds()
    if worlds is None:
        raise InvalidRequestError("drain() is for elastic jobs; start this one with hvdrun --min-np")
    worlds.report(Report("draining"))


@contextmanager
def telling_of_errors() -> Iterator[None]:
    """Tell the driver which exception of the user's code leaves the block: the process may show it to nobody.

    The driver judges it when the process ends, since a caller may catch the exception.
    """
    worlds = basics.worlds()
    if worlds is not None:
        worlds.forget_exception()
    try:
        yield
    except Exception as error:
        worlds = basics.worlds()
        is_own = isinstance(error, HorovodInternalError) and not isinstance(error, MismatchError)
        if worlds is not None and not is_own and kind_of_chain(error) is FailureKind.EXCEPTION:
            worlds.tell_exception(brief(error))
        raise
    finally:
        worlds = basics.worlds()
        if worlds is not None:
            worlds.await_reports()


def begin_call() -> bool:
    """Call it where ``run`` begins. Returns whether this process is a newcomer in a job that has done this call."""
    worlds = basics.worlds()
    with _leaving_if_removed():
        return worlds is not None and worlds.begin_call()


def enter(layout: Callable[[], str], resets: bool) -> Change | None:
    """A newcomer waits for its first world; the other ranks hear of it now. Any other process gets None.

    ``layout`` returns a digest of the layout of its state, and is called where the driver hears of it: that may take
    long. The driver refuses a newcomer whose layout differs from that of the ranks. ``resets``: see :class:`Change`,
    for the state of this rank.
    """
    worlds = basics.worlds()
    if worlds is None:
        return None
    heed_notice(worlds)
    tell_of_uncaught(worlds)
    if not worlds.is_alone:
        return None
    return _go_to(partial(worlds.join, layout()), resets)


def change_after(error: HorovodInternalError, resets: bool) -> Change:
    """Go on to the next world after ``error``; raises it where the job is not elastic. See :func:`enter`."""
    worlds = basics.worlds()
    if worlds is None or worlds.is_over:
        raise error
    logger.info("round %d: %s", worlds.round, error)
    return _go_to(lambda: worlds.after(error), resets)


def change_as_planned(resets: bool, skips_sync: bool) -> Change:
    """Go on to the next world after a HostsUpdatedInterrupt. ``resets``: see :func:`enter`.

    ``skips_sync``: whether this rank needs no sync, if the ranks come together.
    """
    worlds = basics.worlds()
    if worlds is None:
        basics.shutdown()
        basics.init()
        return Change(resets, skips_sync)
    return _go_to(worlds.planned, resets, worlds.round if skips_sync else None)


def come_back(round: int, resets: bool) -> Change | None:
    """Go on to the world of ``round``, or a later one, after the end of the training function here; None if the job is
    not elastic. ``resets``: see :func:`enter`.
    """
    worlds = basics.worlds()
    return None if worlds is None else _go_to(partial(worlds.world_from, round), resets)


def notice_loss() -> None:
    """Raise the error that has ended the present world, unless a rank ended it that has finished: it shut down."""
    if basics.is_cut_off():
        with suppress(ShutDownError):
            allgather_object(None, "elastic.end")


def cut_off_since() -> float:
    """When the oldest operation that the end of the present world has cut off was submitted, in monotonic seconds; now
    if there was none.
    """
    try:
        since = basics.engine().cut_off_since
    except NotInitializedError:
        since = None
    return time.monotonic() if since is None else since


def await_others() -> None:
    """Return when all ranks of the present world have the state.

    The driver takes each rank of a world that has formed for one that can give the state to others. The rank that
    sends it is ready first: if it were lost, or done, the others would begin from the start.
    """
    if basics.worlds() is not None:
        barrier()


def formed(since: float, lost: int, layout: Callable[[], str]) -> None:
    """All ranks of the present world have the state; ``since`` is when the last one ended, in monotonic seconds.

    ``lost`` is how many commits were given up. ``layout``: see :func:`enter`.
    """
    process_meter.lose(lost)
    worlds = basics.worlds()
    if worlds is None:
        return
    worlds.formed()
    if basics.rank() == 0:
        pause, digest = time.monotonic() - since, layout()
        worlds.report_later(
            Report("formed", worlds.round, pause=pause, lost=lost, call=worlds.call, version=VERSION, layout=digest)
        )


def returned() -> None:
    """The function of the present call has returned, on this rank."""
    worlds = basics.worlds()
    with suppress(NotInitializedError):  # it has called shutdown()
        if worlds is not None and basics.rank() == 0:
            worlds.tell_returned()


def _go_to(find: Callable[[], World], resets: bool, left: int | None = None) -> Change:
    """The change to the world that is found. ``left``: the round of the world that this rank has left by plan, with
    a state that needs no sync.

    A rank that was cut off in the last step of that world needs a sync, though others do not.
    """
    before, worlds = (basics.rank(), basics.size()), basics.worlds()
    with _leaving_if_removed():
        while True:
            basics.change_world(find())
            try:
                told = _agree(resets, left is not None and worlds is not None and worlds.came_together(left))
            except MismatchError:
                raise
            except HorovodInternalError as error:
                find = partial(_after, error)
            else:
                _check_call([call for call, _, _ in told])
                samplers.begin_world(before)
                return Change(any(each for _, each, _ in told), all(each for _, _, each in told))


def _after(error: HorovodInternalError) -> World:
    worlds = basics.worlds()
    if worlds is None:
        raise error
    return worlds.after(error)


@contextmanager
def _leaving_if_removed() -> Iterator[None]:
    try:
        yield
    except (RemovedError, ShutDownError) as error:
        if isinstance(error, ShutDownError) and not _came_too_late():
            raise
        logger.info("%s; this process ends", error)
        worlds = basics.worlds()
        if worlds is not None and isinstance(error, RemovedError):
            worlds.tell_leaving()
        basics.shutdown()
        sys.exit(0)


def _came_too_late() -> bool:
    """Whether this process is a newcomer to a job that is over; the ranks of the job show why it is."""
    worlds = basics.worlds()
    return worlds is not None and worlds.is_alone and worlds.is_over


def _agree(resets: bool, skips_sync: bool) -> list[tuple[int, bool, bool]]:
    """Register the process sets of rank 0 again, as far as this world has their ranks.

    Returns the call of each rank, its ``resets`` and its ``skips_sync``.
    """
    own, worlds = {tuple(entry.ranks or ()): entry for entry in basics.wanted_sets()}, basics.worlds()
    sets = list(own) if basics.rank() == 0 else []
    told = allgather_object((sets, worlds.call if worlds else 0, resets, skips_sync), "elastic.sets")
    for ranks in told[0][0]:
        if max(ranks) < basics.size():
            basics.renew_process_set(own.get(ranks) or ProcessSet(ranks))
    return [each[1:] for each in told]


def _check_call(calls: Sequence[int]) -> None:
    """ShutDownError on the ranks that the others have left behind: these are in a later one of several functions.

    The driver hears of it before, so that the end of this process is no failure of its host.
    """
    own, worlds = calls[basics.rank()], basics.worlds()
    if own == max(calls):
        return
    if worlds is not None:
        worlds.tell_behind()
    raise ShutDownError(
        f"rank {basics.rank()} is in call {own} of elastic functions, but other ranks have begun call {max(calls)} "
        "meanwhile, so it leaves the job, and a new worker may take its slot; a script with one elastic function "
        "avoids that"
    )
