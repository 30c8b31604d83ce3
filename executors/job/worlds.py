"""The messages of an elastic job between driver and workers: worlds one way, reports the other way. Pure.

They are values of the rendezvous store. The world of round n is at ``worlds/<n>``, so each worker waits for the next
number. Report k of a worker is at ``reports/<worker>/<k>``. At ``call`` is the call of an elastic function in which the
ranks are, once all of them have the state, or have lost one there. At ``changes/<n>`` is the line about the change to
the world of round n, once all of its ranks have the state; only the live page reads it. At ``answers/<worker>/<n>`` is
the answer to end n of a worker that Ray Train may replace, and at ``metrics/<worker>/<n>`` are those of its last
report, which all workers make again for the n-th time.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property

from collectives import Topology, World
from executors.api import Slot, counted


def assign_ranks(hosts: Sequence[str]) -> list[Slot]:
    """A slot for each worker, in the order of the workers: ``result[i]`` is the slot of worker ``i`` on ``hosts[i]``.

    Hosts are taken in order of first appearance, so that the first worker is rank 0; ranks are dense on each host.
    """
    order = [worker for own in _by_host(hosts).values() for worker in own]
    slots = dict(zip(order, slots_of([hosts[worker] for worker in order]), strict=True))
    return [slots[worker] for worker in range(len(hosts))]


def slots_of(hosts: Sequence[str]) -> list[Slot]:
    """The slot of each rank, where rank ``r`` is on ``hosts[r]``; local ranks are in the order of the ranks.

    ``cross_rank`` counts the hosts before this one that have a rank with the same local rank.
    """
    ranks = _by_host(hosts)
    peers = Counter(local_rank for own in ranks.values() for local_rank in range(len(own)))
    before: Counter[int] = Counter()
    slots: dict[int, Slot] = {}
    for host, own in ranks.items():
        for local_rank, rank in enumerate(own):
            slots[rank] = Slot(
                host=host,
                rank=rank,
                size=len(hosts),
                local_rank=local_rank,
                local_size=len(own),
                cross_rank=before[local_rank],
                cross_size=peers[local_rank],
            )
        before.update(range(len(own)))
    return [slots[rank] for rank in range(len(hosts))]


def _by_host(hosts: Sequence[str]) -> dict[str, list[int]]:
    """The places of each host in ``hosts``; the hosts in order of first appearance."""
    places: dict[str, list[int]] = {}
    for place, host in enumerate(hosts):
        places.setdefault(host, []).append(place)
    return places


CALL = "call"
REPORTS = "reports/"
WORLDS = "worlds/"
CHANGES = "changes/"
RETURNED = b" returned"


@dataclass(frozen=True, slots=True)
class WorldCall:
    """Call ``number`` of an elastic function, from 1 on, is the last one that the ranks have begun; 0: there is none.

    Between it and the next one it ``has_returned``.
    """

    number: int = 0
    has_returned: bool = False

    def encode(self) -> bytes:
        """The value in the store."""
        return b"%d" % self.number + RETURNED * self.has_returned

    @classmethod
    def decode(cls, data: bytes) -> WorldCall:
        """The reverse of :meth:`encode`."""
        return cls(int(data.removesuffix(RETURNED)), data.endswith(RETURNED))


LONG = 1 << 12
"""Bytes. Longer values of worlds are compressed: each worker of the job fetches each of them."""
BRACE = b"{"
"""The first byte of a value that is not compressed."""


@dataclass(frozen=True)
class Published:
    """The world of ``round``: its ``workers`` and the host of each, in the order in which they get ranks.

    If it is ``planned``, the workers of the world before leave that one together after a step; otherwise at once.
    ``text`` says what has changed. If the job ``is_over``, there is no such world, and none will come.
    """

    round: int
    workers: tuple[tuple[str, str], ...] = ()
    planned: bool = False
    text: str = ""
    is_over: bool = False

    def encode(self) -> bytes:
        """The value in the store."""
        data = json.dumps({field.name: getattr(self, field.name) for field in fields(self)}).encode()
        return data if len(data) <= LONG else zlib.compress(data)

    @classmethod
    def decode(cls, data: bytes) -> Published:
        """The reverse of :meth:`encode`."""
        given = json.loads(data if data.startswith(BRACE) else _decompressed(data))
        given["workers"] = tuple((worker, host) for worker, host in given["workers"])
        return cls(**given)

    def world(self, worker: str, job: str, rendezvous: tuple[str, int]) -> World | None:
        """The world as ``worker`` has it; None if it is no member. A rank that is alone needs no rendezvous."""
        slot = self.slots().get(worker)
        if slot is None:
            return None
        topology = Topology(
            rank=slot.rank,
            size=slot.size,
            local_rank=slot.local_rank,
            local_size=slot.local_size,
            cross_rank=slot.cross_rank,
            cross_size=slot.cross_size,
            hosts=(),
            cores=0,
        )
        return World(job, self.round, topology, slot.host, rendezvous if slot.size > 1 else None)

    @cached_property
    def members(self) -> tuple[str, ...]:
        """The workers, in their order."""
        return tuple(worker for worker, _ in self.workers)

    def slots(self) -> Mapping[str, Slot]:
        """The slot of each worker."""
        return self._slots

    @cached_property
    def _slots(self) -> dict[str, Slot]:
        """Thousands of ranks may ask, and accuse each other."""
        slots = assign_ranks([host for _, host in self.workers])
        return {worker: slot for (worker, _), slot in zip(self.workers, slots, strict=True)}

    @cached_property
    def _workers(self) -> dict[int, tuple[int, str]]:
        """Rank -> the place of its worker in this world, and the worker."""
        return {slot.rank: (place, worker) for place, (worker, slot) in enumerate(self._slots.items())}

    def slot_with(self, host: str) -> Slot:
        """The slot of a newcomer on ``host``, if it joined this world now."""
        counts = self._counts
        place, order = counts[host], list(counts) if host in counts else [*counts, host]
        before = order[: order.index(host)]
        return Slot(
            host=host,
            rank=sum([counts[other] for other in before]) + place,
            size=len(self.workers) + 1,
            local_rank=place,
            local_size=place + 1,
            cross_rank=sum([counts[other] > place for other in before]),
            cross_size=sum([count > place for count in counts.values()]) + 1,
        )

    @cached_property
    def _counts(self) -> Counter[str]:
        """The number of workers of each host, in the order of the hosts."""
        return Counter(host for _, host in self.workers)

    def worker_of(self, rank: int) -> str | None:
        """The worker that has ``rank``; None if there is no such rank."""
        return self._workers[rank][1] if rank in self._workers else None

    def workers_of(self, ranks: Collection[int]) -> list[str]:
        """The workers that have ``ranks``, in the order of this world."""
        return [worker for _, worker in sorted(self._workers[rank] for rank in {*ranks} & self._workers.keys())]

    def rank_of(self, worker: str) -> int | None:
        """The rank of ``worker``; None if it is no member."""
        slot = self.slots().get(worker)
        return None if slot is None else slot.rank


def _decompressed(data: bytes) -> bytes:
    try:
        return zlib.decompress(data)
    except zlib.error as error:
        raise ValueError(f"a world of {len(data)} bytes cannot be read: {error}") from error


NO_WORLD = Published(-1)


class WorldHistory:
    """The worlds of a job, as its driver knows them.

    ``published`` is the last one, and ``slots`` are its. ``formed`` is the last one that formed, or else the first one:
    changes are told since that one. ``present``, by round, are those since the last one that formed or was not planned:
    ranks may be in any of them.
    """

    def __init__(self) -> None:
        self.published = self.formed = NO_WORLD
        self.slots: Mapping[str, Slot] = {}
        self._formed_slots: Mapping[str, Slot] = {}
        self.present: dict[int, Published] = {}

    @property
    def has_any(self) -> bool:
        """Whether there is a world."""
        return self.published is not NO_WORLD

    @property
    def members(self) -> tuple[str, ...]:
        """The workers of the last one."""
        return self.published.members

    def publish(self, world: Published) -> None:
        """``world`` is the next one."""
        self.published, self.slots = world, world.slots()
        self.present = {**(self.present if world.planned else {}), world.round: world}
        if self.formed is NO_WORLD:
            self._form()

    def note_formed(self, round: int) -> bool:
        """The world of ``round`` has formed. Returns whether it is the last one."""
        self.present = {number: world for number, world in self.present.items() if number >= round}
        if round != self.published.round:
            return False
        self._form()
        return True

    def _form(self) -> None:
        self.formed, self._formed_slots = self.published, self.slots

    def rank_of(self, worker: str) -> int | None:
        """The rank that ``worker`` has had itself: it may never enter the world that was published last."""
        slot = self._formed_slots.get(worker) or self.slots.get(worker)
        return None if slot is None else slot.rank


@dataclass(frozen=True, slots=True)
class LastReport:
    """The last report of a worker to Ray Train: a digest of its ``metrics``, and the ``path`` of its checkpoint.

    It ``is_left_out`` if Ray Train has refused it, because a worker was missing.
    """

    metrics: str
    path: str = ""
    is_left_out: bool = False

    def encode(self) -> str:
        """The text of a :class:`Report`."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> LastReport | None:
        """The reverse of :meth:`encode`; None if ``text`` is empty."""
        return cls(**json.loads(text)) if text else None


@dataclass(frozen=True, slots=True)
class Answer:
    """The next thing to do for a worker that has ``finished``, of one ``kind``:

    * ``return``: come into the world of round ``number``, whose newcomers need the state.
    * ``report``: make the last report again, with all others. Those without one take the metrics that ``source`` gives
      for repetition ``number`` of the job.
    * ``end``: return to Ray Train.
    """

    kind: str
    number: int = 0
    source: str = ""

    def encode(self) -> bytes:
        """The value in the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Answer:
        """The reverse of :meth:`encode`."""
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True)
class Report:
    """A message of a worker, of one ``kind``:

    * ``ready``: a newcomer is ready for its first world.
    * ``raised``: the user's code raised the exception ``text``, which is on its way out; "": the user has caught it. If
      it ``is_uncaught``, nobody can catch it any more, and the process is about to end.
    * ``draining``: the worker was asked to end, and will leave.
    * ``behind``: the other ranks are in a later call of an elastic function, or begin none; the worker will leave.
    * ``leaving``: a world was published without the worker, which ends.
    * ``failed``: the collectives of ``round`` failed for the reason ``text``; ``ranks`` are those to blame, if known.
    * ``unable``: the worker cannot be in any world, for the reason ``text``.
    * ``lost``: it is certain that the processes of ``ranks`` of the world of ``round`` have ended.
    * ``finished``, where Ray Train may replace workers: the training function has returned, in the world of ``round``;
      ``call`` counts the ends of the worker. ``text`` is its :class:`LastReport`, or empty.
    * ``returned``, of rank 0: the ``call``-th call of an elastic function has returned, in the world of ``round``.
    * ``formed``, of rank 0: the world of ``round`` has formed, ``pause`` seconds after the last step before it; the
      ranks repeat ``lost`` steps, and are in the ``call``-th call of an elastic function.

    ``ready`` and ``failed`` have the ``call`` of the worker, too; ``ready`` and ``formed`` the ``version`` of the
    library, and a digest of the ``layout`` of the state, "" if it is not known.
    """

    kind: str
    round: int = 0
    ranks: tuple[int, ...] = ()
    text: str = ""
    pause: float = 0.0
    lost: int = 0
    call: int = 0
    version: str = ""
    layout: str = ""
    is_uncaught: bool = False

    def encode(self) -> bytes:
        """The value in the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Report:
        """The reverse of :meth:`encode`, also for a worker of another version, which may have other fields."""
        given = json.loads(data)
        known = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        return cls(**{**known, "ranks": tuple(known.get("ranks", ()))})


def objection(ready: Report, formed: Report | None) -> str | None:
    """Why the newcomer that is ``ready`` cannot be a rank of the world that has ``formed`` last; None if it can.

    States of other calls may have other layouts.
    """
    if formed is None:
        return None
    if ready.version != formed.version:
        return (
            f"has version {ready.version or 'unknown'} of hvd-cluster, but the ranks have {formed.version}; install "
            "one version on all hosts"
        )
    if ready.call == formed.call and ready.layout and formed.layout and ready.layout != formed.layout:
        return (
            "has a state with other entries, shapes or types than the ranks; have one version of the script, and of "
            "its model, on all hosts"
        )
    return None


def world_key(round: int) -> str:
    """The key of the world of ``round``."""
    return f"{WORLDS}{round}"


def report_key(worker: str, number: int) -> str:
    """The key of a report of ``worker``."""
    return f"{REPORTS}{worker}/{number}"


def change_key(round: int) -> str:
    """The key of the line about the change to the world of ``round``."""
    return f"{CHANGES}{round}"


def answer_key(worker: str, number: int) -> str:
    """The key of the answer to end ``number`` of ``worker``."""
    return f"answers/{worker}/{number}"


def metrics_key(worker: str, number: int) -> str:
    """The key of the metrics of ``worker`` in its last report, at its end ``number``."""
    return f"metrics/{worker}/{number}"


def describe(before: Published, after: Published, lost: Mapping[str, str], done: Mapping[str, str]) -> str:
    """How the workers changed from ``before`` to ``after``, such as "rank 2 on host b lost (killed by signal 9)".

    ``lost`` has the reason for each worker that was lost, and ``done`` says how each one ended that had its success.
    """
    former, present = before.slots(), after.slots()
    gone = [worker for worker in former if worker not in present]
    come = [worker for worker in present if worker not in former]
    parts = [f"{_place(former[worker])} lost ({lost[worker]})" for worker in losses(before, after, lost)]
    parts += [f"{_place(former[worker])} {done.get(worker, 'left')}" for worker in gone if worker not in lost]
    parts += [f"{_place(present[worker])} joined" for worker in come]
    return ", ".join(parts) or "the same ranks again"


def losses(before: Published, after: Published, lost: Mapping[str, str]) -> list[str]:
    """The workers of ``before`` that were lost on the way to ``after``."""
    present = after.slots()
    return [worker for worker in before.slots() if worker not in present and worker in lost]


def summary(world: Published, pause: float, steps: int) -> str:
    """The line about the change to ``world``, once it has formed."""
    ranks = counted(len(world.workers), "rank")
    return f"world {world.round}: {ranks}, {world.text}, resumed after {pause:.2f} s, {counted(steps, 'step')} lost"


def _place(slot: Slot) -> str:
    return f"rank {slot.rank} on host {slot.host}"
