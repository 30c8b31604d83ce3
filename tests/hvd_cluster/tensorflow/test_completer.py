"""Ends of runs of kernels, on an engine that is not real."""

import threading
from types import SimpleNamespace

import pytest
import tensorflow as tf

from collectives.api import InvalidRequestError, MismatchError
from hvd_cluster.graphs import beginnings
from hvd_cluster.graphs import completer as module
from hvd_cluster.graphs.lanes import Lane, Lanes
from hvd_cluster.graphs.run import NodeRun
from hvd_cluster.tensorflow.errors import ABANDONED, as_status

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

    def synchronize(self, work):
        """An abandoned one is done."""

    def submit(self, *arguments):
        raise InvalidRequestError("nobody meets here")

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

    def has_entered(self, engine):
        return True


class FakeWork:
    done = False

    def outcome(self):
        if not self.done:
            raise AssertionError("its outcome is not there yet")


class FailedWork:
    done = True

    def outcome(self):
        raise ValueError("failed")


class MismatchedWork:
    done = True

    def outcome(self):
        raise MismatchError("the ranks disagree", "a")


def disagreement(engine, step):
    """A run that ends in a settlement."""
    run, _ = run_of(engine, MismatchedWork(), step)
    run.kernel.process_set = SimpleNamespace(process_set_id=0)
    return run


def run_of(engine, work, step=1):
    """A run, and an event that tells its end."""
    kernel = SimpleNamespace(finish=lambda context, engine, works: None)
    ended = threading.Event()
    return NodeRun(kernel, FakeContext(step), engine, [work], ended.set, lambda: None, step), ended


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


def refusing(monkeypatch, completer, starts):
    """The lanes, and a kernel whose starts fail; each is noted in ``starts``. ``beginnings`` uses ``completer``."""

    def start(*arguments):
        starts.append(arguments)
        raise ValueError("refused")

    monkeypatch.setattr(beginnings, "completer", completer)
    monkeypatch.setattr(beginnings, "_lanes", lanes := Lanes())
    monkeypatch.setattr(beginnings.basics, "engine", FakeEngine)
    kernel = Kernel()
    kernel.start = start
    return lanes, kernel


def test_the_queue_of_a_lane_is_not_submitted_after_a_failure(completer, monkeypatch):
    """Every start fails; only the first one is tried."""
    started, codes = [], []
    (lanes, kernel), lane = refusing(monkeypatch, completer, started), Lane()
    contexts = [FakeContext(7) for _ in range(3)]
    lanes.enter((kernel, lane), lambda: None)
    for context in contexts:
        done = lambda context=context: codes.append(context.code)  # noqa: E731
        lanes.enter((kernel, lane), lambda context=context, done=done: beginnings._submit(kernel, context, done, lane))
    lanes.leave((kernel, lane))
    assert len(started) == 1
    assert codes == [tf.errors.ABORTED, tf.errors.CANCELLED, tf.errors.CANCELLED]


class Meeting(FakeEngine):
    """An engine whose ranks meet at the end of a settlement; ``met`` tells how, and whether ``late`` was done then."""

    def __init__(self, late):
        super().__init__()
        self.met = []
        self._late = late

    def submit(self, *arguments):
        self.met.append(self._late.done)
        return super().submit(*arguments)


def test_a_settlement_waits_for_a_thread_that_has_submitted_and_is_not_followed_yet(completer, monkeypatch):
    """The thread sleeps in between until the settlement waits for it, or is over."""
    late, told, awaits = FakeWork(), threading.Event(), threading.Event()
    engine, waiting = Meeting(late), module.Completer._await_submissions

    def await_submissions(*arguments):
        awaits.set()
        waiting(*arguments)

    def start(*arguments):
        cause = disagreement(engine, step=7)
        cause.done = awaits.set
        completer.follow(cause)
        assert awaits.wait(SECONDS)
        return [late]

    monkeypatch.setattr(module.Completer, "_await_submissions", await_submissions, raising=False)
    monkeypatch.setattr(beginnings, "completer", completer)
    monkeypatch.setattr(beginnings, "_lanes", lanes := Lanes())
    monkeypatch.setattr(beginnings.basics, "engine", lambda: engine)
    kernel, lane, context = Kernel(), Lane(), FakeContext(7)
    kernel.start = start
    lanes.enter((kernel, lane), lambda: beginnings._submit(kernel, context, told.set, lane))
    assert told.wait(SECONDS)
    assert context.code == tf.errors.CANCELLED
    assert engine.met == [True]


def test_a_start_that_fails_keeps_no_settlement_waiting(completer, monkeypatch):
    (lanes, kernel), lane = refusing(monkeypatch, completer, []), Lane()
    lanes.enter((kernel, lane), lambda: beginnings._submit(kernel, FakeContext(8), lambda: None, lane))
    assert not completer._submitting


class FakeJoin:
    """A join that ends when it is ``released``."""

    process_set = SimpleNamespace(process_set_id=0)

    def __init__(self):
        self.waits, self.released, self.outputs = threading.Event(), threading.Event(), []

    def wait(self, engine):
        self.waits.set()
        assert self.released.wait(SECONDS)
        return 1

    def put(self, context, last):
        self.outputs.append(last)


class Joining:
    """A run of ``kernel`` in the step 9, on a thread as that of a kernel; ``told`` when TensorFlow hears of its end."""

    def __init__(self, kernel):
        self.kernel, self.context, self.told = kernel, FakeContext(9), threading.Event()
        self.thread = threading.Thread(target=beginnings._wait, args=(kernel, self.context, self.told.set), daemon=True)
        self.thread.start()
        assert kernel.waits.wait(SECONDS)

    def release(self):
        self.kernel.released.set()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


@pytest.fixture
def joining(completer, monkeypatch):
    monkeypatch.setattr(beginnings, "completer", completer)
    monkeypatch.setattr(beginnings.basics, "engine", FakeEngine)
    joining = Joining(FakeJoin())
    yield joining
    joining.release()


def give_up(completer):
    completer.give_up(9)


def fail(completer):
    completer.follow(run_of(FakeEngine(), FailedWork(), step=9)[0])


def disagree(completer):
    completer.follow(disagreement(FakeEngine(), step=9))


@pytest.mark.parametrize("way", [give_up, fail, disagree])
def test_a_join_ends_with_another_node_of_its_step_that_fails(completer, joining, way):
    """The other ranks may not join for a long time; the thread waits for them, and sets no output."""
    way(completer)
    assert joining.told.wait(SECONDS)
    assert joining.context.code == tf.errors.CANCELLED
    joining.told.clear()
    joining.release()
    assert not joining.kernel.outputs
    assert not joining.told.is_set()


def test_a_join_gives_its_output_when_its_step_goes_on(completer, joining):
    completer.give_up(8)
    joining.release()
    assert joining.told.is_set()
    assert joining.kernel.outputs == [1]
    assert joining.context.code is None


def test_a_join_that_comes_after_a_failure_is_not_made(completer, monkeypatch):
    monkeypatch.setattr(beginnings, "completer", completer)
    monkeypatch.setattr(beginnings.basics, "engine", FakeEngine)
    completer.give_up(9)
    kernel, context, told = FakeJoin(), FakeContext(9), threading.Event()
    beginnings._wait(kernel, context, told.set)
    assert told.is_set()
    assert context.code == tf.errors.CANCELLED
    assert not kernel.waits.is_set()
