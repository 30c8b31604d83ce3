"""A process that writes checkpoints is killed at random points: nothing that was complete is lost, or torn."""

import itertools
import os
import random
import signal
import sys
from contextlib import closing

import pytest

from hvd_cluster.storage.folders import LocalFolder, RemoteFolder, open_fsspec
from hvd_cluster.storage.series import Note, Series

KEEP = 2
MOST_LINES = 700  # of three checkpoints
MOST_TURNS = 20_000


def content(step):
    return f"{step} ".encode() * (1 + step * 7919 % 30_000)


def metric(step):
    return step * 7919 % 101


def write(series, step):
    series.add(content(step), "test", "bin", Note(step, metric=metric(step)), KEEP)


def write_until_killed(series, pipe, lines):
    """In a child: tell each step whose checkpoint is complete. It kills itself after so many ``lines``, if not None."""
    left = itertools.count(lines or 0, -1)

    def trace(frame, event, arg):
        if "hvd_cluster/storage" not in frame.f_code.co_filename:
            return None
        if event == "line" and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    found = series.find("latest", missing_ok=True)
    if lines is not None:
        sys.settrace(trace)
    for step in itertools.count(1 + (found.note.step if found else 0)):
        write(series, step)
        os.write(pipe, b"%d\n" % step)


def killed(series, random):
    """The steps that a child has told before its end."""
    reading, writing = os.pipe()
    lines = random.randrange(MOST_LINES) if random.random() < 0.6 else None
    child = os.fork()
    if child == 0:
        try:
            write_until_killed(series, writing, lines)
        finally:
            os._exit(1)  # only after an error
    os.close(writing)
    with closing(os.fdopen(reading)) as told:
        steps = [] if lines is not None else _steps_before_kill(child, told, random)
        steps += map(int, told)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    return steps


def _steps_before_kill(child, told, random):
    """Kill ``child`` somewhere in the checkpoint after some."""
    steps = [int(told.readline()) for _ in range(random.randrange(1, 4))]
    for _ in range(random.randrange(MOST_TURNS)):
        pass
    os.kill(child, signal.SIGKILL)
    return steps


def without_renames(path):
    """A file has its name while it is written, as in some file systems of fsspec."""
    pytest.importorskip("fsspec")
    return RemoteFolder(*open_fsspec(f"file://{path}", {}, ""), f"file://{path}")


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("kind", "kills"), [(LocalFolder, 200), (without_renames, 60)])
def test_no_kill_loses_a_checkpoint_that_was_complete(tmp_path, kind, kills):
    chance, last, best = random.Random(7), 0, float("inf")
    series = Series(kind(tmp_path))
    for _ in range(kills):
        for last in killed(series, chance):
            best = min(best, metric(last))
        found = series.find("latest", missing_ok=True)
        step = found.note.step if found else 0
        assert step in (last, last + 1)
        if found:
            last, best = step, min(best, metric(step))
            assert series.read(found) == content(step)
            finest = series.find("best")
            assert finest.note.metric == best
            assert series.read(finest) == content(finest.note.step)
    assert last > kills / 2
    write(series, last + 1)
    kept = {last, last + 1, series.find("best").note.step}
    assert sorted(int(name.split("-")[2].partition(".")[0]) for name in os.listdir(tmp_path)) == sorted([*kept] * 2)
