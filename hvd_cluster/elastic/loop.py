"""``run``: a training function that goes on when ranks leave or come."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

from collectives import HorovodInternalError, HostsUpdatedInterrupt, MismatchError
from hvd_cluster.elastic import session
from hvd_cluster.elastic.state import ObjectState, State


class Recoverable(Protocol):
    """The interface that :func:`run` needs from a state."""

    def interrupted(self) -> None:
        """The training function was cut off; :meth:`sync` will find the state to go on with."""

    def on_reset(self) -> None:
        """The ranks have changed, and have one state; all of them call this, newcomers, too."""

    def sync(self) -> None:
        """Give all ranks one state."""


P = ParamSpec("P")
S = TypeVar("S", bound=Recoverable)
T = TypeVar("T")


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a training function: it is called again, with the state of the last commit, when the ranks change.

    The first argument is the state, which ``commit()`` saves. When a rank is lost, the others continue from the last
    commit of any of them; when ranks come or leave by plan, from the commit that they have just made. A newcomer waits
    here for its first world. A process that the next world is without ends here, by ``sys.exit(0)``.

    A script may call several such functions. A newcomer comes into the one in which the job is; before it comes, its
    calls of earlier ones return None at once. A rank that the others have left behind raises ShutDownError.

    In a job that is not elastic, the function is called once. An exception of the function that is no
    HorovodInternalError, and a MismatchError, end the job.
    """
    return run_inside(nullcontext, func)


def run_inside(
    errors: Callable[[], AbstractContextManager[object]], func: Callable[Concatenate[S, P], T]
) -> Callable[Concatenate[S, P], T]:
    """As :func:`run`, where a framework raises errors of its own for collectives: each call is inside ``errors()``,
    which raises the engine's errors in their place.
    """

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> T:
        with session.telling_of_errors():
            return _Run(state, errors).call(lambda: func(state, *args, **kwargs))

    return cast("Callable[Concatenate[S, P], T]", wrapper)


@contextmanager
def keeping_state() -> Iterator[None]:
    """In the block, lost ranks have successors, and the state of the last elastic function that has returned is kept.

    :func:`hand_over` gives it to them. A function that returns after its world has lost a rank is called again, with a
    successor, as if it had noticed that before.
    """
    _kept.is_wanted = True
    try:
        yield
    finally:
        _kept.is_wanted, _kept.run = False, None


def hand_over(round: int) -> None:
    """Come into the world of ``round`` after the end of the training function, and give the others the state.

    Raises the errors of the way to that world.
    """
    run = _kept.run
    change = session.come_back(round, run is not None and run.has_reset)
    if run is not None and change is not None:
        run.give(change)


class _Kept:
    def __init__(self) -> None:
        self.is_wanted = False
        self.run: _Run | None = None

    def check(self) -> None:
        """A successor of a lost rank needs all others where it will be: the function is called again on all of them."""
        if self.is_wanted:
            session.notice_loss()

    def keep(self, run: _Run) -> None:
        if self.is_wanted:
            self.run = run


_kept = _Kept()


class _Run:
    def __init__(self, state: Recoverable, errors: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._state = state
        self._errors = errors
        self._is_new = False
        self._skip_sync = False
        self._resets = False
        self._since = 0.0

    @property
    def has_reset(self) -> bool:
        """Whether ``on_reset()`` of the state runs code of the user, as far as this rank knows."""
        return self._state._has_reset() if isinstance(self._state, State) else True

    def call(self, function: Callable[[], T]) -> T:
        if session.begin_call():
            return cast("T", None)
        self._enter()
        while True:
            try:
                with self._errors():
                    self._begin()
                    value = function()
                    _kept.check()
            except MismatchError:
                raise
            except HorovodInternalError as error:
                self._change_after(error)
            except HostsUpdatedInterrupt as interrupt:
                self._change_as_planned(interrupt)
            else:
                session.returned()
                _kept.keep(self)
                return value

    def _enter(self) -> None:
        change = session.enter(functools.partial(_layout, self._state), self.has_reset)
        if change is not None:
            self._is_new, self._resets = True, change.resets
        self._since = time.monotonic()

    def _change_after(self, error: HorovodInternalError) -> None:
        self._leave()
        self._state.interrupted()
        self._resets = session.change_after(error, self.has_reset).resets
        self._skip_sync = False

    def _change_as_planned(self, interrupt: HostsUpdatedInterrupt) -> None:
        self._leave()
        skips_sync = interrupt.skip_sync and getattr(self._state, "_is_complete", True)
        change = session.change_as_planned(self.has_reset, skips_sync)
        self._resets, self._skip_sync = change.resets, change.skips_sync

    def give(self, change: session.Change) -> None:
        """Agree on one state in a world with newcomers, the one after ``change``."""
        self._since, self._is_new = time.monotonic(), True
        self._resets, self._skip_sync = change.resets, False
        while True:
            try:
                with self._errors():
                    return self._begin()
            except MismatchError:
                raise
            except HorovodInternalError as error:
                self._state.interrupted()
                self._resets = session.change_after(error, self.has_reset).resets

    def _leave(self) -> None:
        """The present world has ended. One that ends before all ranks have a state prolongs the pause."""
        if not self._is_new:
            self._since, self._is_new = session.cut_off_since(), True

    def _begin(self) -> None:
        """Agree on one state in a new world.

        Code of the user for a change comes after that, on all ranks, so that its collectives meet: a newcomer has none
        before its first sync.
        """
        if self._is_new and not self._resets:
            self._state.on_reset()
        if not self._skip_sync:
            self._state.sync()
        if self._is_new and self._resets:
            self._reset()
        if not self._skip_sync:
            session.await_others()
        session.formed(self._since, getattr(self._state, "lost_commits", 0), self._shared_layout)
        self._is_new = False

    def _reset(self) -> None:
        state = self._state
        if isinstance(state, ObjectState):
            state._reset_together()
            return
        state.on_reset()
        if not self._skip_sync:
            state.sync()

    def _shared_layout(self) -> str:
        """As :func:`_layout`, which a sync has computed already."""
        agreed = "" if self._skip_sync else getattr(self._state, "agreed_layout", "")
        return agreed or _layout(self._state)


def _layout(state: Recoverable) -> str:
    """A digest of the layout of ``state``; "" if it is one of the user's own."""
    return state.layout_digest() if isinstance(state, ObjectState) else ""
