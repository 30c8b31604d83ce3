"""Ends of runs of kernels, on an engine that is not real."""

import threading
from types import SimpleNamespace

import pytest
import tensorflow as tf

from hvd_cluster.graphs import completer as module
from hvd_cluster.graphs.lanes import Lane, Lanes
from hvd_cluster.graphs.run import Run
from hvd_cluster.tensorflow.errors import ABANDONED, as_status
from hvd_cluster.tensorflow.kernels import entry

SECONDS = 20.0


class FakeEngine:
    """Waits until it is roused."""

    def __init__(self):
        self.waits = threading.Event()
        self.watches = []
        self._changed = threading.Condition()

    def await_any(self, watch):
        self.watches.append(watch)
        self.waits.set()
        with self._changed:
            assert self._changed.wait_for(lambda: watch.done, SECONDS)

    def abandon(self, works):
        for work in works:
            work.done = True
        self.rouse()

    def rouse(self):
        with self._changed:
            self._changed.notify_all()

    def wait_for_caller(self):
        assert self.waits.wait(SECONDS)


class BrokenEngine(FakeEngine):
    def await_any(self, watch):
        raise ValueError("broken")


class FakeContext:
    iteration = 0

    def __init__(self, step):
        self.step = step
        self.code = None

    def end(self):
        pass

    def report(self, error=None):
        self.code = (ABANDONED if error is None else as_status(error))[0]


class Kernel:
    """One whose start is another one's."""


class FakeWork:
    done = False

    def outcome(self):
        if not self.done:
            raise AssertionError("its outcome is not there yet")


class FailedWork:
    done = True

    def outcome(self):
        raise ValueError("failed")


def run_of(engine, work, step=1):
    """A run, and an event that tells its end."""
    kernel = SimpleNamespace(finish=lambda context, engine, works: None)
    ended = threading.Event()
    return Run(kernel, FakeContext(step), engine, [work], ended.set, lambda: None, step), ended


def code_of(run, ended):
    assert ended.wait(SECONDS)
    return run.context.code


@pytest.fixture
def completer(monkeypatch):
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.01)
    completer = module.Completer()
    yield completer
    for step in (1, 2):
        completer.give_up(step)


def test_a_run_of_a_failed_step_ends_even_if_it_comes_late(completer):
    engine = FakeEngine()
    failed = run_of(engine, FailedWork())
    completer.follow(failed[0])
    assert code_of(*failed) == tf.errors.ABORTED
    late, other = run_of(engine, FakeWork()), run_of(engine, FakeWork(), step=2)
    completer.follow(other[0])
    completer.follow(late[0])
    assert code_of(*late) == tf.errors.CANCELLED
    assert not other[1].is_set()


def test_a_run_whose_end_begins_another_one_of_its_step(completer):
    """As one that waits for its turn in a lane."""
    engine = FakeEngine()
    second = run_of(engine, FakeWork())
    first, _ = run_of(engine, FailedWork())
    first.leave = lambda: completer.follow(second[0])
    completer.follow(first)
    assert code_of(*second) == tf.errors.CANCELLED


def test_a_step_is_given_up_while_the_thread_waits(completer):
    engine = FakeEngine()
    run = run_of(engine, FakeWork())
    completer.follow(run[0])
    engine.wait_for_caller()
    completer.give_up(2)
    assert not run[1].is_set()
    completer.give_up(1)
    assert code_of(*run) == tf.errors.CANCELLED


def test_a_work_that_is_done_when_it_comes_is_seen(completer):
    """The engine has woken the thread before the run came, and will not do so again."""
    engine, done = FakeEngine(), FakeWork()
    done.done = True
    completer.follow(run_of(engine, FakeWork())[0])
    engine.wait_for_caller()
    late = run_of(engine, done, step=2)
    completer.follow(late[0])
    assert code_of(*late) is None


def test_works_of_two_engines_are_not_watched_together(completer):
    old, new = FakeEngine(), FakeEngine()
    works = [FakeWork(), FakeWork()]
    runs = [run_of(engine, work, step) for step, (engine, work) in enumerate(zip((old, new), works, strict=True), 1)]
    for run, _ in runs:
        completer.follow(run)
    for engine, work, run in zip((old, new), works, runs, strict=True):
        engine.wait_for_caller()
        work.done = True
        engine.rouse()
        assert code_of(*run) is None
    assert all(watch.works == [works[0]] for watch in old.watches)
    assert all(watch.works == [works[1]] for watch in new.watches)


def test_all_runs_fail_with_the_thread_and_the_next_starts_another(completer, caplog):
    runs = [run_of(BrokenEngine(), FakeWork()) for _ in range(2)]
    for run, _ in runs:
        completer.follow(run)
    assert {code_of(*run) for run in runs} <= {tf.errors.ABORTED, tf.errors.CANCELLED}
    assert "ValueError: broken" in caplog.text
    done = FakeWork()
    done.done = True
    healthy = run_of(FakeEngine(), done, step=2)
    completer.follow(healthy[0])
    assert code_of(*healthy) is None


def test_the_queue_of_a_lane_is_not_submitted_after_a_failure(completer, monkeypatch):
    """Every start fails; only the first one is tried."""
    started, codes = [], []

    def start(*arguments):
        started.append(arguments)
        raise ValueError("refused")

    monkeypatch.setattr(entry, "completer", completer)
    monkeypatch.setattr(entry, "_lanes", lanes := Lanes())
    monkeypatch.setattr(entry.basics, "engine", FakeEngine)
    kernel, lane = Kernel(), Lane()
    kernel.start = start
    contexts = [FakeContext(7) for _ in range(3)]
    lanes.enter((kernel, lane), lambda: None)
    for context in contexts:
        done = lambda context=context: codes.append(context.code)  # noqa: E731
        lanes.enter((kernel, lane), lambda context=context, done=done: entry._submit(kernel, context, done, lane))
    lanes.leave((kernel, lane))
    assert len(started) == 1
    assert codes == [tf.errors.ABORTED, tf.errors.CANCELLED, tf.errors.CANCELLED]
