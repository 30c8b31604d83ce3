"""A campaign: random events against elastic jobs, and after each of them the question whether all is well."""

import random
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.faults.arena import LocalArena
from tests.faults.bout import Bout
from tests.faults.chronicle import (
    LARGEST_DIFFERENCE,
    ViolationError,
    check_lost,
    check_notice,
    check_result,
    check_values,
)
from tests.faults.events import DRIVERS, FATAL, Blow, draw, draw_end
from tests.faults.plans import Event, fitting

# An executor of Spark takes long on a busy machine.
START_SECONDS = 600.0
END_SHARE = 0.06
SHOWN = 250
# Keras computes a part in float32, on torch.
DIFFERENCES = {"keras": 1e-4}


class Campaign:
    """``events`` events, drawn by ``seed``, against jobs of ``ranks`` ranks; ``tell`` gets a line for each.

    With a ``script``, these Events are played instead. :attr:`played` has those that have happened.
    With ``samples="batches"`` there is one job, and :attr:`difference` tells how far its parameters are from those of a
    training that nothing disturbs. Otherwise its driver may be killed, or the job end or fail, and another job goes on.
    """

    def __init__(
        self,
        seed,
        events,
        ranks,
        model="numpy",
        samples="sampler",
        arena=LocalArena,
        tell=lambda line: None,
        script=None,
    ):
        self._random = random.Random(seed)
        self._script = script
        self._events, self._ranks, self._make, self._tell = len(script or ()) or events, ranks, arena, tell
        self._model, self._samples = model, samples
        self._text = "before it"
        self._has_killed_driver = False
        self.played = []
        self.outcomes = []
        self.difference = None

    def run(self):
        """Raises ViolationError, with the number of the event and the log, when a promise is broken."""
        while len(self.played) < self._events:
            with self._job() as job:
                self._play(job)

    def kill_spared_driver(self):
        """If no event has killed a driver that may be killed, kill that of one more job. Raises as :meth:`run`."""
        drivers = self._repertoire(self._make).drivers
        if drivers and not self._has_killed_driver:
            with self._job() as job:
                self._begun(job)
                self._kill_driver(job, Blow(self._random.choice(drivers)))

    @contextmanager
    def _job(self):
        with (
            tempfile.TemporaryDirectory(prefix="hvd-faults-") as folder,
            self._make(Path(folder), self._ranks, self._model, self._samples) as job,
            self._blamed(job),
        ):
            yield job

    def _repertoire(self, job):
        """With GlobalBatches, one job makes the whole training."""
        if self._samples == "sampler":
            return job.repertoire
        hindrances = tuple(kind for kind in job.repertoire.hindrances if kind not in FATAL)
        survived = tuple(kind for kind in job.repertoire.ambushes if kind not in FATAL)
        return replace(job.repertoire, drivers=(), ambushes=survived, hindrances=hindrances)

    @contextmanager
    def _blamed(self, job):
        try:
            yield
        except ViolationError as error:
            text = f"event {len(self.played)}, {self._text}: {error}\n{job.log[-6000:]}"
            raise ViolationError(text) from error

    def _play(self, job):
        """Events against one job, until they are enough or one ends it."""
        bout = self._begun(job)
        while len(self.played) < self._events:
            event = self._next(job, bout)
            self.played.append(event)
            self._text = str(event)
            if event.ends:
                return self._let_end(job, bout, event.ambush)
            if event.blows and event.blows[0].kind in DRIVERS:
                return self._kill_driver(job, event.blows[0])
            if not self._fire(job, bout, event):
                return self._end(job)
        self._let_end(job, bout)
        if self._samples == "batches":
            self.difference = check_result(job.chronicle, DIFFERENCES.get(self._model, LARGEST_DIFFERENCE))
            self._tell(f"the parameters differ from those without events by {self.difference:.1e}")

    def _fire(self, job, bout, event):
        """Whether the job goes on."""
        outcome = bout.fire(event)
        if outcome is None:
            said = [line for line in job.log.splitlines() if line.startswith("hvdrun: ")]
            self._tell(f"{len(self.played):4} {event}: the job has ended; {said[-1][:SHOWN] if said else 'silently'}")
            return False
        self.outcomes.append(outcome)
        if all(isinstance(part, Blow) and part.kind == "drain" for part in event.parts):
            check_notice(outcome, job.log)
        self._tell(f"{len(self.played):4} {outcome}")
        if outcome.lost:
            raise ViolationError(f"{outcome.lost} steps were done again")
        return True

    def _let_end(self, job, bout, ambush=None):
        bout.end(ambush)
        self._tell(f"{len(self.played):4} {ambush or 'nothing'} at the end of the job")
        self._end(job)

    # Draws.

    def _next(self, job, bout):
        """The next event, once the job has ranks for it; sometimes it comes while newcomers are still on their way."""
        if self._script:
            event = self._script[len(self.played)]
            if event.grow:
                bout.grow(min(event.grow, self._ranks))
            if any(part.kind == "stop" for part in event.parts):
                bout.settle()
            return fitting(event, bout.size)
        grow = self._drawn_size(bout)
        if grow:
            bout.grow(grow)
        if self._repertoire(job).drivers and self._random.random() < END_SHARE:
            ambush = draw_end(self._random, bout.size, self._repertoire(job))
            return Event((ambush,) if ambush else (), grow, ends=True)
        return Event(self._draw(job, bout), grow)

    def _drawn_size(self, bout):
        if bout.size > 1 and self._random.random() < 0.5:
            return 0
        return 2 if self._random.random() < 0.3 else self._ranks

    def _draw(self, job, bout):
        """A rank that is stopped for long must not become the only one meanwhile: nobody would miss it."""
        parts = draw(self._random, bout.size, self._ranks, self._repertoire(job), job.remote(bout.workers))
        while any(part.kind == "stop" for part in parts) and bout.settle():
            parts = draw(self._random, bout.size, self._ranks, self._repertoire(job), job.remote(bout.workers))
        return parts

    def _begun(self, job):
        bout = Bout(job, self._ranks)
        bout.await_size(self._ranks, START_SECONDS)
        return bout

    # Ends.

    def _kill_driver(self, job, blow):
        self._has_killed_driver = True
        job.kill_driver(blow.kind)
        self._end(job)
        self._tell(f"{len(self.played):4} {blow}: no process is left")

    def _end(self, job):
        job.chronicle.read()
        job.chronicle.check_epochs()
        if self._model == "numpy":
            check_values(job.chronicle.kept)
        if left := job.left():
            raise ViolationError(f"the job left behind: {', '.join(left)}")
        check_lost(job.log)
