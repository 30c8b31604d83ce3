"""A third decider: it records the batches of a step, and later runs a whole step in one round.

It is an example of what a decider needs: its file, and a line in ``collectives/engine/assembly.py``.
"""

from collectives.controller.process_sets import GLOBAL
from collectives.controller.schedules import Schedule
from collectives.controller.submissions import ONCE
from collectives.engine.bypass import Outer, ScheduledTrial, Trial


class Planned(Outer):
    """A *step* is all batches of the global set until one of its tensors runs again; the last one is the plan.

    The ranks record the same steps, because they run the same batches in the same order. So the number of a plan's
    first batch stands for the plan. When all tensors of the plan are in flight and a caller waits, this rank attempts
    the whole plan. As long as only some of them are, and no caller waits, it holds them back. ``steps`` counts the
    plans that have run.
    """

    def __init__(self, rounds, fallback):
        super().__init__(fallback)
        self.rounds = rounds
        self.plan = None
        self.steps = 0
        self._lane = rounds.lane()
        self._version = 0
        self._restart(0)

    def next(self):
        """See :class:`Decider`."""
        mine = set(self.worker.unreported()) if self.rounds.on and self.plan is not None else None
        if mine and mine <= ids_of(self.plan.batches):
            if not self.worker.is_awaited:
                return None
            if mine == ids_of(self.plan.batches):
                return Recorded(ScheduledTrial(self.rounds, self._lane, self.plan), self, is_plan=True)
        trial = self.fallback.next()
        return None if trial is None else Recorded(trial, self)

    def ran(self, batch):
        """See :class:`Decider`."""
        if batch.parameters.version != self._version:
            self._version, self.plan = batch.parameters.version, None
            self._restart(batch.id)
        self.record(batch.id, batch.responses)
        if self.plan is not None and len(self._step) + 1 == len(self.plan.batches) and not self.rounds.on:
            self.rounds.link.want_rounds()  # the next batch is the last one of the step
        self.fallback.ran(batch)

    def record(self, number, batch):
        """All ranks have run the batch ``number``."""
        request = batch[0].request
        if request.operation in ONCE:
            self.plan = None
            self._restart(number + 1)
        elif request.process_set == GLOBAL:
            if ids_of([batch]) & ids_of(self._step):
                self.plan = Schedule(self._first, tuple(self._step)) if len(self._step) > 1 else None
                self._restart(number)
            self._step.append(batch)

    def _restart(self, first):
        self._first, self._step = first, []


def ids_of(batches):
    """The ids of all tensors of ``batches``."""
    return {response.id for batch in batches for response in batch}


class Recorded(Trial):
    """Runs ``trial``, and lets ``planned`` record its batches."""

    def __init__(self, trial, planned, is_plan=False):
        self.first, self.batches = trial.first, trial.batches
        self._trial, self._planned, self._is_plan = trial, planned, is_plan

    def run(self, attempt):
        """See :class:`Trial`."""
        has_run = self._trial.run(attempt)
        if has_run:
            self._planned.steps += self._is_plan
            for number, batch in enumerate(self.batches, self.first):
                self._planned.record(number, batch)
        return has_run
