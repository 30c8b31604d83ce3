"""The events that change the members of a job, and the actions that follow from them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Members:
    """The ids of the workers of the world of ``round``. The ranks follow this order, host by host."""

    round: int
    workers: tuple[str, ...]


# Events.


@dataclass(frozen=True, slots=True)
class HostFound:
    """``host`` may have ``slots`` workers: a new host, another number of slots, or a host that stays after all."""

    host: str
    slots: int


@dataclass(frozen=True, slots=True)
class HostDraining:
    """``host`` will leave: its workers shall hand over before. It gets no new ones.

    It will be gone at the time ``until``, in seconds of the clock of :meth:`.Membership.handle`, if that is known. A
    later event may tell that time, or another one.
    """

    host: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class HostLost:
    """``host`` is gone, with its workers, for the reason ``text``."""

    host: str
    text: str


@dataclass(frozen=True, slots=True)
class HostUnusable:
    """The job wants ``host``, but cannot use it, for the reason ``text``; None: it does not want it any more."""

    host: str
    text: str | None


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A newcomer has imported its modules and built its model; it waits for a world."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The process of a worker ended, or no longer answers. ``text`` says how.

    Unless it ``is_explained``, the other workers have noticed the end: a second event, which is a :class:`WorkerDone`
    if the worker has done its work, says how the process ended. Unless it ``has_begun``, it has left no work undone.
    """

    worker: str
    text: str
    is_explained: bool = True
    has_begun: bool = True


@dataclass(frozen=True, slots=True)
class WorkerRaised:
    """The user's code raised an exception in a worker. ``text`` says which."""

    worker: str
    text: str


@dataclass(frozen=True, slots=True)
class WorkerDone:
    """A worker ended with success."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """A worker will leave: it shall hand over before. Its slot stays empty until its host is found again."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerBehind:
    """The other ranks have gone on without a worker, which ends by itself: no failure of it, nor of its host."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerLeaves:
    """A worker has heard of a world without it, and ends by itself, whatever is published meanwhile."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorldFailed:
    """The collectives of the world of ``round`` failed, though its workers are alive. ``text`` says how."""

    round: int
    text: str


@dataclass(frozen=True, slots=True)
class WorldFormed:
    """The workers of ``round`` have connected, and all of them have the state of the training."""

    round: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    HostFound
    | HostDraining
    | HostLost
    | HostUnusable
    | WorkerReady
    | WorkerDraining
    | WorkerBehind
    | WorkerLeaves
    | WorkerFailed
    | WorkerRaised
    | WorkerDone
    | WorldFailed
    | WorldFormed
    | Tick
)


# Actions.


@dataclass(frozen=True, slots=True)
class Start:
    """Start ``worker`` on ``host``."""

    worker: str
    host: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End the process of ``worker``: it belongs to no world, and none will have it."""

    worker: str


@dataclass(frozen=True, slots=True)
class Publish:
    """The next world is that of ``members``.

    If it is ``planned``, all workers of the present world are alive: they leave it together after a step. Otherwise
    they leave it at once. A worker that is not in ``members`` ends by itself when it has left.
    """

    members: Members
    planned: bool


@dataclass(frozen=True, slots=True)
class Overdue:
    """Tell that ``workers`` have not left ``host``, which will be gone at ``until``. Whether the others ``go_on``."""

    host: str
    workers: tuple[str, ...]
    until: float
    go_on: bool


@dataclass(frozen=True, slots=True)
class End:
    """The job is over: with success, or with the ``error`` that says why. It is the last action.

    ``unrepaired`` are the workers whose losses are the error, if others were done: no worker is left that could go on.
    """

    error: str | None = None
    unrepaired: tuple[str, ...] = ()


Action = Start | StopWorker | Publish | Overdue | End
