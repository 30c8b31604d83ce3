"""Pure: how the workers of a job ended, and what follows from that.

Three sources tell of an end, in any order: the agent of the worker, which knows how its process ended; other workers,
which notice first that it is gone, or accuse it; and the loss of its host, after which nobody will say more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from executors.api import ExecutorError, WorkerError, number_of
from executors.failures import Failure, FailureKind, likeliest, raised_elsewhere
from executors.membership.events import End, Event, WorkerFailed, WorkerRaised
from executors.membership.limits import Limits

# With this one Python ends after an exception of the script.
EXCEPTION_CODE = 1


class LivingWorkers(Protocol):
    """The workers that the job has: its :class:`executors.membership.membership.Membership`."""

    def has(self, worker: str) -> bool:
        """Whether ``worker`` is alive."""

    def has_left(self, worker: str) -> bool:
        """Whether ``worker`` is in no world any more, as far as that is known."""

    def is_on_trial(self, worker: str) -> bool:
        """Whether an exception of ``worker`` is a failure of its host."""

    def alone_have_state(self, workers: Collection[str]) -> bool:
        """Whether no other worker than ``workers`` has the state of the training, and one of them does."""


@dataclass(frozen=True, slots=True)
class FailedWorker:
    """The failure of ``worker``, which had this ``rank`` in the world of that moment, or none."""

    worker: str
    rank: int | None
    failure: Failure


class Failures:
    """One for each worker that failed, in the order in which they were reported."""

    def __init__(self) -> None:
        self._failed: dict[str, FailedWorker] = {}
        self._exceptions: dict[str, str] = {}
        self._last = ""
        self._blamed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._failed)

    def of(self, worker: str) -> Failure | None:
        """That of ``worker``, if it has failed."""
        failed = self._failed.get(worker)
        return failed.failure if failed else None

    def add(self, worker: str, rank: int | None, failure: Failure) -> None:
        """``worker`` has failed, for the first time."""
        self._failed[worker] = FailedWorker(worker, rank, failure)

    def improve(self, worker: str, failure: Failure) -> None:
        """Another report of the same end: it counts if it is likelier."""
        known = self._failed[worker]
        if failure.kind < known.failure.kind:
            del self._failed[worker]
            self._failed[worker] = replace(known, failure=failure)

    def forget(self, worker: str) -> None:
        """``worker`` has not failed after all."""
        self._failed.pop(worker, None)

    def explain(self, worker: str, failure: Failure) -> None:
        """How the failed ``worker`` ended is known now."""
        self._failed[worker] = replace(self._failed[worker], failure=failure)

    def note_exception(self, worker: str, text: str) -> None:
        """``worker`` has reported an exception, which may end it."""
        self._exceptions[worker] = text

    def has_exception(self, worker: str) -> bool:
        """Whether ``worker`` has reported one."""
        return bool(self._exceptions.get(worker))

    def with_exception(self, worker: str, failure: Failure) -> Failure:
        """``failure``, with the exception that the worker has reported: its standard error may not show it.

        The user may have caught it since. So it is the reason only of an end that may be that of an exception.
        """
        text = self._exceptions.get(worker, "")
        if not text or failure.kind not in (FailureKind.SIGNAL, FailureKind.EXIT):
            return failure
        if failure.kind is FailureKind.EXIT and failure.exit_code in (EXCEPTION_CODE, None):
            return replace(failure, kind=FailureKind.EXCEPTION, text=f"raised {text}, and {failure.text}")
        return replace(failure, text=f"{failure.text}; before, it raised {text}")

    def end(self, blamed: Sequence[str] = ()) -> None:
        """The job ends; see :attr:`last`. If workers are ``blamed``, the cause is one of them."""
        self._last = next(reversed(self._failed), "")
        self._blamed = tuple(blamed)

    @property
    def has_cause(self) -> bool:
        """Whether a worker failed by itself, and not because of another one."""
        return any(not failed.failure.kind.is_consequence for failed in self._failed.values())

    @property
    def raised_elsewhere(self) -> tuple[int, str] | None:
        """The rank that raised, and how, where all failed because of it and it still runs; None where none is named."""
        named = [raised_elsewhere(failed.failure.last_lines) for failed in self._failed.values()]
        found = None if self.has_cause else next(filter(None, named), None)
        is_known = found is not None and any(failed.rank == found[0] for failed in self._failed.values())
        return None if is_known else found

    @property
    def cause(self) -> FailedWorker:
        """The likeliest, the first among several of one kind."""
        failed = [self._failed[worker] for worker in self._blamed if worker in self._failed] or self._failed.values()
        return likeliest(failed, lambda failed: failed.failure.kind)

    @property
    def last(self) -> FailedWorker | None:
        """The last one before :meth:`end`."""
        return self._failed.get(self._last)


# How a worker ended, until its agent says more. The other workers notice it first.
ENDED = Failure(FailureKind.EXIT, "ended")
# Its agent never says more: the process goes on.
STUCK = replace(ENDED, text=f"{ENDED.text} for the others, but not its process")
# The end of a worker that others accuse.
SILENT = Failure(FailureKind.EXIT, "no longer answered")
# The end of a newcomer that accuses all workers with the state: without them there is no training to join.
CUT_OFF = Failure(FailureKind.EXIT, "reached no rank with the state of the training")


@dataclass(frozen=True, slots=True)
class DeathVerdict:
    """What follows from the end of a worker: ``event`` for the membership, or none.

    ``failure`` is how it ended, as far as it is known. If it ``is_done``, it counts as a success. If it ``is_new``,
    nothing told of this end before; if it ``is_explained``, the others had noticed it, and this says how. A worker that
    ``is_given_up`` is a newcomer without which the others go on: its process may still run.
    """

    failure: Failure
    event: Event | None = None
    is_done: bool = False
    is_new: bool = False
    is_explained: bool = False
    is_given_up: bool = False


@dataclass(frozen=True, slots=True)
class AccusationVerdict:
    """What follows from an accusation.

    The workers ``dead`` end, because of ``failure``. The accuser is ``dismissed`` if the others are in a later world
    without it. If the world ``has_failed``, it ends, though all of its workers live.
    """

    dead: tuple[str, ...] = ()
    failure: Failure = SILENT
    dismissed: tuple[str, ...] = ()
    has_failed: bool = False


class Deaths:
    """How the workers of the job of ``membership`` ended; each method says what follows.

    A job whose ``end`` is known starts no worker any more; if it ``is_ending``, its driver ends the workers, so that
    their ends mean nothing any more. ``lost`` and ``done`` say how workers ended, without and with success. ``former``
    are those that the present world is without. ``unexplained`` are those whose agents have still to say how they
    ended. ``order`` are the workers in the order of their ranks in the world of the first one that was done.
    """

    def __init__(self, limits: Limits, workers: LivingWorkers) -> None:
        self.failures = Failures()
        self.lost: dict[str, str] = {}
        self.done: dict[str, str] = {}
        self.former: set[str] = set()
        self.unexplained: set[str] = set()
        self.order: tuple[str, ...] = ()
        self.end: End | None = None
        self.is_ending = False
        self._limits = limits
        self._workers = workers
        self._blamed: str | None = None  # a worker that raised, but whose process has not ended

    # Reports of agents.

    def failed(self, worker: str, failure: Failure, rank: int | None) -> DeathVerdict:
        """``worker``, which had ``rank``, has ended without success; that of a worker that has left is no failure.

        Of several failures of one worker the first one counts; in a static job, where they are reports of one end, the
        likeliest one.
        """
        failure = self._on_trial(worker, self.failures.with_exception(worker, failure))
        if self.is_ending:
            return self._failed_late(worker, failure)
        if self.is_unexplained(worker):
            return DeathVerdict(failure, self.explain(worker, failure), is_explained=True)
        if self.failures.of(worker) is not None:
            if not self._limits.is_elastic:
                self.failures.improve(worker, failure)
            return DeathVerdict(failure)
        if worker in self.former and self._workers.has_left(worker):
            return DeathVerdict(failure, is_done=True)
        return self._add(worker, failure, rank)

    def _failed_late(self, worker: str, failure: Failure) -> DeathVerdict:
        """It says more of the cause only if it is that of the worker that the others name."""
        if worker == self._blamed and failure.kind is FailureKind.EXCEPTION:
            self.failures.explain(worker, failure)
        return DeathVerdict(failure)

    def _add(self, worker: str, failure: Failure, rank: int | None) -> DeathVerdict:
        is_former = worker in self.former
        self.lost[worker] = failure.text
        self.failures.add(worker, rank, failure)
        is_given_up = self.end is None and not is_former and self._workers.is_on_trial(worker)
        return DeathVerdict(failure, _event(worker, failure, not is_former), is_new=True, is_given_up=is_given_up)

    def _on_trial(self, worker: str, failure: Failure) -> Failure:
        """``failure``; an exception of a worker that never trained, while others did, does not end the job."""
        if failure.kind is not FailureKind.EXCEPTION or not self._workers.is_on_trial(worker):
            return failure
        return replace(failure, kind=FailureKind.EXIT, error=None)

    def succeeded(self, worker: str, text: str, members: tuple[str, ...]) -> bool:
        """``worker`` has done its work; ``text`` says how it ended. Returns whether the others took it for lost."""
        if self.is_unexplained(worker):  # without shutdown() they cannot know
            self.lost.pop(worker, None)
            self.done[worker] = text
            self.failures.forget(worker)
            return True
        if worker in members and worker not in self.former:
            self.order = self.order or members
            self.done[worker] = text
        return False

    def agent_lost(self, worker: str, text: str, has_returned: bool, rank: int | None) -> DeathVerdict:
        """The agent of ``worker`` is gone: nobody will say how it ended, unless it ``has_returned`` before."""
        failure = Failure(FailureKind.EXIT, f"was lost ({text})")
        if self._workers.has(worker) and has_returned:
            return DeathVerdict(failure, is_done=True)
        self.lost[worker] = text
        if self.is_unexplained(worker):
            self.failures.explain(worker, failure)
            return DeathVerdict(failure, is_explained=True)
        if self.end is None and not self._workers.has_left(worker):
            self.failures.add(worker, rank, failure)
        return DeathVerdict(failure)

    # Reports of other workers.

    def may_end_job(self, lost: Collection[str], members: Collection[str]) -> bool:
        """Whether the job may end without the members that are ``lost``, so that it waits for how they ended."""
        has_raised = any(map(self.failures.has_exception, lost))
        is_short = len(members) - len(lost) < self._limits.least
        return self._limits.resets is not None or self._limits.failures is not None or is_short or has_raised

    def judge(self, accuser: str, accused: Collection[str] | None, members: Collection[str]) -> AccusationVerdict:
        """The accused of two workers ends, unless the present world, of ``members``, is without it.

        A newcomer that accuses all workers with the state ends itself. They may be stopped, and still go on later.
        None for ``accused``: a later world was formed. An accuser that this one is without may wait for a world that
        never comes. The accused may have been lost in a world whose successor, with them, was already planned.
        """
        if accused is None:
            return AccusationVerdict(dismissed=(accuser,) if accuser in self.former else ())
        dead = tuple(sorted(worker for worker in {*accused} - {accuser} if worker in members))
        if self._workers.alone_have_state(dead):
            return AccusationVerdict((accuser,), CUT_OFF)
        return AccusationVerdict(dead, has_failed=not dead)

    def is_unexplained(self, worker: str) -> bool:
        """Whether others have noticed the end of ``worker``, and its agent has still to say how it ended."""
        return self.failures.of(worker) is ENDED

    def explain(self, worker: str, failure: Failure) -> Event:
        """How ``worker`` ended, which was lost already."""
        self.lost[worker] = failure.text
        self.failures.explain(worker, failure)
        return _event(worker, failure, may_raise=True)

    # Worlds, and the end.

    def published(self, before: Collection[str], after: Collection[str]) -> None:
        """The world of the workers ``before`` has a successor, of those ``after``."""
        self.former = (self.former | set(before)) - set(after)

    def over(self, end: End, hosts: Mapping[str, str]) -> str:
        """The job is over: the reason that its workers hear. ``hosts`` has that of each worker."""
        self.end = end
        self.failures.end(end.unrepaired)
        return str(_error(self.failures.cause, hosts)) if end.unrepaired else end.error or "the job is done"

    def blame(self, worker_of: Callable[[int], str | None]) -> None:
        """A rank that raised may run its exit handlers for long. The others name it, and have ended because of it."""
        rank, text = self.failures.raised_elsewhere or (None, "")
        worker = None if rank is None or self._limits.is_elastic else worker_of(rank)
        if worker is not None and self._workers.has(worker):
            self._blamed = worker
            how = f"{text}, and its process has not ended yet"
            self.failures.add(worker, rank, Failure(FailureKind.EXCEPTION, how))

    def error(self, hosts: Mapping[str, str]) -> BaseException | None:
        """The cause of a failed job: an exception of the user's code as itself, otherwise a WorkerError.

        ``hosts`` has that of each worker.
        """
        if self.end is None or self.end.error is None:
            return None
        if not self.failures:
            return ExecutorError(self.end.error)
        cause = self.failures.cause
        if self._limits.is_elastic and cause.failure.kind is not FailureKind.EXCEPTION and not self.end.unrepaired:
            return _error(self.failures.last or cause, hosts, self.end.error)
        return cause.failure.error or _error(cause, hosts)


def _event(worker: str, failure: Failure, may_raise: bool) -> Event:
    if may_raise and failure.kind is FailureKind.EXCEPTION:
        return WorkerRaised(worker, failure.text)
    return WorkerFailed(worker, failure.text, failure is not ENDED, failure.has_begun)


def _error(failed: FailedWorker, hosts: Mapping[str, str], text: str = "") -> WorkerError:
    host, failure = hosts[failed.worker], failed.failure
    rank = number_of(failed.worker) if failed.rank is None else failed.rank
    text = text or f"rank {rank} on {host} {failure.text}"
    return WorkerError(text, rank, host, failure.exit_code, failure.last_lines)


@dataclass(slots=True)
class _Loss:
    is_explained: bool
    had_part: bool
    since: int
    """How many worlds had formed when the worker was lost, or was in one for the last time."""


class Losses:
    """The workers that ended in a world of the job without success.

    A loss is repaired when a world without the lost worker has formed since, and one of its workers was done: it had
    the state of the training, and did the rest of the work.
    """

    def __init__(self) -> None:
        self._lost: dict[str, _Loss] = {}
        self._done: set[str] = set()
        self._formed = 0
        self._last: dict[str, int] = {}  # the number of the last world that formed with each worker, from 1

    def add(self, worker: str, is_explained: bool, had_part: bool) -> None:
        """``worker`` is lost, and ``had_part`` in the work. Unless the loss ``is_explained``, it may have been done."""
        self._lost[worker] = _Loss(is_explained, had_part, self._formed)

    def has(self, worker: str) -> bool:
        """Whether ``worker`` is lost."""
        return worker in self._lost

    def explain(self, worker: str) -> None:
        """It is certain that ``worker`` was not done."""
        if worker in self._lost:
            self._lost[worker].is_explained = True

    def formed(self, workers: Collection[str]) -> None:
        """A world of ``workers`` has formed. The report of it may come after the loss of one of them."""
        self._formed += 1
        self._last.update(dict.fromkeys(workers, self._formed))
        for worker in self._lost.keys() & set(workers):
            self._lost[worker].had_part, self._lost[worker].since = True, self._formed

    def done(self, worker: str) -> None:
        """``worker`` was done, though it may have been taken for lost."""
        self._lost.pop(worker, None)
        self._done.add(worker)

    @property
    def is_open(self) -> bool:
        """Whether a lost worker may still turn out to have been done."""
        return any(not loss.is_explained for loss in self._lost.values())

    def unrepaired(self) -> tuple[str, ...]:
        """The workers whose losses nobody has repaired, in the order in which they were lost.

        Without those whose work others took over, and were lost with it later: these are the reason.
        """
        done = max((self._last.get(worker, 0) for worker in self._done), default=0)
        found = {worker: loss for worker, loss in self._lost.items() if loss.had_part and loss.since >= done}
        reasons = tuple(worker for worker, loss in found.items() if loss.since == self._formed)
        return reasons or tuple(found)
