"""The ranges of the engine in the profile of a framework."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest

from collectives.backends import phases
from tests.collectives.engine.job import run, running

pytestmark = pytest.mark.usefixtures("unhurried")


class Profile:
    """A profiler, and its ranges with those around them: of each thread, in the order in which they began."""

    def __init__(self):
        self.is_recording, self.found, self._open = False, [], threading.local()

    @contextmanager
    def named(self, name):
        path = (*getattr(self._open, "path", ()), name)
        self.found.append(path)
        self._open.path = path
        yield
        self._open.path = path[:-1]


@pytest.fixture
def profile(monkeypatch):
    made = Profile()
    monkeypatch.setattr(phases.PROFILER, "is_recording", lambda: made.is_recording)
    monkeypatch.setattr(phases.PROFILER, "named", made.named)
    return made


def test_batches_and_their_phases_are_ranges_while_a_profile_is_recorded(profile):
    def body(engine):
        for step in range(9):
            engine.barrier()
            if engine.topology.rank == 0:
                profile.is_recording = 3 <= step < 6
            engine.barrier()
            run(engine, np.ones(1 << 18), "x")
            if step == 2:
                before.append(len(profile.found))
            if step == 6:
                between.append(len(profile.found))

    before, between = [], []
    with running(2, shared_memory=True) as job:
        job.run(body)
        kept = [engine._loop._runner._reporter._spans for engine in job.engines]
    assert before == [0, 0]
    assert between[-1] == len(profile.found)
    assert profile.found.count(("SHM_ALLREDUCE",)) == 6
    inside = {path[-1] for path in profile.found if path[0] == "SHM_ALLREDUCE" and len(path) == 2}
    assert inside == {"MEMCPY_IN_FUSION_BUFFER", "COMBINE", "MEMCPY_OUT_FUSION_BUFFER", "WAIT_FOR_RANKS"}
    assert kept == [{}, {}]
