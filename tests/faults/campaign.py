"""A campaign: random events against elastic jobs, and after each of them the question whether all is well."""

import math
import random
import re
import tempfile
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults.arena import POLL_SECONDS, LocalArena
from tests.faults.chronicle import ViolationError, check_notice, check_result, check_values
from tests.faults.events import DRIVERS, ENDS, Blow, draw

# An executor of Spark takes long on a busy machine.
START_SECONDS = 300.0
RECOVERY_SECONDS = 60.0
NEWCOMER_SECONDS = 180.0
# A driver looks for other slots once a second; surplus ranks leave at a commit.
OFFER_SECONDS = 3.0
SEEN_OFFERS = 2
CALM_STEPS = 5
LOST = re.compile(r"(\d+) steps? lost")


@dataclass(frozen=True)
class Outcome:
    """What an event did: the worlds before and after, the ``pause`` in seconds, and the repeated steps."""

    text: str
    before: tuple[int, int]
    after: tuple[int, int]
    pause: float
    lost: int

    def __str__(self):
        (old, before), (new, after) = self.before, self.after
        change = f"world {old}: {before} ranks -> world {new}: {after} ranks"
        return f"{self.text:44} {change:44} pause {self.pause:5.2f} s, {self.lost} steps lost"


class Campaign:
    """``events`` events, drawn by ``seed``, against jobs of ``ranks`` ranks; ``tell`` gets a line for each.

    :attr:`lost` counts the steps that the drivers have told as lost, also between the events.
    With ``samples="batches"`` there is one job, and :attr:`difference` tells how far its parameters are from those of a
    training that nothing disturbs. Otherwise its driver may be killed, and another job goes on.
    """

    def __init__(self, seed, events, ranks, model="numpy", samples="sampler", arena=LocalArena, tell=lambda line: None):
        self._random = random.Random(seed)
        self._events, self._ranks, self._make, self._tell = events, ranks, arena, tell
        self._model, self._samples = model, samples
        self._number = 0
        self._text = "before it"
        self._has_killed_driver = False
        self.outcomes = []
        self.lost = 0
        self.difference = None

    def run(self):
        """Raises ViolationError, with the number of the event and the log, when a promise is broken."""
        while self._number < self._events:
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
        return job.repertoire if self._samples == "sampler" else replace(job.repertoire, drivers=())

    @contextmanager
    def _blamed(self, job):
        try:
            yield
        except ViolationError as error:
            raise ViolationError(f"event {self._number}, {self._text}: {error}\n{job.log[-6000:]}") from error

    def _play(self, job):
        """Events against one job, until they are enough or one ends it."""
        bout = self._begun(job)
        while self._number < self._events:
            self._number += 1
            bout.prepare(self._random)
            blows = self._draw(job, bout)
            self._text = " + ".join(map(str, blows))
            if blows[0].kind in DRIVERS:
                self._kill_driver(job, blows[0])
                return
            self.outcomes.append(bout.fire(blows, self._text))
            if all(blow.kind == "drain" for blow in blows):
                check_notice(self.outcomes[-1], job.log)
            self._tell(f"{self._number:4} {self.outcomes[-1]}")
        if status := job.end():
            raise ViolationError(f"the driver ended with {status}")
        bout.check_results()
        if self._samples == "batches":
            self.difference = check_result(job.chronicle)
            self._tell(f"the parameters differ from those without events by {self.difference:.1e}")
        self._end(job)

    def _draw(self, job, bout):
        """A rank that is stopped for long must not become the only one meanwhile: nobody would miss it."""
        blows = draw(self._random, bout.size, self._ranks, self._repertoire(job), job.remote(bout.workers))
        while any(blow.kind == "stop" for blow in blows) and bout.settle():
            blows = draw(self._random, bout.size, self._ranks, self._repertoire(job), job.remote(bout.workers))
        return blows

    def _begun(self, job):
        bout = Bout(job, self._ranks)
        bout.await_size(self._ranks, START_SECONDS)
        return bout

    def _kill_driver(self, job, blow):
        self._has_killed_driver = True
        job.kill_driver(blow.kind)
        self._end(job)
        self._tell(f"{self._number:4} {blow}: no process is left")

    def _end(self, job):
        self.lost += sum(map(int, LOST.findall(job.log)))
        job.chronicle.read()
        job.chronicle.check_epochs()
        if self._model == "numpy":
            check_values(job.chronicle.kept)
        if left := job.left():
            raise ViolationError(f"the job left behind: {', '.join(left)}")


class Bout:
    """The events against one ``job``, which may have ``most`` ranks."""

    def __init__(self, job, most):
        self._job, self._most, self._slots = job, most, most
        self._offers = deque([-math.inf] * SEEN_OFFERS, SEEN_OFFERS)

    @property
    def size(self):
        return len(self.workers)

    @property
    def workers(self):
        return self._newest.workers

    @property
    def _newest(self):
        return self._job.chronicle.newest

    def prepare(self, random):
        """Let the job have ranks for the next event; sometimes it comes while newcomers are still on their way."""
        if self.size == 1 or random.random() < 0.5:
            self._offer(self._most)
            self.await_size(2 if random.random() < 0.3 else self._most, NEWCOMER_SECONDS)

    def _offer(self, slots):
        """An arena has another number for the next two offers, and then the first one again: it must be news."""
        self._sleep_until(self._offers[0] + OFFER_SECONDS)
        self._slots = slots
        self._offers.append(time.monotonic())
        self._job.offer(slots)

    def settle(self):
        """Wait until the last offer has had its effect; whether that was still to come."""
        rest = self._offers[-1] + OFFER_SECONDS - time.monotonic()
        self._sleep_until(self._offers[-1] + OFFER_SECONDS)
        self._until(self._is_calm, "trains on", RECOVERY_SECONDS)
        return rest > 0

    def await_size(self, size, seconds):
        """Wait for steps in a world of at least ``size`` ranks."""
        self._until(
            lambda: self._newest and self.size >= size and self._is_calm(), f"trains with {size} ranks", seconds
        )

    def _is_calm(self):
        last = [self._job.chronicle.last.get(worker) for worker in self._newest.workers]
        return all(step and step.round == self._newest.round for step in last)

    def fire(self, blows, text):
        """Strike the ``blows``, and wait until the job has finished a step after them."""
        before, begin = self._newest, time.monotonic()
        gone = {before.workers[rank] for blow in blows for rank in blow.removes}
        seconds = self._strike(blows, before.workers, begin)
        first = self._await_step(gone, before, self._after(blows, before), begin + seconds)
        self._continue(blows, before.workers, begin)
        after = self._newest
        return Outcome(
            text,
            (before.round, len(before.workers)),
            (after.round, len(after.workers)),
            first.time - begin,
            self._lost(after, gone),
        )

    def _strike(self, blows, workers, begin):
        """How many seconds after ``begin`` the job need not make steps."""
        calm = 0.0
        for blow in blows:
            self._sleep_until(begin + blow.at)
            if blow.kind == "offer":
                self._offer(blow.target)
            elif blow.kind == "newcomer":
                self._kill_newcomer()
            else:
                self._job.hit(blow.kind, workers[blow.target])
        for blow in blows:
            if blow.ends_first:
                calm = blow.seconds
                self._sleep_until(begin + blow.seconds)
                self._job.hit(ENDS[blow.kind], workers[blow.target])
        return max(calm, time.monotonic() - begin if any(blow.kind == "newcomer" for blow in blows) else 0.0)

    def _continue(self, blows, workers, begin):
        for blow in blows:
            if blow.seconds and not blow.ends_first:
                self._sleep_until(begin + blow.seconds)
                self._job.hit(ENDS.get(blow.kind, "heal"), workers[blow.target])

    def _kill_newcomer(self):
        self._offer(self._slots)
        known = set(self._job.chronicle.pids)
        self._until(lambda: set(self._job.chronicle.pids) > known, "starts a newcomer", NEWCOMER_SECONDS)
        self._job.hit("kill", sorted(set(self._job.chronicle.pids) - known)[0])

    def _after(self, blows, before):
        """The sizes that the job may have next."""
        offers = [blow.target for blow in blows if blow.kind == "offer"]
        return range(1, max(offers[-1], 1) + 1) if offers else range(1, self._most + 1)

    def _await_step(self, gone, before, sizes, since):
        """The first step after ``since`` in a world without ``gone``, of one of ``sizes``."""
        found = []

        def went_on():
            newest = self._newest
            if gone & set(newest.workers) or len(newest.workers) not in sizes:
                return False
            steps = [step for step in self._job.chronicle.last.values() if step.round == newest.round]
            late = [step for step in (newest, *steps) if step.time > since]
            found[:] = sorted(late, key=lambda step: step.time)[:1]
            return bool(found)

        self._until(went_on, f"goes on without {', '.join(sorted(gone)) or 'a loss'}", RECOVERY_SECONDS)
        return found[0]

    def _lost(self, after, gone):
        """The steps that a rank of the present world made before it, and the job made again in it."""
        before = [
            step.step
            for worker in after.workers
            if worker not in gone
            for step in self._job.chronicle.latest_before(worker, after.round)
        ]
        return max(0, max(before, default=0) + 1 - after.step)

    def check_results(self):
        """The ranks of the last world have returned, with the same parameters."""
        chronicle = self._job.chronicle
        chronicle.read()
        wanted = set(self._newest.workers)
        if not chronicle.results or not set(chronicle.results) <= wanted:
            raise ViolationError(f"{sorted(chronicle.results)} returned, but the last world is of {sorted(wanted)}")
        if len({str(result) for result in chronicle.results.values()}) > 1:
            raise ViolationError(f"the workers returned other parameters: {chronicle.results}")

    def _sleep_until(self, moment):
        time.sleep(max(0.0, moment - time.monotonic()))

    def _until(self, condition, what, seconds):
        deadline = time.monotonic() + seconds
        while True:
            self._job.chronicle.read()
            if condition():
                return
            status = self._job.running()
            if status is not None:
                raise ViolationError(f"the driver ended with {status} before the job {what}")
            if time.monotonic() > deadline:
                raise ViolationError(
                    f"within {seconds:g} s there was no sign that the job {what}; newest: {self._newest}"
                )
            time.sleep(POLL_SECONDS)
