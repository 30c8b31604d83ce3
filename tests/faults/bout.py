"""The events against one job: what happens to it, and whether it goes on."""

import math
import time
from collections import deque
from dataclasses import dataclass

from tests.faults.arena import POLL_SECONDS
from tests.faults.chronicle import ViolationError, check_success
from tests.faults.events import ENDS, FATAL
from tests.faults.jobs.driver import NAME as DRIVER

RECOVERY_SECONDS = 60.0
NEWCOMER_SECONDS = 180.0
# A trap that nobody has come by for so long is removed: the way that was drawn did not lead there.
AMBUSH_SECONDS = 20.0
LATE_AMBUSH_SECONDS = 60.0
# A driver looks for other slots once a second; surplus ranks leave at a commit.
OFFER_SECONDS = 3.0
SEEN_OFFERS = 2
FLAP_SECONDS = 0.4
# The driver waits for the end of a process that has raised for 5 s.
VERDICT_SECONDS = 7.0
SECOND_HIT_SECONDS = 0.5


@dataclass(frozen=True)
class Outcome:
    """The effect of an event: the worlds before and after, the ``pause`` in seconds, and the repeated steps.

    ``missed``: nobody came by the ambush.
    """

    text: str
    before: tuple[int, int]
    after: tuple[int, int]
    pause: float
    lost: int
    missed: bool = False

    def __str__(self):
        (old, before), (new, after) = self.before, self.after
        change = f"world {old}: {before} ranks -> world {new}: {after} ranks"
        missed = ", nobody came by" if self.missed else ""
        return f"{self.text:44} {change:44} pause {self.pause:5.2f} s, {self.lost} steps lost{missed}"


class Bout:
    """The events against one ``job``, which may have ``most`` ranks."""

    def __init__(self, job, most):
        self._job, self._most, self._slots = job, most, most
        self._offers = deque([-math.inf] * SEEN_OFFERS, SEEN_OFFERS)
        self._known_hits = 0

    @property
    def size(self):
        return len(self.workers)

    @property
    def workers(self):
        return self._newest.workers

    @property
    def _newest(self):
        return self._job.chronicle.newest

    def grow(self, size):
        """Let the job have its slots for the next event, and ``size`` ranks at least."""
        self._offer(self._most)
        self.await_size(size, NEWCOMER_SECONDS)

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

    # One event.

    def fire(self, event):
        """Let ``event`` happen, and wait until the job has finished a step after it: its outcome.

        None if the job has ended instead, and may: its driver was killed, or says that the job has failed.
        """
        before, begin, blows, ambush = self._newest, time.monotonic(), event.blows, event.ambush
        gone = {before.workers[rank] for blow in blows for rank in blow.removes}
        sizes = self._sizes(blows)
        if ambush and not ambush.late:
            self._lay(ambush, before.workers)
        since = begin + self._strike(blows, before.workers, begin)
        if ambush and ambush.late:
            self._await_step(gone, before, sizes, since)
            self._lay(ambush, before.workers)
        hits = self._await_hits(ambush) if ambush else []
        if any(hit.worker == DRIVER and hit.kind == "kill" for hit in hits):
            self._job.await_end()
            return None
        since = max([since, *(self._end_hit(ambush, hit) for hit in hits)])
        gone |= {hit.worker for hit in hits if ambush.removes}
        if self._may_end(blows, hits) and self._has_ended(before, since):
            return None
        first = self._await_step(gone, before, sizes, since)
        self._continue(blows, before.workers, begin)
        return self._outcome(event, before, gone, first.time - (since if ambush else begin), bool(ambush and not hits))

    def _outcome(self, event, before, gone, pause, missed):
        after = self._newest
        worlds = (before.round, len(before.workers)), (after.round, len(after.workers))
        return Outcome(str(event), *worlds, pause, self._lost(after, gone), missed)

    def _strike(self, blows, workers, begin):
        """How many seconds after ``begin`` the job need not make steps."""
        calm = 0.0
        for blow in blows:
            self._sleep_until(begin + blow.at)
            self._begin_blow(blow, workers)
        for blow in blows:
            if blow.ends_first:
                calm = self._end_blow(blow, workers, begin)
        takes_long = any(blow.kind in {"newcomer", "flap"} for blow in blows)
        return max(calm, time.monotonic() - begin if takes_long else 0.0)

    def _begin_blow(self, blow, workers):
        if blow.kind == "offer":
            self._offer(blow.target)
        elif blow.kind == "newcomer":
            self._kill_newcomer()
        elif blow.kind == "flap":
            self._flap(time.monotonic() + blow.seconds)
        elif blow.kind == "all":
            for worker in workers:
                self._job.hit("kill", worker)
        else:
            self._job.hit(blow.kind, workers[blow.target])

    def _end_blow(self, blow, workers, begin):
        self._sleep_until(begin + blow.seconds)
        if blow.kind == "flap":
            self._offer(self._most)
        else:
            self._job.hit(ENDS[blow.kind], workers[blow.target])
        return blow.seconds

    def _continue(self, blows, workers, begin):
        for blow in blows:
            if blow.seconds and not blow.ends_first:
                self._sleep_until(begin + blow.seconds)
                self._job.hit(ENDS.get(blow.kind, "heal"), workers[blow.target])

    def _flap(self, deadline):
        """The discovery gives something else each time, or nothing."""
        while time.monotonic() < deadline:
            self._job.flap()
            self._sleep_until(min(deadline, time.monotonic() + FLAP_SECONDS))

    def _kill_newcomer(self):
        self._offer(self._slots)
        known = set(self._job.chronicle.pids)
        self._until(lambda: set(self._job.chronicle.pids) > known, "starts a newcomer", NEWCOMER_SECONDS)
        self._job.hit("kill", sorted(set(self._job.chronicle.pids) - known)[0])

    # Ambushes.

    def _lay(self, ambush, workers):
        self._known_hits = len(self._job.chronicle.hits)
        self._job.lay(ambush, workers[ambush.spared] if ambush.spared >= 0 else "")

    def _await_hits(self, ambush):
        """Those whom the traps have hit; then there are no traps any more."""
        deadline = time.monotonic() + (LATE_AMBUSH_SECONDS if ambush.late else AMBUSH_SECONDS)
        while not self._new_hits() and time.monotonic() < deadline and self._job.running() is None:
            time.sleep(POLL_SECONDS)
        if ambush.count > 1:
            self._sleep_until(time.monotonic() + SECOND_HIT_SECONDS)
        self._job.unlay()
        return self._new_hits()

    def _new_hits(self):
        self._job.chronicle.read()
        return self._job.chronicle.hits[self._known_hits :]

    def _end_hit(self, ambush, hit):
        """When the job must go on."""
        if hit.kind not in ENDS:
            return hit.time
        self._sleep_until(hit.time + ambush.seconds)
        self._job.release(ENDS[hit.kind], hit)
        return time.monotonic()

    def _may_end(self, blows, hits):
        return bool({each.kind for each in (*blows, *hits)} & FATAL)

    def _has_ended(self, before, since):
        """Whether the job has ended, after something that no job need survive; its driver must not call it a success.

        If it has not, it goes on without those that were in it.
        """

        def is_decided():
            return self._job.running() is not None or self._goes_on(since)

        deadline = time.monotonic() + RECOVERY_SECONDS
        while not is_decided() and time.monotonic() < deadline:
            self._job.chronicle.read()
            time.sleep(POLL_SECONDS)
        status = self._job.running()
        if status == 0:
            raise ViolationError(f"world {before.round} has failed, and the driver calls that a success")
        return status is not None

    def _goes_on(self, since):
        return max(step.time for step in self._job.chronicle.last.values()) > since + VERDICT_SECONDS

    # Steps.

    def _sizes(self, blows):
        """The numbers of ranks that the job may have next."""
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

    # The end.

    def end(self, ambush=None):
        """Let the training end, with ``ambush`` on its way; its status must say what has happened."""
        if ambush:
            self._lay(ambush, self.workers)
        self._job.begin_end()
        hits = self._hits_of_end(ambush) if ambush else []
        status = self._job.await_end()
        self._job.unlay()
        self._job.chronicle.read()
        harmless = all(hit.kind == "clock" for hit in hits)
        if status and harmless:
            raise ViolationError(f"the driver ended with {status}")
        check_success(status, self._job.chronicle, self._job.tells_by_exit)
        if status == 0 and harmless:
            self._check_results()

    def _hits_of_end(self, ambush):
        deadline = time.monotonic() + RECOVERY_SECONDS
        while self._job.running() is None and len(self._new_hits()) < ambush.count and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for hit in self._new_hits():
            self._end_hit(ambush, hit)
        return self._new_hits()

    def _check_results(self):
        """The ranks of the last world have returned, with the same parameters; it may have had no step to make."""
        chronicle = self._job.chronicle
        later = {worker for worker, result in chronicle.results.items() if result.round > self._newest.round}
        wanted = {*self._newest.workers, *later}
        if not chronicle.results or not set(chronicle.results) <= wanted:
            raise ViolationError(f"{sorted(chronicle.results)} returned, but the last world is of {sorted(wanted)}")
        if len({str(result.values) for result in chronicle.results.values()}) > 1:
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
