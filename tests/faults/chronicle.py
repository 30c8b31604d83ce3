"""What the workers of a job have noted, and what must be true of it."""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.faults.jobs.models import SAMPLES
from tests.faults.replay import Replay

LARGEST_DIFFERENCE = 1e-9
LOST = re.compile(r"(\d+) steps? lost")


class ViolationError(Exception):
    """The job has broken a promise."""


@dataclass(frozen=True)
class Step:
    """``worker`` finished ``step`` in the world ``round`` of ``workers``, in the order of their ranks."""

    worker: str
    time: float
    step: int
    round: int
    epoch: int
    digest: str
    workers: tuple[str, ...]
    samples: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Hit:
    """``worker``, in the world ``round``, came by a trap at ``point``."""

    worker: str
    kind: str
    point: str
    time: float
    round: int
    pid: int


@dataclass(frozen=True)
class Result:
    """The values of a worker at the end of its training, in the world ``round`` of ``size`` ranks."""

    values: list[float]
    step: int
    round: int
    size: int


@dataclass
class Chronicle:
    """The steps of a job, by the files in ``folder``; :meth:`read` takes what is new in them.

    ``hits`` are those by traps. ``kept`` has each step as the job has it in the end: in the last world that made it.
    Raises ViolationError when the ranks of a world differ after a step.
    """

    folder: Path
    pids: dict[str, int] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    hits: list[Hit] = field(default_factory=list)
    last: dict[str, Step] = field(default_factory=dict)
    ends: dict[str, dict[int, Step]] = field(default_factory=dict)
    kept: dict[int, Step] = field(default_factory=dict)
    rounds: dict[int, Step] = field(default_factory=dict)
    _read: dict[Path, int] = field(default_factory=dict)

    def read(self):
        for path in sorted([*self.folder.glob("worker-*"), *self.folder.glob("driver")]):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                self._take(path.name, json.loads(line))

    def _take(self, worker, note):
        if "hit" in note:
            self.hits.append(Hit(worker, note.pop("hit"), **note))
        elif "pid" in note:
            self.pids[worker] = note["pid"]
        elif "result" in note:
            self.results[worker] = Result(note.pop("result"), **note)
        else:
            members, samples = tuple(note.pop("workers")), tuple(map(tuple, note.pop("samples")))
            self._add(Step(worker=worker, workers=members, samples=samples, **note))

    def _add(self, step):
        self.last[step.worker] = step
        self.ends.setdefault(step.worker, {})[step.round] = step
        first = self.rounds.setdefault(step.round, step)
        self.rounds[step.round] = min(first, step, key=lambda each: each.time)
        known = self.kept.get(step.step)
        if known is None or known.round < step.round:
            self.kept[step.step] = step
        elif known.round == step.round:
            check_agreement(known, step)

    @property
    def newest(self):
        """The first step in the newest world; None before the first one."""
        return self.rounds[max(self.rounds)] if self.rounds else None

    def latest_before(self, worker, round):
        """The last step that ``worker`` made in a world before ``round``; none if it was in no such world."""
        return [step for number, step in self.ends.get(worker, {}).items() if number < round][-1:]

    def check_epochs(self):
        """Each epoch that is over has seen each sample once, and the steps have no gap."""
        check_order(self.kept)
        over = max((step.epoch for step in self.kept.values()), default=0)
        for epoch in range(over):
            check_epoch(epoch, [step for step in self.kept.values() if step.epoch == epoch])


def check_agreement(one, other):
    """Two ranks of a world have made the same step."""
    if (one.digest, one.samples, one.epoch) != (other.digest, other.samples, other.epoch):
        raise ViolationError(
            f"{one.worker} and {other.worker} differ after step {one.step} in world {one.round}: {one}, {other}"
        )


def check_order(kept):
    """The steps are numbered from 1 on, and epochs do not descend."""
    if sorted(kept) != list(range(1, len(kept) + 1)):
        missing = sorted(set(range(1, max(kept) + 1)) - set(kept))
        raise ViolationError(f"no rank made the steps {missing}")
    epochs = [kept[number].epoch for number in sorted(kept)]
    if epochs != sorted(epochs):
        raise ViolationError(f"an epoch came after a later one: {epochs}")


def check_epoch(epoch, steps):
    """The ``steps`` of ``epoch`` had each sample once."""
    seen = Counter(sample for step in steps for samples in step.samples for sample in samples)
    wrong = {sample: seen[sample] for sample in range(SAMPLES) if seen[sample] != 1}
    if wrong:
        raise ViolationError(f"epoch {epoch} has not seen each sample once, but (sample: times) {wrong}")


def check_notice(outcome, log):
    """After nothing but notices no step was done again, and ``log`` tells of no lost rank."""
    worlds = range(outcome.before[0] + 1, outcome.after[0] + 1)
    told = [line for world in worlds for line in log.splitlines() if f"world {world}: " in line]
    if outcome.lost or any(" lost (" in line for line in told):
        raise ViolationError(f"a notice was not used: {outcome}")


def check_lost(log):
    """The driver tells of no step that was done again."""
    told = [line for line in log.splitlines() if (found := LOST.search(line)) and int(found[1])]
    if told:
        raise ViolationError(f"steps were done again: {told}")


def check_values(kept):
    """Each step gave the parameters that one process, alone, has after the same samples, bit for bit."""
    model = Replay()
    state = model.alone()
    for number in sorted(kept):
        step = kept[number]
        if model.repeat(state, step.samples) != step.digest:
            raise ViolationError(f"step {number} in world {step.round} gave other parameters than its samples: {step}")


def check_success(status, chronicle, tells_by_exit=True):
    """A driver that says success has seen all ranks of the last world return.

    ``tells_by_exit``: a rank that is killed after that has not ended with success.
    """
    if status != 0:
        return
    round, size = max(((each.round, each.size) for each in chronicle.results.values()), default=(-1, 1))
    killed = {hit.worker for hit in chronicle.hits if hit.kind == "kill"} if tells_by_exit else set()
    whole = {worker for worker, each in chronicle.results.items() if each.round == round} - killed
    if len(whole) < size:
        raise ViolationError(
            f"the driver says success, but of the {size} ranks of the last world only {sorted(whole)} returned"
        )


def check_result(chronicle, largest=LARGEST_DIFFERENCE):
    """The relative difference of the last parameters from those of a training that nothing disturbed."""
    found = np.array(next(iter(chronicle.results.values())).values)
    wanted = Replay().undisturbed(max(chronicle.kept)).ravel()
    difference = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    if not difference < largest:
        raise ViolationError(f"the parameters differ from those of an undisturbed training by {difference}, relatively")
    return difference
