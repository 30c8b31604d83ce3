"""The tensors that all ranks have ready, until they are released in batches; and the messages that tell the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from collectives.api import Parameters, Request
from collectives.controller.agreement import Disagreement
from collectives.controller.fusion import plan
from collectives.controller.messages import Message, Refuse, Response, Run
from collectives.controller.process_sets import ProcessSets
from collectives.controller.response_cache import Known, ResponseCache
from collectives.controller.schedules import Schedule, Schedules, alone


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message and the ranks that must get it."""

    ranks: tuple[int, ...]
    message: Message


def refusal(key: tuple[int, str], why: Disagreement) -> Refuse:
    """The message that the tensor ``key`` does not run."""
    return Refuse(*key, why.text, why.property, why.values, why.tensor)


class Outbox:
    """Messages in the order in which they must be sent."""

    def __init__(self) -> None:
        self._outgoing: list[Outgoing] = []

    def send(self, ranks: Iterable[int], message: Message) -> None:
        """Append ``message`` for ``ranks``."""
        self._outgoing.append(Outgoing(tuple(ranks), message))

    def refuse(self, key: tuple[int, str], ranks: Iterable[int], why: Disagreement) -> None:
        """Tell ``ranks`` that the tensor ``key`` does not run."""
        self.send(ranks, refusal(key, why))

    def take(self) -> list[Outgoing]:
        """Remove and return all."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing


REPETITIONS = 2
"""After this number of known schedules in a row, the next tensors will probably have a known one, too."""


class Releases:
    """Sends ``Run`` messages to ``outbox``: all ready tensors, under ``parameters``, in one order for all process sets.

    ``isolate_groups`` is as in :func:`collectives.controller.fusion.plan`.
    """

    def __init__(
        self,
        sets: ProcessSets,
        cache: ResponseCache,
        outbox: Outbox,
        parameters: Parameters,
        isolate_groups: bool,
    ) -> None:
        self.parameters = replace(parameters, version=1)
        self._outdated = set(range(sets.size))
        self._isolate_groups = isolate_groups
        self._sets = sets
        self._cache = cache
        self._outbox = outbox
        self._ready: list[Response] = []
        self._ready_bytes = 0
        self._urgent = False
        self._held_since: float | None = None
        self._next_id = 0
        self._next_batch = 0
        self._new: dict[int, Response] = {}
        self._unsent: set[int] = set()
        self._forget: dict[int, list[int]] = {}
        self._schedules = Schedules()
        self._repetitions = 0

    def __bool__(self) -> bool:
        return bool(self._ready)

    # Parameters.

    @property
    def deadline(self) -> float | None:
        """When the ready tensors must be released; None if there are none."""
        since = self._held_since  # read once: the communication thread asks while others drive
        return None if since is None else since + self.parameters.cycle_time

    @property
    def is_changing(self) -> bool:
        """Whether some ranks do not have the parameters yet."""
        return bool(self._outdated)

    def propose(self, parameters: Parameters) -> None:
        """Let ``parameters`` hold on all ranks, from the next batch on, under the next version."""
        parameters = replace(parameters, version=self.parameters.version)
        if parameters != self.parameters:
            self.parameters = replace(parameters, version=parameters.version + 1)
            self._outdated = set(range(self._sets.size))
            self._schedules.clear()
            self.drop(self._cache.resize(parameters.cache_capacity))

    def _news(self, members: Sequence[int]) -> Parameters | None:
        """The parameters, if some of ``members`` do not have them yet."""
        if self._outdated.isdisjoint(members):
            return None
        self._outdated.difference_update(members)
        return self.parameters

    # Ids.

    def introduce(self, request: Request, sizes: tuple[int, ...], offers: tuple[bytes, ...]) -> Response:
        """A response under a new id, which its members learn with the message that runs it."""
        self._next_id += 1
        response = self._new[self._next_id] = Response(self._next_id, request, sizes, offers)
        return response

    def learn(self, known: Known) -> None:
        """Keep ``known`` in the cache."""
        self.drop(self._cache.learn(known))

    def drop(self, dropped: Iterable[Known]) -> None:
        """Let the members drop these ids, too; an id that a member has still to run, it drops after the run."""
        for known in dropped:
            if known.response.id not in self._unsent:
                self._forget_later(known.response)

    def forget(self, key: tuple[int, str]) -> None:
        """The ranks disagree about ``key``: the next time, they must send whole requests."""
        self.drop(self._cache.drop(key))

    def _forget_later(self, response: Response) -> None:
        self._forget.setdefault(response.request.process_set, []).append(response.id)

    def expect(self, response: Response) -> None:
        """``response`` will be ready, or it will be discarded."""
        self._unsent.add(response.id)

    def discard(self, response: Response) -> None:
        """``response`` was expected, and does not run."""
        self._unsent.discard(response.id)
        self._new.pop(response.id, None)
        self._cache.drop(response.request.key)
        self._forget_later(response)

    def remove_set(self, id: int) -> None:
        """The process set has been removed, and its members have dropped its ids."""
        self._cache.drop_set(id)
        self._forget.pop(id, None)

    def use(self, schedule: Schedule, times: int) -> None:
        """The ranks ran ``schedule`` without asking, so many ``times``."""
        self._next_batch += times * len(schedule.batches)
        for batch in schedule.batches:
            for response in batch:
                self._cache.use(response.id)

    # Ready tensors.

    def add(self, response: Response, urgent: bool, now: float) -> None:
        """``response`` is ready; ``urgent`` if a caller waits for it."""
        self._ready.append(response)
        self._ready_bytes += response.request.nbytes
        self._held_since = now if self._held_since is None else self._held_since
        self._urgent = self._urgent or urgent

    def urge(self) -> None:
        """A caller waits, perhaps for a ready tensor."""
        self._urgent = bool(self._ready)

    def is_due(self, now: float, half_submitted: bool) -> bool:
        """Whether the ready tensors must not be held any longer. Some others may be ``half_submitted``."""
        if self._urgent or self._ready_bytes >= self.parameters.fusion_threshold:
            return True
        if not (half_submitted or self.parameters.patient):
            return True
        return self.deadline is not None and now >= self.deadline

    def release(self, undisturbed: bool = False) -> None:
        """Send the ready tensors; ``undisturbed`` if no others are half-submitted, and no rank has joined."""
        begins_rounds = self._begins_rounds(undisturbed)
        batches = plan(self._ready, self.parameters.fusion_threshold, self._isolate_groups)
        self._ready.clear()
        self._ready_bytes = 0
        self._urgent, self._held_since = False, None
        for process_set, of_set in groupby(batches, key=lambda batch: batch[0].request.process_set):
            self._run(process_set, list(of_set), begins_rounds)

    def _begins_rounds(self, undisturbed: bool) -> bool:
        """Whether the ranks will probably wait for tensors of a known schedule again: they have done so lately."""
        is_known = self._urgent and undisturbed and self._find_schedule() is not None
        self._repetitions = self._repetitions + 1 if is_known else 0
        return self._repetitions >= REPETITIONS

    def _find_schedule(self) -> Schedule | None:
        """The schedule of the ready tensors, as the ranks find it."""
        ids = [response.id for response in self._ready]
        if len(ids) == 1:
            return None if ids[0] in self._new else alone(self._ready[0])
        return self._schedules.find(ids)

    def _run(self, process_set: int, batches: Sequence[Sequence[Response]], begins_rounds: bool) -> None:
        ids = tuple(tuple(response.id for response in batch) for batch in batches)
        flat = [id for batch in ids for id in batch]
        self._unsent.difference_update(flat)
        new = tuple(self._new.pop(id) for id in flat if id in self._new)
        forget = (*self._forget.pop(process_set, ()), *(id for id in flat if id not in self._cache))
        members = self._sets.ranks(process_set)
        first, self._next_batch = self._next_batch, self._next_batch + len(ids)
        self._schedules.record(first, batches)
        self._schedules.forget(forget)
        self._outbox.send(members, Run(ids, new, forget, begins_rounds, first, self._news(members)))
