"""A world whose ranks may agree without the coordinator, on a vote that a test drives step by step."""

from collections import defaultdict
from dataclasses import dataclass, field

from collectives.controller.worker import Batch
from tests.collectives.controller.negotiation_simulation import World


@dataclass
class BypassWorld(World):
    """A rank attempts a schedule or declines, round by round, as the engine does.

    While a rank waits in a round, it neither sends nor receives. ``bypassed[rank]`` has the schedules that it ran so.
    """

    values: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))

    def __post_init__(self):
        super().__post_init__()
        self.on = [False] * self.size
        self.round = [0] * self.size
        self.withdrawn = [0] * self.size
        self.requested = [0] * self.size
        self.attempt = [None] * self.size
        self.bypassed = [[] for _ in range(self.size)]

    def flush(self, rank):
        if self.attempt[rank] is not None:
            return self._conclude(rank)
        worker = self.workers[rank]
        if self.on[rank]:
            schedule = worker.schedule()
            if schedule is not None:
                self.attempt[rank] = schedule
                self._enter(rank, schedule.number)
                return True
            if worker.has_news:
                self.decline(rank)
        return super().flush(rank)

    def rise(self, rank):
        return self.attempt[0] is None and super().rise(rank)

    def decide(self):
        return self.attempt[0] is None and super().decide()

    def fall(self, rank):
        if self.attempt[rank] is not None:
            return False
        before = len(self.batches[rank])
        fell = super().fall(rank)
        for batch in self.batches[rank][before:]:
            if batch.begins_rounds:
                self._begin(rank)
        return fell

    def decline(self, rank):
        """Decline the bypass, as the engine does before it sends a message to the coordinator."""
        if self.on[rank]:
            self._enter(rank, 0)
            self.on[rank] = False

    def complain(self, rank):
        """A rank that waits in a round asks the others to decline: rank 0, or on rank 0 all."""
        asked = range(self.size) if rank == 0 else (0,)
        news = self.attempt[rank] is not None and any(self.requested[peer] < self.round[rank] for peer in asked)
        if news:
            for peer in asked:
                self.requested[peer] = max(self.requested[peer], self.round[rank])
        return news

    def withdraw(self, rank):
        """A rank hears that others wait."""
        news = self.attempt[rank] is None and self.withdrawn[rank] < self.requested[rank]
        if news:
            self.withdrawn[rank] = self.requested[rank]
            if self.round[rank] < self.withdrawn[rank]:
                self.decline(rank)
        return news

    def settle(self):
        """As in a world; and ranks that still wait in a round complain."""
        moved = True
        while moved:
            super().settle()
            moved = any([move(rank) for move in (self.complain, self.withdraw) for rank in range(self.size)])
        assert self.attempt == [None] * self.size, "a rank waits in a round for ever"

    def _enter(self, rank, value):
        self.round[rank] += 1
        self.values[self.round[rank]][rank] = value

    def _begin(self, rank):
        self.on[rank] = True
        is_changing = rank == 0 and self.coordinator.is_changing
        if self.round[rank] < self.withdrawn[rank] or not self.workers[rank].is_idle or is_changing:
            self.decline(rank)

    def _conclude(self, rank):
        schedule, values = self.attempt[rank], self.values[self.round[rank]]
        if any(value != schedule.number for value in values.values()):
            self.attempt[rank], self.on[rank] = None, False
            return True
        if len(values) < self.size:
            return False
        self._run(rank, schedule)
        return True

    def _run(self, rank, schedule):
        worker, self.attempt[rank] = self.workers[rank], None
        for number, responses in enumerate(schedule.batches, worker.next_batch):
            self.log[rank].append(("run", *responses))
            self.batches[rank].append(Batch(tuple(responses), False, number, worker.parameters))
            self.in_flight[rank] -= {response.request.key for response in responses}
        worker.finish_schedule(schedule)
        self.bypassed[rank].append(schedule)
        if rank == 0:
            self.coordinator.use(schedule)
